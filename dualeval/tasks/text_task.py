"""What the tasks on texts have in common: a model with its tokenizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.models import text_models
from dualeval.models.generation import Way, is_of_library, logits_of, way_of
from dualeval.models.text_models import TextModel, Use
from dualeval.models.weights import LoadedWeights, warnings_of
from dualeval.tasks import Task
from dualeval.tasks.options.base import TextOptions
from dualeval.tasks.refusals import copy_sharing_tensors

# Tokens on which it is tried what a model keeps of earlier ones.
_FEW = 8
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


class CausalTask(TextTask):
    """A causal language model, which is tried on tokens."""

    _tokens: text_models.CausalTokens
    # How many tokens it knows; set by ``_tried_width``.
    _known: int
    # Whether it has an encoder, which reads the prompts.
    _is_encoded = False

    def _tried_width(self, model: nn.Module, length: int) -> int:
        """Try the model on texts of up to so many tokens; returns the width of its logits."""
        self._known = text_models.known_tokens(self._model.folder, model, self._tokens.fast)
        # Of all tokens also the last one: met in the midst of a run, one too many would end a GPU's context.
        logits = self._try_out(model, torch.tensor([[0, self._known - 1], [0, 0]]))
        if not self._is_encoded:
            self._check_causal(logits)
        return self._try_out(model, torch.zeros((1, length), dtype=torch.int64)).shape[2]

    def _way_of(self, model: nn.Module, length: int) -> Way:
        """How the model is asked for the next token, tried on a few tokens."""
        return way_of(model, torch.arange(2 * min(_FEW, length)).view(2, -1) % self._known)

    def _check_causal(self, logits: Tensor) -> None:
        """Refuse a model that reads what follows a token: it would see the tokens that it predicts."""
        first = logits[:, 0].float()
        if (difference := (first[0] - first[1]).abs().max()) > 1e-5 + 1e-3 * first.abs().max():
            raise UsageError(
                f"the model in {self._model.folder} is not causal: the logits of a token differ by "
                f"{difference:.2g} with the token that follows it, so it sees what it has to predict. Give a "
                "causal language model, such as one of GPT's or Llama's kind."
            )

    def _try_out(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """The logits of some tokens, checked for their shape."""
        folder, count, shape = self._model.folder, self._known, tuple(tokens.shape)
        arguments: dict[str, Any] = {"use_cache": False} if is_of_library(model) else {}
        if self._is_encoded:
            arguments["decoder_input_ids"] = tokens
        try:
            logits = logits_of(text_models.try_out(folder, lambda: model(tokens, **arguments), shape[1]))
        except UsageError as error:
            raise UsageError(
                f"{error}. Either its tokenizer is another model's (it tells {count} tokens apart), or the "
                "model takes fewer tokens: give --max-length."
            ) from error
        logits_shape = tuple(getattr(logits, "shape", ()))
        if len(logits_shape) != 3 or logits_shape[:2] != shape or logits_shape[2] < count:
            raise UsageError(
                f"the model in {folder} gave {logits_shape or type(logits).__name__} for tokens of shape "
                f"{shape}: expected logits of shape {(*shape, count)} or more, as its tokenizer tells "
                f"{count} tokens apart. Give a model and a tokenizer that belong together."
            )
        assert isinstance(logits, Tensor)
        return logits
