"""What the tasks on texts have in common: a model with its tokenizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualeval.models.text_models import TextModel, Use
from dualeval.models.weights import LoadedWeights, warnings_of
from dualeval.tasks import Task
from dualeval.tasks.options.base import TextOptions
from dualeval.tasks.refusals import copy_sharing_tensors

# A folder, or from Python a module or what returns one.
Model = str | Path | nn.Module | Callable[[], nn.Module]


class TextTask(Task):
    """A model of texts, which a task keeps as ``_model`` and tries before the loop."""

    def __init__(self, model: Model, tokenizer: str | Path | None, use: Use, options: TextOptions) -> None:
        self._model = TextModel(
            model,
            use,
            tokenizer=tokenizer,
            weights=options.weights,
            weights_key=options.weights_key,
            weights_prefix=options.weights_prefix,
            trust=options.trust_checkpoint,
            adapter=options.adapter,
        )

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("transformers", "tokenizers", *(["peft"] if self._model.has_adapter else []))

    @abstractmethod
    def _try(self, model: nn.Module, device: torch.device) -> None:
        """Try a copy of the model on the CPU, for batches on this device."""

    def build_model(self, device: torch.device) -> nn.Module:
        """Make the model, try it on texts of full length, and bring it to its device."""
        return self._tried(self._model.build(), device).to(device)

    def build_late(self, device: torch.device) -> nn.Module:
        """As ``build_model``, on the CPU: the values of the parameters stay in their files where they can."""
        return self._tried(self._model.build_late(), device)

    def _tried(self, model: nn.Module, device: torch.device) -> nn.Module:
        versions = [parameter._version for parameter in model.parameters()]
        tried = copy_sharing_tensors(model)
        self._try(tried, device)
        # What a first forward has written into the weights is there for good: the copy knows of it.
        return model if versions == [parameter._version for parameter in model.parameters()] else tried

    @property
    def loaded_weights(self) -> LoadedWeights | None:
        """What was taken from a file that ``weights`` names."""
        return self._model.loaded

    def notes(self) -> list[str]:
        return self._model.notes()

    def data_warnings(self) -> list[str]:
        return [*super().data_warnings(), *warnings_of(self.loaded_weights)]

    def sources(self) -> list[Any]:
        return self._model.sources()
