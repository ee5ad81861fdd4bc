"""What the tasks on pictures have in common: the model of ``--model`` with its weights and preprocessing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.data.preprocessing import STEPS, Normalisation, OwnPreprocessing, Preprocessing, Uncropped
from dualeval.errors import DualevalError, UsageError
from dualeval.messages import nearest
from dualeval.models.sources.source import Loading, ModelSource, WeightsSource
from dualeval.models.weights import (
    LoadedWeights,
    full_name,
    notes_of,
    options_of,
    place_in_file,
    refuse_choice_without_file,
    warnings_of,
)
from dualeval.tasks import Task, place_of
from dualeval.tasks.options.base import PictureOptions
from dualeval.tasks.refusals import copy_sharing_tensors, refused_images
from dualeval.urls import url_of

# What decides the numbers of picture files, and is never assumed.
NEEDED = ("resize", "crop", "mean", "std")


@dataclass(frozen=True, kw_only=True)
class ChosenPreprocessing:
    """The preprocessing of a job."""

    # What is done; more than normalisation for image files alone.
    values: Normalisation
    # Where the values come from, in words for people.
    origin: str
    # Why others may be right; "" where somebody has named these.
    warning: str = ""

    def to_json(self) -> dict[str, Any]:
        """What is done, by the fields of ``Preprocessing``; None for what is not."""
        values = self.values
        if isinstance(values, Uncropped):
            return asdict(values)
        if isinstance(values, OwnPreprocessing):
            return {**dict.fromkeys(STEPS), "function": str(values)}
        done = values.to_json() if isinstance(values, Preprocessing) else asdict(values)
        return {**dict.fromkeys(STEPS), **done}


def named_preprocessing(named: Any, origin: str) -> ChosenPreprocessing | None:
    """What ``--preprocessing`` or a model names: a word, FILE.py:function, a function, or fields."""
    values: Normalisation
    if named is None:
        return None
    if isinstance(named, str) and ":" in named:
        named = _function_at(named)
    if named == "none":
        values = Normalisation(mean=(0.0,), std=(1.0,))
    elif named == "imagenet":
        values = Preprocessing()
    elif isinstance(named, Preprocessing):
        values = named
    elif (
        isinstance(named, Mapping)
        and {*NEEDED} <= named.keys() <= {*_names(Preprocessing)}
        and all(named[name] is not None for name in NEEDED)
    ):
        arguments: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in named.items()}
        values = Preprocessing(**arguments)
    elif callable(named):
        values = OwnPreprocessing(function=named)
    else:
        raise UsageError(
            f"{origin}: found {named!r}, expected none, imagenet or FILE.py:FUNCTION; in Python also a "
            f"function, or a dict with {', '.join(NEEDED)}, and perhaps interpolation and channels."
        )
    return ChosenPreprocessing(values=values, origin=origin)


def _function_at(named: str) -> Any:
    place, _, name = named.rpartition(":")
    flag = f"--preprocessing {named}"
    from dualeval.user_code.importing import own_module

    module = own_module(place, flag)
    if not hasattr(module, name):
        raise UsageError(f"{flag}: {place} has no {name!r}.{nearest(name, dir(module))}")
    return getattr(module, name)


def _does_all(base: ChosenPreprocessing, asked: Mapping[str, Any]) -> bool:
    """Whether it is a function, beside which nothing can be asked for."""
    if (is_function := isinstance(base.values, OwnPreprocessing)) and asked:
        flag = f"--{next(iter(asked))}"
        raise UsageError(f"{flag}: the function {base.values} does it all. Leave {flag} out.")
    return is_function


def choose_for_files(
    model: ModelSource, source: WeightsSource, base: ChosenPreprocessing | None, asked: Mapping[str, Any]
) -> ChosenPreprocessing:
    """Choose for image files: what was asked for, and else what was named or is published for the model."""
    defaults = model.preprocessing(source) if base is None else None
    arguments = asked
    if base is not None:
        if _does_all(base, asked):
            return base
        if isinstance(base.values, Preprocessing):
            defaults = base.values
        elif not {"resize", "crop", "interpolation"} & asked.keys():
            origin = _origin(Normalisation, asked, base.origin)
            # Only grey ones are more than the pictures as they are: those jobs stay what they were.
            arguments = {**asdict(base.values), **asked}
            kind = Uncropped if arguments.get("channels") == 1 else Normalisation
            kept = {name: value for name, value in arguments.items() if name in _names(kind)}
            return ChosenPreprocessing(values=kind(**kept), origin=origin)
        else:
            arguments = {**asdict(base.values), **asked}
    if arguments.get("channels") == 1 and not {"mean", "std"} <= arguments.keys():
        raise UsageError(
            "--channels 1 needs --mean and --std: ImageNet's are for three colours. Give the values of the "
            "model's training, for grey pixels scaled to [0, 1], as in --mean 0.5 --std 0.5."
        )
    missing = [f"--{name}" for name in NEEDED if name not in arguments]
    if missing and base is not None and defaults is None:
        raise UsageError(
            f"--{next(iter(asked))}: {base.origin} leaves pictures in their own size. Give "
            f"{' and '.join(missing)}, too, as in --resize 64 --crop 64."
        )
    if missing and defaults is None:
        raise UsageError(
            f"--model {model.name}: nothing says how its pictures are prepared (missing: "
            f"{', '.join(missing)}). Wrong values give wrong metrics: give those of the model's training. "
            "Type --preprocessing none (pictures as they are, scaled to [0, 1]), --preprocessing imagenet "
            "(resize 256, crop 224, ImageNet's mean and std), --preprocessing FILE.py:FUNCTION (from a PIL "
            "picture to a tensor), or each value, as in --resize 64 --crop 64 --mean 0 --std 1. In Python "
            'these are arguments, as preprocessing="imagenet".'
        )
    defaults = defaults or Preprocessing()
    if "resize" in asked:  # of the shorter side, whatever the model's is of
        defaults = replace(defaults, resize_mode="shorter", resize_width=None, padding=None)
    if "crop" in asked:
        defaults = replace(defaults, crop_width=None)
    values = replace(defaults, **arguments)
    if len({"resize", "crop"} & asked.keys()) == 1 and values.padding is None:
        _refuse_borders(values, "crop" if "resize" in asked else "resize")
    others = model.preprocessing_origin(source) if base is None else base.origin
    warning = ""
    # Weights that came under a name, or with the model, have their own; random ones need none.
    if missing and base is None and source.text and source.seed is None and source.entry is None:
        warning = (
            f"the preprocessing is the default of {model.name} ({values}): nothing says what {source.text} "
            "was trained with. Other values change the metrics: give --resize, --crop, --mean and --std of "
            "its training, even if they equal the default's."
        )
    return ChosenPreprocessing(values=values, origin=_origin(Preprocessing, asked, others), warning=warning)


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


def choose_for_small(
    data_name: str,
    shape: tuple[int, int, int],
    known: tuple[Normalisation, str] | None,
    asked: Mapping[str, Any],
) -> ChosenPreprocessing:
    """Choose for small images, such as idx files, that are taken in their own size."""
    channels, height, width = shape
    if "interpolation" in asked:
        raise UsageError(
            f"--interpolation does not apply to the {data_name}: their images are evaluated in their own "
            f"size, {height} x {width}. Leave it out, or give --resize and --crop."
        )
    missing = [f"--{name}" for name in _names(Normalisation) if name not in asked]
    if missing and known is None:
        raise UsageError(
            f"the {data_name} need {' and '.join(missing)}: these belong to the weights, and nothing tells "
            "which ones this model was trained with. Give the values of its training, for pixels scaled to "
            "[0, 1], as in --mean 0.5 --std 0.5; --preprocessing none stands for 0 and 1. (With --resize "
            "and --crop they are prepared like picture files.)"
        )
    base, why = known or (Normalisation(), "")
    others = {name: value for name, value in asked.items() if name != "channels"}
    values = replace(base, **others)
    if asked.get("channels") not in (None, channels):
        if height != width:
            raise UsageError(
                f"--channels {asked['channels']} for the {data_name} of {height} x {width} pixels: give "
                "--resize and --crop, too, which make squares."
            )
        values = Preprocessing(
            resize=height, crop=width, channels=asked["channels"], mean=values.mean, std=values.std
        )
    return ChosenPreprocessing(values=values, origin=_origin(Normalisation, others, why))


def choose_uncropped(
    model: ModelSource,
    weights: WeightsSource,
    num_classes: int | None,
    named: Any,
    asked: Mapping[str, Any],
    published_uncropped: Callable[[ModelSource, WeightsSource], tuple[Uncropped, str] | None],
) -> ChosenPreprocessing:
    """As ``choose_for_files``, of pictures that stay whole and may have any size."""
    base, published = _uncropped(named, f"--preprocessing {named}"), None
    if base is None and not {"mean", "std"} <= asked.keys():
        base = _uncropped(*model.carried_preprocessing(weights, num_classes))
        published = published_uncropped(model, weights) if base is None else None
        if base is None and published is None:
            raise UsageError(
                f"--model {model.name}: nothing says how its pictures are prepared. Wrong values give wrong "
                "metrics: give those of the model's training. Type --preprocessing none (pictures as they "
                "are, scaled to [0, 1]), --preprocessing imagenet (own size, ImageNet's mean and std), "
                "--preprocessing FILE.py:FUNCTION (from a PIL picture to a tensor), or --mean M --std S, and "
                "--resize N where pictures were resized."
            )
    if base is not None and _does_all(base, asked):
        return base
    values, origin = published or (Uncropped(mean=(0.0,), std=(1.0,)), "given")
    if base is not None:
        assert isinstance(base.values, Uncropped)
        values, origin = base.values, base.origin
    warning = ""
    if published is not None and weights.path is not None and weights.entry is None and weights.text:
        warning = (
            f"the preprocessing is that of {model.name} ({values}): nothing says what {weights.text} was "
            "trained with. Other values change the metrics: give --resize, --mean and --std of its "
            "training, or --preprocessing none or imagenet for pictures in their own size."
        )
    if asked and origin != "given":
        origin = f"{', '.join(asked)} given; the rest: {origin}"
    if "resize" in asked:  # of the shorter side, whatever the model's is of
        values = replace(values, resize_mode="shorter", resize_width=None)
    return ChosenPreprocessing(values=replace(values, **asked), origin=origin, warning=warning)


def _uncropped(named: Any, origin: str) -> ChosenPreprocessing | None:
    """As ``named_preprocessing``; its words and fields stand for no crop here."""
    if isinstance(named, Mapping) and {"mean", "std"} <= named.keys() <= {*_names(Uncropped)}:
        arguments: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in named.items()}
        return ChosenPreprocessing(values=Uncropped(**arguments), origin=origin)
    chosen = named_preprocessing(named, origin)
    if chosen is None or isinstance(chosen.values, OwnPreprocessing):
        return chosen
    if isinstance(chosen.values, Preprocessing) and named != "imagenet":
        raise UsageError(
            f"{origin}: it cuts a part out of each picture, and masks are compared whole. Give a dict with "
            "mean and std, and perhaps resize, or a function of a PIL picture."
        )
    return replace(chosen, values=Uncropped(mean=chosen.values.mean, std=chosen.values.std))


def _names(kind: type[Normalisation]) -> list[str]:
    return [field.name for field in fields(kind)]


def _origin(kind: type[Normalisation], asked: Mapping[str, Any], others: str) -> str:
    """Which values were asked for, and where the others come from."""
    names = [name for name in ("channels", "resize", "interpolation", "crop", "mean", "std") if name in asked]
    if not names:
        return others
    if {*_names(kind)} & {*STEPS} - {"channels"} <= {*names}:
        return "given"
    *most, last = names
    return f"{', '.join(most)}{' and ' if most else ''}{last} given; the rest: {others}"


class PictureTask(Task):
    """A model by a value of ``--model`` on pictures; ``_preprocessing`` is set by the task."""

    libraries = ("torchvision", "pillow")
    _preprocessing: ChosenPreprocessing

    def __init__(self, model: ModelSource, weights: str | None, options: PictureOptions) -> None:
        if weights is None and model.needs_weights:
            default = ", --weights DEFAULT (the library's own)" if model.publishes_weights else ""
            raise UsageError(
                f"--model {model.name} was given without --weights. Give --weights PATH{default} or "
                "--weights random:SEED (untrained)."
            )
        key, prefix = options.weights_key, options.weights_prefix
        refuse_choice_without_file(options.weights, key, prefix, model.trust and not model.needs_trust)
        self._model = model
        self._source = model.find_weights(weights)
        self._loading = Loading(key=key, prefix=prefix, on_load=self._remember)
        # What was taken from a file that `weights` names; None before `build_model`, and where there is no
        # such file.
        self.loaded_weights: LoadedWeights | None = None
        self._scale: tuple[Tensor, Tensor] | None = None
        self._late_notes: list[str] = []

    def _remember(self, loaded: LoadedWeights) -> None:
        self.loaded_weights = loaded

    @abstractmethod
    def _built(self, build: Callable[..., nn.Module]) -> nn.Module:
        """The model with its weights, made by this method of its source."""

    @abstractmethod
    def _checked(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, tried on blank images; it has its weights and is on this device."""

    def _try_out(
        self,
        model: nn.Module,
        images: Tensor,
        run: Callable[[nn.Module], Tensor],
        size: str = "--resize and --crop",
    ) -> Tensor:
        """What a model gives for blank images; where it fails, what to type."""
        try:
            with torch.inference_mode():
                return run(copy_sharing_tensors(model))
        except (DualevalError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of the model's own code any
            wanted = self._preprocessing.values
            raise refused_images(error, self._model.name, model, images, size, wanted) from error

    def build_model(self, device: torch.device) -> nn.Module:
        """Make the model, give it its weights, and try it on a few blank images."""
        return self._checked(self._built(self._model.build).to(device), device)

    def build_late(self, device: torch.device) -> nn.Module:
        """As ``build_model``, on the CPU: the values of the parameters stay in their file where they can."""
        self._late_notes = []
        build = partial(self._model.build_late, note=self._late_notes.append)
        model = self._checked(self._built(build), torch.device("cpu"))
        self._scale = self._scale_on(device)
        return model

    def _scale_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, float32 (channels, 1, 1)."""
        wanted = self._preprocessing.values
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)
            for values in (wanted.mean, wanted.std)
        )
        return mean, std

    def _scaled(self, images: Tensor) -> Tensor:
        """Images as the model takes them: uint8 ones are normalised, float32 ones are ready."""
        assert self._scale is not None, "build_model comes first"
        mean, std = self._scale
        return images.float().div_(255).sub_(mean).div_(std) if images.dtype == torch.uint8 else images

    def check_batches(self, batch_size: int, samples: int) -> None:
        self._model.check_batches(batch_size, samples)

    def show(self, row: Mapping[str, Any]) -> Any:
        """The picture."""
        return self.dataset().picture(place_of(self.dataset(), row))

    def notes(self) -> list[str]:
        return [*self._model.notes(), *notes_of(self.loaded_weights), *self._late_notes]

    def data_warnings(self) -> list[str]:
        return [*filter(None, [self._preprocessing.warning]), *warnings_of(self.loaded_weights)]

    def sources(self) -> list[Any]:
        wanted = self._preprocessing.values
        functions = [wanted.function] if isinstance(wanted, OwnPreprocessing) else []
        return [*self._model.sources(), *functions]

    def _model_options(self) -> dict[str, Any]:
        path = self._source.path
        return {
            "model": self._model.name,
            **({"model_arg": self._arguments()} if self._model.arguments else {}),
            "weights": self._source.text if path is None else full_name(self._source.text, path),
            **options_of(self.loaded_weights),
            "trust_checkpoint": self._model.trust,
        }

    def _weights_description(self) -> str:
        source = self._source
        if source.path is None:
            return source.text if source.seed is None else f"{source.text}, untrained"
        path = f"{url_of(source.text) or source.path}{place_in_file(self.loaded_weights)}"
        return path if source.entry is None else f"{source.entry}, {path}"

    def _arguments(self) -> list[str]:
        return [f"{name}={value!r}" for name, value in sorted(self._model.arguments.items())]

    def _model_identity(self) -> dict[str, Any]:
        # Of a pack: its data's fingerprints are those of the files, from which other pixels may be made.
        pack = getattr(self.dataset(), "checksum", None)
        return {
            "model": self._model.identity,
            **({"pack": pack} if pack else {}),
            **({"model_arguments": self._arguments()} if self._model.arguments else {}),
        }
