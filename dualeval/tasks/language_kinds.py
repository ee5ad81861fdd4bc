"""The three kinds of samples that a language model is evaluated on: windows, choices, and prompts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dualeval.columns.of_data import KeptColumns, WithColumns
from dualeval.columns.ragged import Column, Ragged, Text
from dualeval.data.language_rows import ANSWERS, CHOICES, DOCUMENTS, answers_of, choices_of
from dualeval.data.table import DataRows
from dualeval.data.token_groups import DocumentWindows, collate_prompts, collate_sequences
from dualeval.errors import UsageError
from dualeval.metrics import Metric
from dualeval.metrics.means import BitsPerByte, Count, Mean, Ratio
from dualeval.metrics.squad import plain_text
from dualeval.models.text_models import NONE, CausalTokens, greedy, losses_of

_ACCURACIES = ("acc", "acc_norm", "acc_bytes")
_SIZES = ("tokens", "bytes", "words")


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

    rows = ("nll", *_SIZES, "document")
    cluster = "document"

    def __init__(self, windows: DocumentWindows) -> None:
        self._windows = windows

    def dataset(self) -> DocumentWindows:
        return self._windows

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        sizes = {name: torch.tensor([each[name] for each in samples]) for name in _SIZES}
        return {**collate_sequences([each["sequences"] for each in samples]), **sizes}

    def observe(self, outputs: list[Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        # A window that could not be read has no sequence.
        nll = torch.zeros(len(batch["tokens"]), dtype=torch.float64, device=batch["tokens"].device)
        if outputs:
            nll[batch["owners"]] = torch.cat(outputs)[batch["places"]]
        return {"nll": nll, **{name: batch[name] for name in _SIZES}}

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        return {**columns, "document": Text(self._windows.document(index) for index in samples)}


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
    """Greedy answers to prompts."""

    rows = ("exact_match", "generated", "cut", "nan_logits")
    empty: ClassVar = {"prompt": torch.zeros(0, dtype=torch.int32), "cut": False}

    max_new_tokens: int
    stop_at_newline: bool
    ignore: tuple[str, ...]

    def end_at(self, stops: Sequence[int], count: int, device: torch.device) -> None:
        """Say which of ``count`` tokens end an answer."""
        self.stops = stops
        newlines = self.tokens.with_newline(count) if self.stop_at_newline else []
        self._ends = torch.zeros(count, dtype=torch.bool, device=device)
        self._ends[[*(stop for stop in stops if stop < count), *newlines]] = True

    def warnings(self) -> list[str]:
        asked = ", ".join(self.other_search)
        begin = f"the model's generation_config asks for {asked}, which is not done here: answers are plain "
        return [f"{begin}greedy ones, and may differ from those of model.generate()"] if asked else []

    def encode(self, index: int) -> dict[str, Any]:
        answers_of(self.of, index)
        tokens = self.tokens.encode(self.of.text(index, self.of.columns[0]))
        kept = tokens[-(self.max_length - self.max_new_tokens) :]
        return {"prompt": torch.tensor(kept, dtype=torch.int32), "cut": len(kept) < len(tokens)}

    def show(self, index: int, row: Mapping[str, Any]) -> dict[str, str]:
        right = " | ".join(answers_of(self.of, index))
        prompt = self.of.text(index, self.of.columns[0])
        return {"prompt": prompt, "right": right, "generated": str(row["generated"])}

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        joined = collate_prompts([each["prompt"] for each in samples], self.max_new_tokens)
        return {**joined, "cut": torch.tensor([each["cut"] for each in samples])}

    def forward(self, model: nn.Module, batch: Mapping[str, Any]) -> list[Any]:
        return [greedy(model, prompts, self._ends, self.max_new_tokens) for prompts in batch["groups"]]

    def observe(self, outputs: list[tuple[Tensor, Tensor]], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        # The last row is that of prompts which could not be read.
        none = torch.full((1, self.max_new_tokens), NONE, device=batch["cut"].device)
        tokens = torch.cat([*(ids for ids, _ in outputs), none])[batch["places"]]
        has_nan = torch.cat([*(nan for _, nan in outputs), none[0, :1] == 0])[batch["places"]]
        return {"generated": tokens, "nan_logits": has_nan, "cut": batch["cut"]}

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        texts = [self._text(tokens) for tokens in columns["generated"].tolist()]
        each = zip(samples, texts, columns["nan_logits"].tolist(), strict=True)
        right = [not nan and self._is_right(index, text) for index, text, nan in each]
        return {**columns, "generated": Text(texts), "exact_match": torch.tensor(right)}

    def _text(self, tokens: Sequence[int]) -> str:
        text = self.tokens.text([token for token in tokens if token not in (NONE, *self.stops)])
        return text.partition("\n")[0] if self.stop_at_newline else text

    def _is_right(self, index: int, text: str) -> bool:
        try:
            answers = answers_of(self.of, index)
        except UsageError:  # of a row that could not be read
            return False
        return plain_text(text, self.ignore) in [plain_text(one, self.ignore) for one in answers]


def metrics_of_kind(kind: str) -> list[Metric]:
    """All metrics of samples of a kind."""
    if kind == CHOICES:
        return [
            *(Mean(name, higher_is_better=True) for name in _ACCURACIES),
            Count("cut", name="cut_contexts"),
        ]
    if kind == ANSWERS:
        return [Mean("exact_match", higher_is_better=True), Count("cut", name="cut_contexts")]
    assert kind == DOCUMENTS
    sizes = {"perplexity": "tokens", "word_perplexity": "words", "byte_perplexity": "bytes"}
    return [
        *(Ratio("nll", of, "exp", name=name, higher_is_better=False, least=0) for name, of in sizes.items()),
        BitsPerByte("nll", "bytes"),
    ]
