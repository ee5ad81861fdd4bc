"""Which preprocessing a job has: what was asked for, and where the rest comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dualeval.data.preprocessing import STEPS, Normalisation, Preprocessing
from dualeval.errors import UsageError
from dualeval.models.sources import ModelSource, WeightsSource


@dataclass(frozen=True, kw_only=True)
class ChosenPreprocessing:
    """The preprocessing of a job.

    Attributes:
        values: what is done; more than normalisation for image files alone.
        origin: where the values come from, in words for people.
    """

    values: Normalisation
    origin: str

    @property
    def of_files(self) -> Preprocessing:
        """The values for image files."""
        assert isinstance(self.values, Preprocessing), "these images are taken in their own size"
        return self.values

    def to_json(self) -> dict[str, Any]:
        """What is done, by the fields of ``Preprocessing``; None for what is not."""
        values = self.values
        done = values.to_json() if isinstance(values, Preprocessing) else asdict(values)
        return {**dict.fromkeys(STEPS), **done}


def choose_for_files(
    model: ModelSource, source: WeightsSource, asked: Mapping[str, Any]
) -> ChosenPreprocessing:
    """Choose for image files: what was asked for, and else what belongs to weights and model.

    Args:
        model: where the model comes from.
        source: its weights.
        asked: fields of ``Preprocessing``.

    Raises:
        UsageError: there is no such interpolation; the crop is larger than what it is cut from, and not both
            were asked for; or images are grey, and mean and standard deviation were not asked for.
    """
    if asked.get("channels") == 1 and not {"mean", "std"} <= asked.keys():
        raise UsageError(
            "--channels 1 needs --mean and --std: ImageNet's are those of three colours. Give the values of "
            "the model's training, for grey pixels scaled to [0, 1], as in --mean 0.5 --std 0.5."
        )
    own = model.preprocessing(source)
    if "resize" in asked:  # of the shorter side, whatever the model's is of
        own = replace(own, resize_mode="shorter", resize_width=None, padding=None)
    if "crop" in asked:
        own = replace(own, crop_width=None)
    values = replace(own, **asked)
    if not {"resize", "crop"} <= asked.keys() and values.padding is None:
        _refuse_borders(values, "crop" if "resize" in asked else "resize")
    origin = _origin(Preprocessing, asked, model.preprocessing_origin(source))
    return ChosenPreprocessing(values=values, origin=origin)


def _refuse_borders(values: Preprocessing, other: str) -> None:
    """Refuse a crop that is larger than what it is cut from; ``other`` is the option to give as well."""
    for crop, resize in zip(values.crop_size, values.resize_size, strict=True):
        least = values.resize if values.resize_mode == "shorter" else resize
        if crop > least:
            raise UsageError(
                f"the crop of {crop} pixels is larger than the {least} that the shorter side is "
                f"resized to, so images would get black borders. Give --{other} as well; where both --resize "
                "and --crop are given, borders are allowed."
            )


def wants_resizing(asked: Mapping[str, Any]) -> bool:
    """Whether small images are to be brought to another size."""
    return bool({"resize", "crop"} & asked.keys())


def choose_for_small(
    described: str,
    shape: tuple[int, int, int],
    known: tuple[Normalisation, str] | None,
    asked: Mapping[str, Any],
) -> ChosenPreprocessing:
    """Choose for small images, such as idx files, that are taken in their own size.

    Args:
        described: the images, for messages.
        shape: channels, height and width of each.
        known: the values where they are known, and why; None where they have to be asked for.
        asked: fields of ``Preprocessing``, without resize and crop.

    Returns:
        Normalisation alone; where other channels are asked for, a ``Preprocessing`` that keeps the size.

    Raises:
        UsageError: a field has no meaning here, or mean or standard deviation are not known.
    """
    channels, height, width = shape
    if "interpolation" in asked:
        raise UsageError(
            f"--interpolation has no meaning for the {described}: their images are evaluated in their own "
            f"size, {height} x {width}. Leave it out, or give --resize and --crop."
        )
    missing = [f"--{name}" for name in _names(Normalisation) if name not in asked]
    if missing and known is None:
        raise UsageError(
            f"the {described} need {' and '.join(missing)}: these belong to the weights, and "
            "nothing tells which ones this model was trained with. Give the values of its training, for "
            "pixels scaled to [0, 1], as in --mean 0.5 --std 0.5. (With --resize and --crop they are "
            "prepared as picture files are.)"
        )
    base, why = known or (Normalisation(), "")
    others = {name: value for name, value in asked.items() if name != "channels"}
    values = replace(base, **others)
    if asked.get("channels") not in (None, channels):
        if height != width:
            raise UsageError(
                f"--channels {asked['channels']} for the {described} of {height} x {width} pixels: give "
                "--resize and --crop, too, which make squares."
            )
        values = Preprocessing(
            resize=height, crop=width, channels=asked["channels"], mean=values.mean, std=values.std
        )
    return ChosenPreprocessing(values=values, origin=_origin(Normalisation, others, why))


def _names(kind: type[Normalisation]) -> list[str]:
    return [field.name for field in fields(kind)]


def _origin(kind: type[Normalisation], asked: Mapping[str, Any], others: str) -> str:
    """Which values were asked for, and where the others come from."""
    given = [name for name in ("channels", "resize", "interpolation", "crop", "mean", "std") if name in asked]
    if not given:
        return others
    if {*_names(kind)} & {*STEPS} - {"channels"} <= {*given}:
        return "given"
    *most, last = given
    return f"{', '.join(most)}{' and ' if most else ''}{last} given, else {others}"
