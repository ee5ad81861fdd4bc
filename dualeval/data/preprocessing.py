"""What is done to an image before a model sees it: part of the job, because it belongs to the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from dualeval.errors import UsageError, with_type
from dualeval.options.choices import check_choice, check_count, check_mean, check_std

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
CHANNELS = (1, 3)
# Kinds of pictures where one may give the size of all.
_TRIED = 8
RESIZE_MODES = ("shorter", "squash", "inside", "cover")
CROP_ROUNDINGS = ("nearest", "down")
CHANNEL_ORDERS = ("rgb", "bgr")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """What is done to the pixels of an image that is taken in its own size."""

    # Per channel, of pixels scaled to [0, 1].
    mean: tuple[float, ...] = IMAGENET_MEAN
    # Per channel, of pixels scaled to [0, 1].
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        check_mean("--mean", self.mean)
        check_std("--std", self.std)

    def __str__(self) -> str:
        """In words for people."""
        if (self.mean, self.std) == (IMAGENET_MEAN, IMAGENET_STD):
            return "ImageNet mean and std"
        return f"mean {_channels(self.mean)}, std {_channels(self.std)}"


def _channels(values: tuple[float, ...] | tuple[int, ...]) -> str:
    return ",".join(str(value) for value in (values[:1] if len(set(values)) == 1 else values))


@dataclass(frozen=True, kw_only=True)
class Preprocessing(Normalisation):
    """Resize, crop and normalisation. The defaults are those of most ImageNet classifiers."""

    # Length in pixels that the shorter side is brought to; in other modes the height.
    resize: int = 256
    # Side in pixels of the square cut from the centre; where there is a `crop_width`, the height.
    crop: int = 224
    # One of `INTERPOLATIONS`; as Pillow computes them.
    interpolation: str = "bilinear"
    # 3 for RGB, 1 for grey.
    channels: int = 3
    # "shorter": the shorter side becomes `resize`. The others go by a height and a width: "squash" takes
    # exactly these, "inside" the largest picture of the same shape that fits in, "cover" the smallest that
    # covers them, both with rounded sides.
    resize_mode: str = "shorter"
    # The width beside the height `resize`; None: the same.
    resize_width: int | None = None
    # The width of the crop; None: the same as its height.
    crop_width: int | None = None
    # Where an odd number of pixels is left over, the crop begins at half of it, rounded to the "nearest" (to
    # the even one where both are as near; torchvision and timm) or "down" (transformers).
    crop_rounding: str = "nearest"
    # The colour of what a picture lacks of its crop, 0 to 255 a channel; None: black.
    padding: tuple[int, ...] | None = None
    # "bgr" for models that were trained with blue first.
    channel_order: str = "rgb"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("--resize", self.resize, 1)
        check_count("--crop", self.crop, 1)
        check_choice("--interpolation", self.interpolation, INTERPOLATIONS)
        check_choice("--channels", self.channels, CHANNELS)
        check_choice("resize_mode", self.resize_mode, RESIZE_MODES)
        check_count("resize_width", self.resize_width, 1)
        check_count("crop_width", self.crop_width, 1)
        check_choice("crop_rounding", self.crop_rounding, CROP_ROUNDINGS)
        check_choice("channel_order", self.channel_order, CHANNEL_ORDERS)

    @property
    def resize_size(self) -> tuple[int, int]:
        """Height and width of the resize, in pixels."""
        return self.resize, self.resize_width or self.resize

    @property
    def crop_size(self) -> tuple[int, int]:
        """Height and width of the crop, in pixels."""
        return self.crop, self.crop_width or self.crop

    def __str__(self) -> str:
        """In words for people."""
        resize = {
            "shorter": f"{self.resize}",
            "squash": f"exactly {_size(self.resize_size)}",
            "inside": f"inside of {_size(self.resize_size)}",
            "cover": f"covering {_size(self.resize_size)}",
        }[self.resize_mode]
        square = self.crop_width in (None, self.crop)
        crop = f"crop {self.crop if square else _size(self.crop_size)}"
        padded = "" if self.padding is None else f" padded with {_channels(self.padding)}"
        return f"{_colours(self)}{resize} {self.interpolation}, {crop}{padded}, {super().__str__()}"

    def to_json(self) -> dict[str, Any]:
        """Every field by name; what torchvision's models do without is there only where it is used."""
        return {
            name: value for name, value in asdict(self).items() if name not in _LATER or value != _LATER[name]
        }


@dataclass(frozen=True, kw_only=True)
class Uncropped(Normalisation):
    """Normalisation of whole pictures, resized or not; its fields are those of ``Preprocessing``."""

    # None: each picture keeps its own size.
    resize: int | None = None
    interpolation: str = "bilinear"
    channels: int = 3
    # "shorter" or "squash".
    resize_mode: str = "shorter"
    resize_width: int | None = None
    channel_order: str = "rgb"

    def __post_init__(self) -> None:
        self.of_size(1, 1)

    def of_size(self, height: int, width: int) -> Preprocessing:
        """The preprocessing that brings a whole picture to a size, and checks the fields."""
        fields = {**asdict(self), "resize_mode": "squash", "resize": height, "resize_width": width}
        return Preprocessing(**fields, crop=height, crop_width=width)

    def __str__(self) -> str:
        """In words for people."""
        size = "own size" if self.resize is None else f"shorter side {self.resize} {self.interpolation}"
        if self.resize is not None and self.resize_mode == "squash":
            size = f"exactly {_size((self.resize, self.resize_width or self.resize))} {self.interpolation}"
        return f"{_colours(self)}{size}, {super().__str__()}"


@dataclass(frozen=True, kw_only=True)
class OwnPreprocessing(Normalisation):
    """A function of the user's, from a PIL picture (RGB) to a tensor (channels, height, width)."""

    function: Callable[[Any], Tensor]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __str__(self) -> str:
        """The function's name, or its class's."""
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))


def shape_of(
    wanted: Normalisation, name: str, read: Callable[[int], Tensor], count: int
) -> tuple[int, int, int]:
    """Channels, height and width of every picture; where ``wanted`` sets no size, those of the first one."""
    if isinstance(wanted, Preprocessing):
        return (wanted.channels, *wanted.crop_size)
    first: Exception | None = None
    for index in range(min(count, _TRIED)):
        try:
            channels, height, width = read(index).shape
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - of one that is damaged, which the loop names; or of all
            first = first or error
        else:
            return channels, height, width
    assert first is not None
    raise UsageError(
        f"the first picture, {name}, cannot be prepared ({with_type(first)}). Expected a tensor of shape "
        "(channels, height, width)."
    ) from first


def _colours(wanted: Preprocessing | Uncropped) -> str:
    return "grey, " * (wanted.channels == 1) + "BGR, " * (wanted.channel_order == "bgr")


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


# Fields that came later: at their defaults they are no part of a job's identity, which is as it was.
_LATER = {
    field.name: field.default
    for field in fields(Preprocessing)
    if field.name
    in ("resize_mode", "resize_width", "crop_width", "crop_rounding", "padding", "channel_order")
}
# What each job says of its preprocessing, with None for what is not done.
STEPS = tuple(field.name for field in fields(Preprocessing) if field.name not in _LATER)
