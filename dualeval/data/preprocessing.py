"""What is done to an image before a model sees it: part of the job, because it belongs to the weights."""

from __future__ import annotations

from dataclasses import dataclass

from dualeval.choices import check_choice, check_count, check_mean, check_std

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
CHANNELS = (1, 3)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """What is done to the pixels of an image that is taken in its own size.

    Attributes:
        mean: per channel, of pixels scaled to [0, 1].
        std: per channel, of pixels scaled to [0, 1].

    Raises:
        UsageError: these are no such values.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        check_mean("--mean", self.mean)
        check_std("--std", self.std)

    def __str__(self) -> str:
        """In words for people."""
        if (self.mean, self.std) == (IMAGENET_MEAN, IMAGENET_STD):
            return "ImageNet mean and std"
        return f"mean {_channels(self.mean)}, std {_channels(self.std)}"


def _channels(values: tuple[float, ...]) -> str:
    return ",".join(str(value) for value in (values[:1] if len(set(values)) == 1 else values))


@dataclass(frozen=True, kw_only=True)
class Preprocessing(Normalisation):
    """Resize, crop and normalisation. The defaults are those of most ImageNet classifiers.

    Attributes:
        resize: length in pixels that the shorter side is brought to.
        crop: side in pixels of the square cut from the centre.
        interpolation: one of ``INTERPOLATIONS``; as Pillow computes them.
        channels: 3 for RGB, 1 for grey.

    Raises:
        UsageError: these are no such values.
    """

    resize: int = 256
    crop: int = 224
    interpolation: str = "bilinear"
    channels: int = 3

    def __str__(self) -> str:
        """In words for people."""
        grey = "grey, " if self.channels == 1 else ""
        return f"{grey}{self.resize} {self.interpolation}, crop {self.crop}, {super().__str__()}"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("--resize", self.resize, 1)
        check_count("--crop", self.crop, 1)
        check_choice("--interpolation", self.interpolation, INTERPOLATIONS)
        check_choice("--channels", self.channels, CHANNELS)
