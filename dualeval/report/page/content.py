"""What the page of a finished run says: plain values, read from its result and its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A metric with its 95 % interval."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    unit: str | None
    # "higher" or "lower" is better; None where neither is.
    direction: str | None
    # Why the interval may cover less than 95 %.
    rough: str | None


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One thing of a sample to look at."""

    kind: str  # "picture", "text", "table" or "error"
    picture: Image.Image | None = None
    text: str = ""
    table: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SampleShown:
    """One sample's card."""

    id: str
    index: int
    target: str | None
    prediction: str | None
    correct: bool | None
    confidence: float | None
    loss: float | None
    reasons: tuple[str, ...]  # of "mistake", "loss", "lost:0", "gained:0"; 0: number of the run compared with
    columns: Mapping[str, str]  # columns of the data, and further scores, as texts
    slices: tuple[str, ...]  # labels such as "scanner=A"
    shown: tuple[Shown, ...]


@dataclass(frozen=True, kw_only=True)
class Against:
    """The comparison with one other run."""

    folder: str
    verdict: str
    rows: Sequence[Mapping[str, Any]]  # one a metric: name, a, b, difference, low, high, p, verdict
    lost: int | None
    gained: int | None
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """All that a page says."""

    title: str
    about: Sequence[tuple[str, str]]
    headlines: Sequence[Headline]
    against: Sequence[Against]
    warnings: Sequence[str]
    samples: Sequence[SampleShown]
    samples_total: int
    cut: str | None
    class_columns: Sequence[str]
    class_rows: Sequence[Sequence[Any]]  # by class: name, support, recall, precision, f1, ...
    confusion_names: Sequence[str]
    confusion: Sequence[tuple[int, int, int]]  # target, prediction, count; empty without
    calibration: Sequence[Mapping[str, float]]  # bins: low, high, count, accuracy, confidence; empty without
    slices: Mapping[str, Sequence[Mapping[str, Any]]]  # Result.slices
    seconds: Sequence[Mapping[str, Any]]  # one a rank: rank, and its seconds by part
    limited_by: str  # one sentence
    provenance: Sequence[tuple[str, str]]  # label, text to copy: command, job file, versions, digests
