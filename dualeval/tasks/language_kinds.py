"""The three kinds of samples that a language model is evaluated on: windows, choices, and prompts."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dualeval.columns.of_data import KeptColumns, WithColumns
from dualeval.columns.ragged import Column, Ragged, Text, as_column
from dualeval.data.language_rows import ANSWERS, CHOICES, DOCUMENTS, answers_of, choices_of
from dualeval.data.table import DataRows
from dualeval.data.token_groups import DocumentWindows, collate_prompts, collate_sequences
from dualeval.errors import UsageError
from dualeval.metrics import Metric
from dualeval.metrics.means import BitsPerByte, Count, Mean, Ratio
from dualeval.metrics.squad import plain_text
from dualeval.models.answering import Answering
from dualeval.models.generation import NONE, Way
from dualeval.models.text_models import CausalTokens, losses_of, search_warnings, sums_of, token_losses_of

_ACCURACIES = ("acc", "acc_norm", "acc_bytes")
_SIZES = ("tokens", "bytes", "words")
# With --keep-losses.
TOKEN_IDS, TOKEN_LOSSES = "token_ids", "token_losses"


class Kind:
    """What the task does with the samples of one kind; the methods are those of a Task."""

    cluster: str | None = None
    # Set with the model: the tokens that end an answer (no part of it); what ``generate`` does besides.
    stops: Sequence[int] = ()
    other_search: Sequence[str] = ()

    def warnings(self) -> list[str]:
        """What a reader of the numbers should know of the samples, and of how the model answers."""
        return []

    def forward(self, model: nn.Module, batch: Mapping[str, Any]) -> list[Any]:
        return [losses_of(model, group) for group in batch["groups"]]


class Documents(Kind):
    """Windows of documents, each token predicted once."""

    cluster = "document"

    def __init__(
        self, windows: DocumentWindows, pieces: Callable[[int], Sequence[str]], *, keep_losses: bool = False
    ) -> None:
        self._windows = windows
        # Of a document by its number, the text of each token. Windows that are shown follow each other.
        self._pieces = lru_cache(1)(pieces)
        self._keep_losses = keep_losses
        self.rows = ("nll", *_SIZES, "document", *[TOKEN_IDS, TOKEN_LOSSES] * keep_losses)

    def dataset(self) -> DocumentWindows:
        return self._windows

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        sizes = {name: torch.tensor([each[name] for each in samples]) for name in _SIZES}
        return {**collate_sequences([each["sequences"] for each in samples]), **sizes}

    def forward(self, model: nn.Module, batch: Mapping[str, Any]) -> list[Any]:
        if not self._keep_losses:
            return super().forward(model, batch)
        return [token_losses_of(model, group) for group in batch["groups"]]

    def observe(self, outputs: list[Any], batch: Mapping[str, Any]) -> dict[str, Column]:
        # A window that could not be read has no sequence.
        nll = torch.zeros(len(batch["tokens"]), dtype=torch.float64, device=batch["tokens"].device)
        kept: dict[str, Column] = {}
        if self._keep_losses:
            losses = [nll.new_zeros(0, dtype=torch.float32)] * len(nll)
            of_rows = [each for group in outputs for each in group]
            for owner, place in zip(batch["owners"].tolist(), batch["places"].tolist(), strict=True):
                losses[owner] = of_rows[place]
            kept[TOKEN_LOSSES] = as_column(TOKEN_LOSSES, losses)
            outputs = [sums_of(group) for group in outputs]
        if outputs:
            nll[batch["owners"]] = torch.cat(outputs)[batch["places"]]
        return {"nll": nll, **{name: batch[name] for name in _SIZES}, **kept}

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        columns = {**columns, "document": Text(self._windows.document(index) for index in samples)}
        if self._keep_losses:
            ids = [torch.tensor(self._windows.predicted(at), dtype=torch.int32) for at in samples]
            columns[TOKEN_IDS] = as_column(TOKEN_IDS, ids)
        return columns

    def show(self, index: int, row: Mapping[str, Any]) -> Any:
        """What a window predicts, as it is in the data; each token with its loss where the row has them."""
        number, first, stop = self._windows.span(index)
        texts = self._pieces(number)[first:stop]
        if row.get(TOKEN_LOSSES) is None:
            return "".join(texts)
        if row[TOKEN_IDS] != self._windows.predicted(index):  # of another run
            return {"losses": "those of other tokens: the runs' tokenizers, or their windows, differ"}
        shown: list[tuple[str, float]] = []
        for text, loss in zip(texts, row[TOKEN_LOSSES], strict=True):
            # Tokens that make one character are one.
            before, known = ("", 0.0) if text or not shown else shown.pop()
            shown.append((before + text, known + loss))
        return [shown]


@dataclass(kw_only=True, eq=False)
class RowKind(WithColumns, Kind, ABC):
    """Samples that are rows, each encoded when it is read; also their data set."""

    of: DataRows
    tokens: CausalTokens
    max_length: int
    # What takes the place of a row that cannot be read.
    empty: ClassVar[Mapping[str, Any]]

    def dataset(self) -> RowKind:
        return self

    def __len__(self) -> int:
        return len(self.of)

    def id(self, index: int) -> str:
        return self.of.ids[index]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self.encode(index) for index in indices]

    @abstractmethod
    def encode(self, index: int) -> dict[str, Any]:
        """A row as tokens; UsageError where it is none of this kind."""

    def placeholder(self, index: int) -> Mapping[str, Any]:
        return self.empty

    @property
    def kept(self) -> KeptColumns:  # type: ignore[override]
        return self.of.kept

    def fingerprint(self, count: int) -> str:
        return self.of.fingerprint(count)

    @abstractmethod
    def show(self, index: int, row: Mapping[str, Any]) -> dict[str, str]:
        """What there is to see of a row, and of what the model gave for it."""


@dataclass(kw_only=True, eq=False)
class Choices(RowKind):
    """Multiple choice, by the log-likelihood of each choice behind its context."""

    rows = (*_ACCURACIES, "prediction", "answer", "loglikelihoods", "cut")
    empty: ClassVar = {"sequences": [], "answer": 0, "cut": False}

    target_delimiter: str

    def encode(self, index: int) -> dict[str, Any]:
        context, choices, answer = choices_of(self.of, index)
        sequences, cut = [], False
        for place, choice in enumerate(choices):
            before, after = self.tokens.pair(context, self.target_delimiter + choice)
            is_known = len(after) > 1 or self.tokens.fast.encode(choice, add_special_tokens=False).ids
            count = len(after) if is_known else 0
            if not 0 < count <= self.max_length:
                raise UsageError(
                    f"{self.of.where(index)}: choice {place} is {count} tokens after its context, expected "
                    f"1 to {self.max_length} (--max-length)" + "; the tokenizer leaves it out" * (not count)
                )
            whole = torch.tensor([*before, *after], dtype=torch.int32)
            cut = cut or len(whole) > self.max_length + 1
            sequences.append((whole[-self.max_length - 1 :], len(after)))
        return {"sequences": sequences, "answer": answer, "cut": cut}

    def warnings(self) -> list[str]:
        contexts = (row[0] for row in self.of.values if self.target_delimiter[:1].isspace())
        count = sum(isinstance(text, str) and text[-1:].isspace() for text in contexts)
        begin = f"{count} of {len(self)} contexts end in white space, and --target-delimiter "
        without = f"give --target-delimiter {self.target_delimiter.lstrip()!r}, or contexts without it"
        return [f"{begin}{self.target_delimiter!r} adds more: {without}"] if count else []

    def show(self, index: int, row: Mapping[str, Any]) -> dict[str, str]:
        context, choices, answer = choices_of(self.of, index)
        texts = {self.of.columns[0]: context}
        for place, (choice, value) in enumerate(zip(choices, row["loglikelihoods"], strict=True)):
            marks = [*["right"] * (place == answer), *["chosen"] * (place == row["prediction"])]
            texts[", ".join([f"choice {place}", *marks])] = f"{choice} ({value:.2f})"
        return texts

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        return {
            **collate_sequences([each["sequences"] for each in samples]),
            "counts": torch.tensor([len(each["sequences"]) for each in samples]),
            "answer": torch.tensor([each["answer"] for each in samples], dtype=torch.int32),
            "cut": torch.tensor([each["cut"] for each in samples]),
        }

    def observe(self, outputs: list[Tensor], batch: Mapping[str, Any]) -> dict[str, Any]:
        none = torch.zeros(0, dtype=torch.float64, device=batch["cut"].device)
        loglikelihoods = -torch.cat([none, *outputs])[batch["places"]]
        return {
            "loglikelihoods": Ragged(loglikelihoods, batch["counts"]),
            "answer": batch["answer"],
            "cut": batch["cut"],
        }

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        answers = columns["answer"].tolist()
        pairs = zip(samples, columns["loglikelihoods"], strict=True)
        best = [self._best(index, each.tolist()) for index, each in pairs]
        accuracies = {
            name: torch.tensor([each[place] == answer for each, answer in zip(best, answers, strict=True)])
            for place, name in enumerate(_ACCURACIES)
        }
        first = torch.tensor([each[0] for each in best], dtype=torch.int32)
        return {**columns, **accuracies, "prediction": first}

    def _best(self, index: int, loglikelihoods: Sequence[float]) -> tuple[int, int, int]:
        """The likeliest choice, that by character, and that by byte; of equal ones the first."""
        if not loglikelihoods or any(map(math.isnan, loglikelihoods)):
            return NONE, NONE, NONE
        choices = choices_of(self.of, index)[1]
        ones, characters = [1] * len(choices), [len(choice) for choice in choices]
        sizes = (ones, characters, [len(choice.encode()) for choice in choices])
        scores = [[value / size for value, size in zip(loglikelihoods, each, strict=True)] for each in sizes]
        first, second, third = (each.index(max(each)) for each in scores)
        return first, second, third


@dataclass(kw_only=True, eq=False)
class Answers(RowKind):
    """Answers to prompts: greedy ones, or drawn ones."""

    empty: ClassVar = {"prompt": torch.zeros(0, dtype=torch.int32), "cut": False}

    max_new_tokens: int
    stop_at_newline: bool
    ignore: tuple[str, ...]
    stop: tuple[str, ...]
    think_end: str | None
    extract: str | None
    temperature: float
    top_p: float
    answers_per_prompt: int
    answers_seed: int
    # Of an encoder-decoder model, which gets the tokens as its tokenizer makes them.
    is_encoded: bool

    def __post_init__(self) -> None:
        self._answering = Answering(
            tokens=self.tokens,
            most=self.max_new_tokens,
            stops=(*self.stop, *["\n"] * self.stop_at_newline),
            think_end=self.think_end,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.answers_seed,
        )
        self._flags = flags_of(vars(self))

    @property
    def rows(self) -> tuple[str, ...]:
        several = ["any_match"] if self.answers_per_prompt > 1 else []
        return ("exact_match", *several, "generated", "cut", "nan_logits", *self._flags)

    def continue_as(self, way: Way, stops: Sequence[int], count: int, device: torch.device) -> None:
        """Say how the model is continued, and which of its ``count`` tokens end a text."""
        self.stops = stops
        self._answering.continue_as(way, stops, count, device)

    def warnings(self) -> list[str]:
        kind = "drawn" if self.temperature else "greedy"
        return search_warnings(self.other_search, f"answers are plain {kind}", "model.generate()")

    def encode(self, index: int) -> dict[str, Any]:
        answers_of(self.of, index)
        text = self.of.text(index, self.of.columns[0])
        tokens = self.tokens.fast.encode(text).ids if self.is_encoded else self.tokens.encode(text)
        kept = tokens[-(self.max_length - self.max_new_tokens) :]
        prompt = {"prompt": torch.tensor(kept, dtype=torch.int32), "cut": len(kept) < len(tokens)}
        return {**prompt, "numbers": self._answering.numbers(self.id(index), self.answers_per_prompt)}

    def placeholder(self, index: int) -> Mapping[str, Any]:
        return {**self.empty, "numbers": torch.zeros((self.answers_per_prompt, 0))}

    def show(self, index: int, row: Mapping[str, Any]) -> dict[str, str]:
        expected = " | ".join(answers_of(self.of, index))
        prompt = self.of.text(index, self.of.columns[0])
        return {"prompt": prompt, "answer": str(row["generated"]), "expected": expected}

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        prompts = [each["prompt"] for each in samples for _ in range(self.answers_per_prompt)]
        numbers = [of_one for each in samples for of_one in each["numbers"]]
        joined = collate_prompts(prompts, numbers, self.max_new_tokens)
        return {**joined, "cut": torch.tensor([each["cut"] for each in samples])}

    def forward(self, model: nn.Module, batch: Mapping[str, Any]) -> list[Any]:
        return self._answering.answer(model, batch)

    def observe(self, outputs: list[tuple[Tensor, Tensor]], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        # The last row is that of prompts which could not be read.
        none = torch.full((1, self.max_new_tokens), NONE, device=batch["cut"].device)
        tokens = torch.cat([*(ids for ids, _ in outputs), none])[batch["places"]]
        has_nan = torch.cat([*(nan for _, nan in outputs), none[0, :1] == 0])[batch["places"]]
        rows = len(batch["cut"])
        nan_logits = has_nan.view(rows, -1).any(1)
        return {"generated": tokens.view(rows, -1), "nan_logits": nan_logits, "cut": batch["cut"]}

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        texts, counts, count = [], [], self.answers_per_prompt
        for index, ids, nan in zip(
            samples, columns["generated"], columns["nan_logits"].tolist(), strict=True
        ):
            judged = [self._judged(index, tokens, nan) for tokens in ids.view(count, -1).tolist()]
            answers = [text for text, _ in judged]
            texts.append(answers[0] if count == 1 else json.dumps(answers, ensure_ascii=False))
            counts.append([sum(each) for each in zip(*(marks for _, marks in judged), strict=True)])
        of_rows = torch.tensor(counts)
        marks = of_rows.bool() if count == 1 else of_rows
        names = ("exact_match", *self._flags)
        columns = {**columns, "generated": Text(texts), **dict(zip(names, marks.unbind(1), strict=True))}
        if count > 1:
            columns |= {"exact_match": of_rows[:, 0] / count, "any_match": of_rows[:, 0] > 0}
        return columns

    def _judged(self, index: int, ids: Sequence[int], nan: bool) -> tuple[str, list[bool]]:
        """The text of an answer, whether it is right, and its flags."""
        text, is_thought, _ = self._answering.read(ids)
        answer, flags = text, [self._answering.is_full(ids), not text.strip()]
        if self.extract is not None:
            found = [*re.finditer(self.extract, text)][-1:] if is_thought else []
            answer = next((match[match.re.groups and 1] or "" for match in found), "")
            flags.append(not answer)
        if self.think_end is not None:
            flags.append(not is_thought)
        is_right = is_thought and not nan and (bool(answer) or self.extract is None)
        return text, [is_right and self._is_right(index, answer), *flags]

    def _is_right(self, index: int, text: str) -> bool:
        try:
            answers = answers_of(self.of, index)
        except UsageError:  # of a row that could not be read
            return False
        return plain_text(text, self.ignore) in [plain_text(one, self.ignore) for one in answers]


def flags_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that say what is wrong with an answer, by the options of the task."""
    of_options = {"extract": "not_extracted", "think_end": "unfinished_thinking"}
    more = (name for option, name in of_options.items() if options.get(option) is not None)
    return ("at_token_limit", "empty_answers", *more)


def metrics_of_kind(kind: str, options: Mapping[str, Any] = MappingProxyType({})) -> list[Metric]:
    """All metrics of samples of a kind, with these options of the task."""
    if kind == CHOICES:
        return [
            *(Mean(name, higher_is_better=True) for name in _ACCURACIES),
            Count("cut", name="cut_contexts"),
        ]
    if kind == ANSWERS:
        means = ["exact_match", *["any_match"] * (options.get("answers_per_prompt", 1) > 1)]
        return [
            *(Mean(name, unit="fraction", higher_is_better=True) for name in means),
            Count("cut", name="cut_contexts"),
            *(Count(name, name=name) for name in flags_of(options)),
        ]
    assert kind == DOCUMENTS
    sizes = {"perplexity": "tokens", "word_perplexity": "words", "byte_perplexity": "bytes"}
    return [
        *(Ratio("nll", of, "exp", name=name, higher_is_better=False, least=0) for name, of in sizes.items()),
        BitsPerByte("nll", "bytes"),
    ]
