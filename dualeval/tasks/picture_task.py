"""What the tasks on pictures have in common: a model with its weights, and the scale of pixels."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.data.preprocessing import OwnPreprocessing
from dualeval.errors import DualevalError, UsageError
from dualeval.models.sources import Loading, ModelSource
from dualeval.models.weights import (
    LoadedWeights,
    notes_of,
    options_of,
    place_in_file,
    refuse_choice_without_file,
)
from dualeval.tasks import Task
from dualeval.tasks.image_preprocessing import ChosenPreprocessing
from dualeval.tasks.image_refusals import refused_images
from dualeval.tasks.options import PictureOptions


class PictureTask(Task):
    """A model by a value of ``--model`` on pictures; ``_preprocessing`` is set by the task."""

    libraries = ("torchvision", "pillow")
    _preprocessing: ChosenPreprocessing

    def __init__(self, model: ModelSource, weights: str | None, given: PictureOptions) -> None:
        if weights is None and model.needs_weights:
            own = ", --weights DEFAULT (the library's own)" if model.publishes_weights else ""
            raise UsageError(
                f"--model {model.name} was given without --weights. Give --weights PATH{own} or --weights "
                "random:SEED (untrained)."
            )
        key, prefix = given.weights_key, given.weights_prefix
        refuse_choice_without_file(given.weights, key, prefix, model.trust and not model.needs_trust)
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
                return run(_for_a_trial(model))
        except (DualevalError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of the model's own code any
            raise refused_images(error, self._model.name, model, images, size) from error

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

    def notes(self) -> list[str]:
        return [*self._model.notes(), *notes_of(self.loaded_weights), *self._late_notes]

    def sources(self) -> list[Any]:
        wanted = self._preprocessing.values
        own = [wanted.function] if isinstance(wanted, OwnPreprocessing) else []
        return [*self._model.sources(), *own]

    def _model_options(self) -> dict[str, Any]:
        path = self._source.path
        return {
            "model": self._model.name,
            **({"model_arg": self._arguments()} if self._model.arguments else {}),
            "weights": self._source.text if path is None else str(path.absolute()),
            **options_of(self.loaded_weights),
            "trust_checkpoint": self._model.trust,
        }

    def _described_weights(self) -> str:
        source = self._source
        if source.path is None:
            return source.text if source.seed is None else f"{source.text}, untrained"
        path = f"{source.path}{place_in_file(self.loaded_weights)}"
        return path if source.entry is None else f"{source.entry}, {path}"

    def _arguments(self) -> list[str]:
        return [f"{name}={value!r}" for name, value in sorted(self._model.arguments.items())]

    def _model_identity(self) -> dict[str, Any]:
        return {
            "model": self._model.identity,
            **({"model_arguments": self._arguments()} if self._model.arguments else {}),
        }


def _for_a_trial(model: nn.Module) -> nn.Module:
    """A copy of the modules that shares their tensors: what a forward keeps is no part of the model."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    try:
        return copy.deepcopy(model, shared)
    except Exception:  # noqa: BLE001 - whatever stands in the way; it is then tried itself
        return model
