"""The task language-modeling: what a causal language model says of texts, choices and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from dualeval.columns.ragged import Column
from dualeval.data.cache import DataCache
from dualeval.data.language_rows import ANSWERS, CHOICES, DOCUMENTS, LanguageData, read_language_data
from dualeval.data.stores.path import path_at
from dualeval.data.table import PythonRows, TableOptions
from dualeval.data.token_groups import DocumentWindows, refuse_unknown
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.metric import chosen
from dualeval.models import text_models
from dualeval.models.transformers_folder import LOCAL, config_of, quiet, transformers_for
from dualeval.options.fields import of_python, with_keywords
from dualeval.tasks import place_of
from dualeval.tasks.keywords import LanguageModelingKeywords
from dualeval.tasks.language_kinds import Answers, Choices, Documents, metrics_of_kind
from dualeval.tasks.options.base import DRAWING
from dualeval.tasks.options.language_modeling import LanguageModelingOptions
from dualeval.tasks.text_task import CausalTask, Model

USE = text_models.Use(name="language modeling", kind="AutoModelForCausalLM")
# Without --max-length: a model may see more, but its logits would take more memory than many have.
_LONGEST = 2048
_WORDS = {DOCUMENTS: "documents", CHOICES: "rows with choices", ANSWERS: "rows with prompt and answer"}
# The options that only one kind of data has.
_KIND_OF = {
    **dict.fromkeys(("stride", "keep_losses"), DOCUMENTS),
    "target_delimiter": CHOICES,
    **dict.fromkeys(("max_new_tokens", "stop_at_newline", "stop", "think_end", "extract", "ignore"), ANSWERS),
    **dict.fromkeys(("temperature", "top_p", "answers_per_prompt", "answers_seed"), ANSWERS),
}


class LanguageModeling(CausalTask):
    """A causal language model on documents, on rows with choices, or on rows with a prompt and its answer.

    Args:
        model: a folder with a model and its tokenizer, as ``save_pretrained`` writes them; or a module, or a
            function without arguments that returns one. One that is not of transformers gets token ids,
            int64 of shape (sequences, tokens), and returns logits of shape (sequences, tokens, vocabulary).
        data: a text file, a folder of such files, or a table; or rows as of ``datasets.load_dataset``.
        tokenizer: the folder of the tokenizer, where the model is no folder.
        metrics: names of metrics; none for all of the data's kind.
        cache: what other tasks of the run have read of their data.
        options: the others of ``dualeval run``, by the same names (docs/language-modeling.md):
            weights, weights_key, weights_prefix, adapter, trust_checkpoint, text, quoting, keep, max_length,
            stride, keep_losses, target_delimiter, max_new_tokens, stop_at_newline, stop, think_end, extract,
            temperature, top_p, answers_per_prompt, answers_seed, ignore.

    Raises:
        UsageError: options, model, tokenizer and data do not fit together.
        TypeError: there is no such option.
    """

    name = "language-modeling"
    wants_workers = False

    @with_keywords(LanguageModelingKeywords, LanguageModelingOptions)
    def __init__(
        self,
        *,
        model: Model,
        data: str | Path | PythonRows,
        tokenizer: str | Path | None = None,
        metrics: Sequence[str] = (),
        cache: DataCache | None = None,
        **options: Unpack[LanguageModelingKeywords],
    ) -> None:
        if TYPE_CHECKING:  # for jedi, as in dualeval.evaluate
            LanguageModelingOptions(metric=(), **options)  # type: ignore[arg-type]
        settings = of_python(LanguageModelingOptions, options, metrics, model=Path(), data=Path())
        super().__init__(model, tokenizer, USE, settings)
        self._data = _read(data, settings, cache or DataCache())
        self._text, self._quoting = settings.text, settings.quoting
        of_kind = _of_kind(self._data, settings)
        self._metrics = chosen(metrics, metrics_of_kind(self._data.kind, of_kind))
        self._is_encoded = self._check_encoder(model)
        self._tokens = text_models.CausalTokens(
            text_models.read_tokenizer(self._model.folder, USE), self._model.folder
        )
        # Of a function: as in the folder of its tokenizer, which the model has to confirm.
        is_known = isinstance(model, str | Path | nn.Module)
        positions = _positions_of(model if isinstance(model, nn.Module) else self._model.base)
        self._called = self._model.base if isinstance(model, str | Path) else "the model"
        self._asked_length = settings.max_length
        self._max_length = settings.max_length or min(positions or _LONGEST, _LONGEST)
        if is_known or settings.max_length is None:
            self._check_positions(positions)
        self._options = {"max_length": self._max_length, **of_kind}
        self._kind = self._make_kind()

    def _make_kind(self) -> Documents | Choices | Answers:
        """What is done with samples of the data's kind."""
        length, options, rows, tokens = self._max_length, self._options, self._data.rows, self._tokens
        if rows is None:
            options["stride"] = length if options["stride"] is None else options["stride"]
            if options["stride"] > length:
                raise UsageError(
                    f"--stride {options['stride']} is more than the {length} tokens of a window "
                    "(--max-length): no window can predict so many. Give a smaller one."
                )
            windows = {"prefix": tokens.prefix, "max_length": length, "stride": options["stride"]}
            documents = self._data.documents
            texts = DocumentWindows(documents, tokens.fast, kept=self._data.kept, **windows)
            return Documents(
                texts, lambda at: tokens.pieces(documents[at].text), keep_losses="keep_losses" in options
            )
        if self._data.kind == CHOICES:
            return Choices(of=rows, tokens=tokens, **options)
        if options["max_new_tokens"] >= length:
            raise UsageError(
                f"--max-new-tokens {options['max_new_tokens']} leaves no room for a prompt: the model sees "
                f"{length} tokens at once (--max-length). Give a smaller one."
            )
        return Answers(of=rows, tokens=tokens, is_encoded=self._is_encoded, **options)

    def _check_encoder(self, model: Any) -> bool:
        """Whether the model has an encoder, and so can answer prompts, but predicts no other texts."""
        of_module = getattr(model, "config", None)
        of_folder = config_of(self._model.base) if isinstance(model, str | Path) else {}
        if not getattr(of_module, "is_encoder_decoder", of_folder.get("is_encoder_decoder", False)):
            return False
        if self._data.kind != ANSWERS:
            raise UsageError(
                f"the model in {self._model.base} has an encoder: expected rows with prompt and answer, and "
                f"{self._data.of} has {_WORDS[self._data.kind]}. For these give a causal language model."
            )
        self._model.use = replace(USE, kind="AutoModelForSeq2SeqLM")
        return True

    @property
    def rows(self) -> tuple[str, ...]:
        return self._kind.rows

    @property
    def cluster(self) -> str | None:
        return self._kind.cluster

    def dataset(self) -> Any:
        return self._kind.dataset()

    def collate(self, samples: Any) -> dict[str, Any]:
        batch = self._kind.collate(samples)
        for each in batch["groups"]:
            ids = [each] if isinstance(each, Tensor) else [each["inputs"], each["targets"]]
            refuse_unknown(ids, self._known)
        return batch

    def _try(self, model: nn.Module, device: torch.device) -> None:
        self._check_positions(_positions_of(model))
        width = self._tried_width(model, self._max_length)
        if isinstance(self._kind, Answers):
            ends = text_models.end_tokens(model, self._tokens.ends)
            self._kind.continue_as(self._way_of(model, self._max_length), ends, width, device)
            self._kind.other_search = text_models.changes_of_search(model)

    def _check_positions(self, positions: int | None) -> None:
        if self._asked_length is None and min(positions or 0, _LONGEST) != self._max_length:
            found = "no number of positions in its config.json"
            if positions is not None:
                found = f"{positions} positions in its configuration, and not those of {self._model.folder}"
            raise UsageError(f"{self._called} has {found}: give --max-length N, such as 512 (max_length=N).")
        if positions is not None and self._max_length > positions:
            raise UsageError(
                f"--max-length {self._max_length} is more than the {positions} positions of the model in "
                f"{self._model.folder}. Give a smaller one."
            )

    def forward(self, model: nn.Module, batch: Any) -> list[Any]:
        return self._kind.forward(model, batch)

    def observe(self, outputs: list[Any], batch: Any) -> dict[str, Any]:
        return self._kind.observe(outputs, batch)

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        return self._kind.postprocess(columns, samples)

    def metrics(self) -> Sequence[Metric | RowMetric]:
        return self._metrics

    def show(self, row: Mapping[str, Any]) -> Any:
        """What a window predicts, choices with the chosen one, or a prompt with its answers."""
        return self._kind.show(place_of(self._kind.dataset(), row), row)

    def options(self) -> dict[str, Any]:
        return {
            "metric": [metric.name for metric in self._metrics],
            **self._model.options(),
            "data": self._data.source,
            "text": self._text,
            "quoting": self._quoting,
            **self._options,
        }

    def description(self) -> dict[str, str]:
        count = f"{len(self._data.documents):,} " if self._data.rows is None else ""
        used = {name: value for name, value in self._options.items() if value not in (None, ())}
        if not used.get("temperature"):
            used = {name: value for name, value in used.items() if name not in ("temperature", *DRAWING)}
        text = ", ".join(f"{name.replace('_', ' ')} {_typed(value)}" for name, value in used.items())
        data = f"{self._data.of}, {count}{_WORDS[self._data.kind]}"
        return {**self._model.description(), "data": data, "tokens": text}

    def data_warnings(self) -> list[str]:
        return [*super().data_warnings(), *self._kind.warnings()]

    def fingerprint(self) -> dict[str, Any]:
        """What the numbers depend on, besides data and weights."""
        # Another rule than that of dualeval before it: -3.5 is not 35, and "A" is not nothing.
        is_new = {"punctuation", "articles"} & {*self._options.get("ignore", ())}
        rule = {"answers": "not as SQuAD"} if is_new else {}
        return {
            **rule,
            "kind": self._data.kind,
            "config": self._model.fingerprint(),
            "tokenizer": self._tokens.fingerprint(),
            "stops": self._kind.stops,
            **self._options,
        }


