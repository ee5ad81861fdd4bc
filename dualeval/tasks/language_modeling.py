"""The task language-modeling: what a causal language model says of texts, choices and prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.columns import Column
from dualeval.data.cache import DataCache
from dualeval.data.language_rows import ANSWERS, CHOICES, DOCUMENTS, LanguageData, read_language_data
from dualeval.data.rows import PythonRows
from dualeval.data.token_windows import DocumentWindows
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.models.causal import CausalTokens, end_tokens, is_of_library, logits_of
from dualeval.models.text_models import TextModel, Use, read_tokenizer, try_out
from dualeval.models.transformers_folder import LOCAL, quiet, transformers_for
from dualeval.models.weights import LoadedWeights
from dualeval.options.choices import IGNORED, check_choice
from dualeval.tasks import Task
from dualeval.tasks.language_kinds import Answers, Choices, Documents, Kind, metrics_of_kind
from dualeval.tasks.scored_answers import chosen

USE = Use(name="language modeling", kind="AutoModelForCausalLM")
# Without --max-length: a model may see more, but its logits would take more memory than many have.
_LONGEST = 2048
_NEW_TOKENS = 32
_WORDS = {
    DOCUMENTS: "documents",
    CHOICES: "rows with choices",
    ANSWERS: "rows with prompt and answer",
}
# The options that only one kind of data has, and what they are where nobody gives them.
_OF_KIND: Mapping[str, tuple[str, Any]] = {
    "stride": (DOCUMENTS, None),
    "target_delimiter": (CHOICES, None),
    "max_new_tokens": (ANSWERS, None),
    "stop_at_newline": (ANSWERS, False),
    "ignore": (ANSWERS, IGNORED),
}


class LanguageModeling(Task):
    """A causal language model on documents, on rows with choices, or on rows with a prompt and its answer.

    Args:
        model: a folder with a model and its tokenizer, as ``save_pretrained`` writes them; or a module, or a
            function without arguments that returns one. One that is not of transformers gets token ids,
            int64 of shape (sequences, tokens), and returns logits of shape (sequences, tokens, vocabulary).
        data: a text file, a folder of such files, or a table; or rows as of ``datasets.load_dataset``.
        tokenizer: the folder of the tokenizer, where the model is no folder.
        metrics: names of metrics; none for all of the data's kind.
        cache: what other tasks of the run have read of their data.
        text: this and all others: as the options of ``dualeval run`` (docs/language-modeling.md).

    Raises:
        UsageError: options, model, tokenizer and data do not fit together.
    """

    name = "language-modeling"
    wants_workers = False
    libraries = ("transformers", "tokenizers")

    def __init__(
        self,
        *,
        model: str | Path | nn.Module | Callable[[], nn.Module],
        data: str | Path | PythonRows,
        tokenizer: str | Path | None = None,
        text: str | None = None,
        weights: str | None = None,
        weights_key: str | None = None,
        weights_prefix: str | None = None,
        trust_checkpoint: bool = False,
        metrics: Sequence[str] = (),
        max_length: int | None = None,
        stride: int | None = None,
        target_delimiter: str | None = None,
        max_new_tokens: int | None = None,
        stop_at_newline: bool = False,
        ignore: Sequence[str] = IGNORED,
        cache: DataCache | None = None,
    ) -> None:
        self._model = TextModel(
            model,
            USE,
            tokenizer=tokenizer,
            weights=weights,
            weights_key=weights_key,
            weights_prefix=weights_prefix,
            trust=trust_checkpoint,
        )
        self._data = _read(data, text, cache or DataCache())
        kind = self._data.kind
        own = {
            "stride": stride,
            "target_delimiter": target_delimiter,
            "max_new_tokens": max_new_tokens,
            "stop_at_newline": stop_at_newline,
            "ignore": tuple(ignore),
        }
        for name, (of, unset) in _OF_KIND.items():
            if own[name] != unset and of != kind:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for {_WORDS[of]}, and {self._data.of} has {_WORDS[kind]}. "
                    "Leave it out."
                )
        self._wanted = tuple(metrics) or tuple(metric.name for metric in metrics_of_kind(kind))
        chosen(self._wanted, metrics_of_kind(kind))
        self._text = text
        self._tokens = CausalTokens(read_tokenizer(self._model.folder, USE), self._model.folder)
        self._positions = _positions_of(model)
        if max_length is None and self._positions is None:
            raise UsageError(
                "the model does not say in a configuration how many tokens it sees at once: give --max-length N "
                "(max_length=N)."
            )
        self._max_length = min(self._positions or _LONGEST, _LONGEST) if max_length is None else max_length
        self._check_positions(self._positions)
        self._own: dict[str, Any] = {"max_length": self._max_length}
        self._kind = self._make_kind(own)

    def _make_kind(self, own: Mapping[str, Any]) -> Kind:
        """What is done with samples of the data's kind; the options that it has are kept."""
        length, rows = self._max_length, self._data.rows
        if rows is None:
            stride = length if own["stride"] is None else own["stride"]
            if stride > length:
                raise UsageError(
                    f"--stride {stride} is more than the {length} tokens of a window (--max-length): no window "
                    "can predict so many. Give a smaller one."
                )
            self._own["stride"] = stride
            windows = DocumentWindows(
                self._data.documents,
                self._tokens.fast,
                prefix=self._tokens.prefix,
                max_length=length,
                stride=stride,
            )
            return Documents(windows)
        if self._data.kind == CHOICES:
            delimiter = " " if own["target_delimiter"] is None else own["target_delimiter"]
            self._own["target_delimiter"] = delimiter
            return Choices(of=rows, tokens=self._tokens, max_length=length, delimiter=delimiter)
        most = own["max_new_tokens"] or _NEW_TOKENS
        if most >= length:
            raise UsageError(
                f"--max-new-tokens {most} leaves no room for a prompt: the model sees {length} tokens at once "
                "(--max-length). Give a smaller one."
            )
        ignored = () if own["ignore"] == ("none",) else own["ignore"]
        for each in ignored:
            check_choice("--ignore", each, (*IGNORED, "none"))
        at_newline = own["stop_at_newline"]
        self._own |= {"max_new_tokens": most, "stop_at_newline": at_newline, "ignore": list(ignored)}
        return Answers(
            of=rows,
            tokens=self._tokens,
            max_length=length,
            most=most,
            at_newline=at_newline,
            ignored=ignored,
        )

    @property
    def rows(self) -> tuple[str, ...]:
        """The columns that are kept of each sample."""
        return self._kind.rows

    @property
    def cluster(self) -> str | None:
        """The document, of windows."""
        return self._kind.cluster

    def dataset(self) -> Any:
        """Windows, or rows."""
        return self._kind.dataset()

    def collate(self, samples: Any) -> dict[str, Any]:
        """Join the sequences of a batch to groups of about one length."""
        return self._kind.collate(samples)

    def build_model(self, device: torch.device) -> nn.Module:
        """Make the model, try it on a window of full length, and bring it to its device."""
        return self._tried(self._model.build(), device).to(device)

    def build_late(self, device: torch.device) -> nn.Module:
        """As ``build_model``, on the CPU: the values of the parameters stay in their files where they can."""
        return self._tried(self._model.build_late(), device)

    @property
    def loaded_weights(self) -> LoadedWeights | None:
        """What was taken from a file that ``weights`` names."""
        return self._model.loaded

    def _tried(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._check_positions(_positions_of(model))
        folder, length, tokens = self._model.folder, self._max_length, self._tokens.count
        # Of all tokens also the last one: met in the midst of a run, one too many would end a GPU's context.
        self._try_out(model, torch.tensor([[0, tokens - 1]]))
        width = self._try_out(model, torch.zeros((1, length), dtype=torch.int64)).shape[2]
        if width < tokens:
            raise UsageError(
                f"the tokenizer in {folder} tells {tokens} tokens apart, its model only {width}. Give a model "
                "and a tokenizer that belong together."
            )
        kind = self._kind
        kind.of_library = is_of_library(model)
        if isinstance(kind, Answers):
            kind.stops = end_tokens(model, self._tokens.ends)
            last = [*kind.stops, *(self._tokens.with_newline(width) if kind.at_newline else ())]
            kind.ends = torch.zeros(width, dtype=torch.bool)
            kind.ends[last] = True
            kind.ends = kind.ends.to(device)
        return model

    def _try_out(self, model: nn.Module, tokens: Tensor) -> Tensor:
        folder, shape = self._model.folder, tuple(tokens.shape)
        given = {"use_cache": False} if is_of_library(model) else {}
        try:
            logits = logits_of(try_out(folder, lambda: model(tokens, **given), shape[1]))
        except UsageError as error:
            raise UsageError(
                f"{error}. Either its tokenizer is another model's (it tells {self._tokens.count} tokens "
                "apart), or the model takes fewer tokens: give --max-length."
            ) from error
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if not isinstance(logits, Tensor) or logits.ndim != 3 or found[:2] != shape:
            raise UsageError(
                f"the model in {folder} gave {found} for tokens of shape {shape}, expected logits of shape "
                f"{(*shape, 'tokens of the vocabulary')}"
            )
        return logits

    def _check_positions(self, positions: int | None) -> None:
        if positions is not None and self._max_length > positions:
            raise UsageError(
                f"--max-length {self._max_length} is more than the {positions} positions of the model in "
                f"{self._model.folder}. Give a smaller one."
            )

    def notes(self) -> list[str]:
        """Where in a checkpoint the weights were found, and what was removed from their names."""
        return self._model.notes()

    def forward(self, model: nn.Module, batch: Any) -> list[Any]:
        """The losses of each group of sequences, or greedy answers."""
        return self._kind.forward(model, batch)

    def observe(self, outputs: list[Any], batch: Any) -> dict[str, Any]:
        """The columns of each sample."""
        return self._kind.observe(outputs, batch)

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        """Scores of the choices and answers, and the names of documents."""
        return self._kind.postprocess(columns, samples)

    def metrics(self) -> Sequence[Metric | RowMetric]:
        """The metrics asked for, or all of the data's kind."""
        return chosen(self._wanted, metrics_of_kind(self._data.kind))

    def options(self) -> dict[str, Any]:
        """The options as they are used, those of the data's kind among them."""
        return {
            "metric": list(self._wanted),
            **self._model.options(),
            "data": self._data.source,
            "text": self._text,
            **self._own,
        }

    def description(self) -> dict[str, str]:
        """Model, weights, data, and how tokens are predicted."""
        length = f"at most {self._max_length} tokens"
        kind = self._data.kind
        said = {
            DOCUMENTS: ("samples", f"windows of {length}, stride {self._own.get('stride')}"),
            CHOICES: ("choices", f"{length} with their context"),
            ANSWERS: ("answers", f"greedy, at most {self._own.get('max_new_tokens')} tokens of {length[8:]}"),
        }
        label, words = said[kind]
        of = f"{len(self._data.documents):,} {_WORDS[kind]}" if kind == DOCUMENTS else _WORDS[kind]
        return {**self._model.description(), "data": f"{self._data.of}, {of}", label: words}

    def sources(self) -> list[Any]:
        """The function that made the model, where it has one."""
        return self._model.sources()

    def fingerprint(self) -> dict[str, Any]:
        """What the numbers depend on, besides data and weights."""
        stops = {"stops": self._kind.stops} if isinstance(self._kind, Answers) else {}
        return {
            "kind": self._data.kind,
            "config": self._model.fingerprint(),
            "tokenizer": self._tokens.fingerprint(),
            **self._own,
            **stops,
        }


def stored_metrics(options: Mapping[str, Any], names: Sequence[str]) -> Sequence[Metric | RowMetric]:
    """Metrics by name, for the rows of a run with these ``options``, which are its ``fingerprint()``."""
    return chosen(names, metrics_of_kind(options["kind"]))


def _read(data: str | Path | PythonRows, text: str | None, cache: DataCache) -> LanguageData:
    if not isinstance(data, str | Path):
        return read_language_data(data, text)
    key = ("language", Path(data).absolute(), text)
    return cache.once(key, lambda: read_language_data(data, text))


def _positions_of(model: Any) -> int | None:
    """How many tokens a model sees at once, by its configuration; None where it does not say it."""
    config = getattr(model, "config", None)
    if isinstance(model, str | Path):
        with quiet():
            try:
                config = transformers_for(USE.name).AutoConfig.from_pretrained(model, **LOCAL)
            except (OSError, ValueError):  # said when it is built
                return _LONGEST
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None
