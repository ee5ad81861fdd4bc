"""What is done to an image before a model sees it: part of the job, because it belongs to the weights."""

from __future__ import annotations

from dataclasses import dataclass

from dualeval.errors import UsageError

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resize, crop and normalisation. The defaults are those of most ImageNet classifiers.

    Attributes:
        resize: length in pixels that the shorter side is brought to.
        crop: side in pixels of the square cut from the centre.
        interpolation: one of ``INTERPOLATIONS``; as Pillow computes them.
        mean: per channel, of pixels scaled to [0, 1].
        std: per channel, of pixels scaled to [0, 1].

    Raises:
        UsageError: there is no such interpolation.
    """

    resize: int = 256
    crop: int = 224
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise UsageError(
                f"--interpolation {self.interpolation!r}: expected one of {', '.join(INTERPOLATIONS)}"
            )
