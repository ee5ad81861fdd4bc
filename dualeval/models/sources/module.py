"""A module that is handed in from Python, in place of a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dualeval.errors import UsageError
from dualeval.models.sources import Loading, ModelSource, WeightsSource, refuse_arguments
from dualeval.models.sources.factory import carried_by


class ModuleModel(ModelSource):
    """A module, or a function without arguments that returns one; it has its weights."""

    needs_weights = False

    def __init__(self, model: nn.Module | Callable[[], nn.Module], arguments: Any, *, trust: bool) -> None:
        name = getattr(model, "__name__", type(model).__name__)
        super().__init__(name, arguments, trust=trust)
        refuse_arguments(name, arguments, "because it is a module already")
        if not callable(model):
            raise UsageError(f"model is a {name}: expected an nn.Module, or a function that returns one")
        self._model = model

    def find_weights(self, weights: str | None) -> WeightsSource:
        if weights is not None:
            raise UsageError(
                f"weights={weights!r}: the module {self.name} has its weights. Leave weights out."
            )
        return WeightsSource(text="as the module has them")

    def create(self, num_classes: int | None, *, entry: Any = None) -> nn.Module:
        model = self._model if isinstance(self._model, nn.Module) else self._model()
        if not isinstance(model, nn.Module):
            raise UsageError(f"{self.name}() returned a {type(model).__name__}: expected an nn.Module")
        return model

    def build(
        self, weights: WeightsSource, num_classes: int | None, loading: Loading | None = None
    ) -> nn.Module:
        # Before it is tried: in training mode batch norms would learn from that.
        return self.create(num_classes).eval()

    def why_whole(self, weights: WeightsSource) -> str | None:
        return "it is made in Python"

    def carried_preprocessing(self, weights: WeightsSource, num_classes: int | None) -> tuple[Any, str]:
        return carried_by(self.create(num_classes), self.name) or (None, "")

    def sources(self) -> list[Any]:
        return [] if isinstance(self._model, nn.Module) else [self._model]