def stored_metrics(options: Mapping[str, Any], names: Sequence[str]) -> Sequence[Metric | RowMetric]:
    """Metrics by name, for the rows of a run with these ``options``, which are its ``fingerprint()``."""
    return chosen(names, metrics_of_kind(options["kind"], options))


def _typed(value: Any) -> str:
    """The value of an option, as one types it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    # What has a line's end in it would divide the line.
    return ",".join(repr(each)[1:-1] for each in value) if isinstance(value, tuple) else repr(value)


def _of_kind(data: LanguageData, settings: LanguageModelingOptions) -> dict[str, Any]:
    """The options that the data's kind has; another one is refused where it was given."""
    for name, kind in _KIND_OF.items():
        # A dataclass keeps the default of a field in its class.
        if kind != data.kind and getattr(settings, name) != getattr(LanguageModelingOptions, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for {_WORDS[kind]}, and {data.of} has {_WORDS[data.kind]}. "
                "Leave it out."
            )
    values = {name: getattr(settings, name) for name, kind in _KIND_OF.items() if kind == data.kind}
    # Without it jobs are the same as before there was the option.
    return {name: value for name, value in values.items() if name != "keep_losses" or value}


def _read(data: str | Path | PythonRows, settings: LanguageModelingOptions, cache: DataCache) -> LanguageData:
    asked = settings.text, TableOptions(settings.keep, settings.quoting)
    if not isinstance(data, str | Path):
        return read_language_data(data, *asked)
    key = ("language", path_at(data), *asked)
    return cache.once(key, lambda: read_language_data(data, *asked))


def _positions_of(model: Any) -> int | None:
    """How many tokens a model sees at once, by its configuration; None where it does not say it."""
    config = getattr(model, "config", None)
    if isinstance(model, str | Path):
        with quiet():
            try:
                config = transformers_for(USE.name).AutoConfig.from_pretrained(model, **LOCAL)
            except (OSError, ValueError):  # said when it is built
                return _LONGEST
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None
