"""A small task whose columns are ragged and text, of every kind, with failures and empty rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualeval.columns.ragged import Ragged, RaggedRows, Text, TextRows
from dualeval.metrics import Measured, Metric, RowMetric
from tests.vehicles.tiny import FEATURES, TinyDataset, TinyTask

WORDS = ["", "é", "𝄞 clef", "plain", "日本語", "e\u0301", "tab\tand\nline", "\0"]
KINDS = {
    "flags": torch.bool,
    "halves": torch.float16,
    "doubles": torch.float64,
    "bytes": torch.uint8,
    "tokens": torch.int64,
}
RAGGED = ("boxes", *KINDS)
# What the forward reads, and no identity names: a factor, and the number of batches after which it breaks.
unnamed = {"scale": 1.0, "batches": math.inf}


def length_of(index: int) -> int:
    """How many values a sample has; none in every fifth group of eight."""
    return 0 if index // 8 % 5 == 0 else index * 7 % 6


class IndexedDataset(TinyDataset):
    """Samples that know their index."""

    def _read(self, index: int) -> tuple[Tensor, int]:
        return super()._read(index)[0], index

    def placeholder(self, index: int) -> tuple[Tensor, int]:
        """In place of a failed sample: one with values and a word, none of which may get anywhere."""
        return torch.ones(FEATURES), 11


class IndexedTask(TinyTask):
    """A TinyTask whose batches have the indices of their samples, and whose forward may break."""

    def __init__(self, count: int, broken: Sequence[int] = ()) -> None:
        super().__init__(count)
        self._dataset = IndexedDataset(count, broken)

    def collate(self, samples: Any) -> dict[str, Tensor]:
        features, indices = zip(*samples, strict=True)
        return {"features": torch.stack(features), "index": torch.tensor(indices)}

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        unnamed["batches"] -= 1
        if unnamed["batches"] < 0:
            raise RuntimeError("enough")
        return super().forward(model, batch) * unnamed["scale"]


class CountedValues:
    """The number of values and bytes of all samples, and the sum of all tokens and letters; of the ledger."""

    name = "counted"
    columns = ("tokens", "word")
    size = 5

    def update(self, ledger: Tensor, columns: Mapping[str, Any]) -> None:
        tokens, words = columns["tokens"], columns["word"]
        assert type(tokens) is Ragged and type(words) is Text
        found = [len(tokens), len(tokens.values), int(tokens.values.sum()), len(words.values)]
        ledger += torch.tensor([*found, sum(map(len, words))])

    def compute(self, ledger: Tensor) -> Measured:
        names = ("samples", "values", "sum", "utf8", "letters")
        return Measured(values=dict(zip(names, ledger.tolist(), strict=True)))


class EveryBit:
    """A hash of the bytes of all rows of columns, in order."""

    def __init__(self, *columns: str) -> None:
        self.name = "bits"
        self.columns = columns

    def compute(self, columns: Mapping[str, Any]) -> Measured:
        return Measured(values={name: self._of(columns[name]) for name in self.columns})

    @staticmethod
    def _of(rows: Any) -> str:
        parts = [rows] if isinstance(rows, np.ndarray) else [rows.values, rows.offsets]
        if isinstance(rows, RaggedRows):
            assert len(list(rows)) == len(rows)
        if isinstance(rows, TextRows):
            assert all(isinstance(text, str) for text in rows)
        shapes = [(part.dtype.str, part.shape) for part in parts]
        return f"{shapes} {hashlib.sha256(b''.join(part.tobytes() for part in parts)).hexdigest()}"


class RaggedTask(IndexedTask):
    """A linear classifier that gives as many values of each kind as ``length_of`` says, and a word."""

    name = "ragged"
    rows = None  # type: ignore[assignment]

    @property
    def exports(self) -> Mapping[str, str]:
        return {"tokens.json": "tokens", "words.json": "word"}

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        lengths = torch.tensor([length_of(index) for index in batch["index"].tolist()])
        rows = [row.repeat(2)[:count] * 90 for row, count in zip(outputs, lengths.tolist(), strict=True)]
        values = torch.cat(rows)
        codes = values.to(torch.int64)
        columns: dict[str, Any] = {
            name: Ragged(codes % 2 == 1 if kind == torch.bool else values.to(kind), lengths)
            for name, kind in KINDS.items()
        }
        # NaN with payloads, infinities, -0.0.
        columns["doubles"] = Ragged((codes.abs() + 0x7FF0000000000001).view(torch.float64), lengths)
        columns["tokens"] = [row.to(torch.int64) for row in rows]
        columns["boxes"] = [torch.stack([row, -row, row + 1, row * 0], dim=1) for row in rows]
        return {"index_read": batch["index"], "score": outputs[:, 0], **columns}

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> Mapping[str, Any]:
        assert isinstance(columns["tokens"], Ragged)
        places = columns["index_read"].tolist()
        return {**columns, "word": [WORDS[place % len(WORDS)] * (place % 3) for place in places]}

    def metrics(self) -> list[Metric | RowMetric]:
        return [CountedValues(), EveryBit("score", "word", *RAGGED)]

    def texts(self, rows: Mapping[str, Any], first: int) -> dict[str, list[str]]:
        return {
            "said": [f"{word}{len(boxes)}" for word, boxes in zip(rows["word"], rows["boxes"], strict=True)]
        }
