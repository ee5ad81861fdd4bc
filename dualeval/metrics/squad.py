"""Exact match and F1 of answers to questions, as the official scripts of SQuAD v1.1 and v2.0 define them.

P. Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text", EMNLP 2016; P. Rajpurkar,
R. Jia, P. Liang, "Know what you don't know: unanswerable questions for SQuAD", ACL 2018. The two scripts
differ where a text consists of articles and punctuation only, and in what is right where there is no answer:
``score_answer``.

The columns, one value per question:

    exact_match       bool     the answer is right
    f1                float64  its F1, 0 to 1
    has_answer        bool     the question has an answer
    null_odds         float32  score of no answer minus that of the best span; or float64, as a file has it
    span_exact_match  bool     as exact_match and f1, for the best span, whatever the threshold made of it
    span_f1           float64
    span_is_empty     bool     there is no such span
    windows, tokens, padded_tokens  int32  what the question took; padded_tokens with those that only fill up
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.metrics.exact import DOUBLE_UNIT_BITS, ExactColumn, units_of_double
from dualeval.metrics.intervals import Ends, bounded_interval, wilson_interval
from dualeval.metrics.means import Moments, mean_of_sum
from dualeval.metrics.metric import Measured, Value
from dualeval.metrics.scores import PERCENT, Score

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Sign, exponent's sign and decimal point or comma make another number; a comma of thousands does not.
_OF_NUMBERS = r"(?<!\w)-[$.]?\d|(?<=\d[eE])-\d|(?<![^\s\d$-])\.\d|(?<=\d),(?!(?:\d+,)*\d{3}(?!\d))\d"
_PUNCTUATION = re.compile(f"(?!{_OF_NUMBERS})[{re.escape(string.punctuation)}]")
# By the names of --ignore, in this order.
_STEPS: dict[str, Callable[[str], str]] = {
    "case": str.lower,
    "punctuation": lambda text: _PUNCTUATION.sub("", text),
    "articles": lambda text: _ARTICLES.sub(" ", text),
    "whitespace": lambda text: " ".join(text.split()),
}
# Both scripts give percent.
_PERCENT = 100.0
# Keys as the official script of v2.0 has them.
_PARTS = ("HasAns_", "NoAns_")


def normalize_answer(text: str) -> str:
    """Lower case, then without ASCII punctuation, the words a, an, the, and superfluous white space."""
    text = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def plain_text(text: str, ignored: Sequence[str]) -> str:
    """As ``normalize_answer``, by some of its steps; but "A" is not nothing, and -3.5 not 35."""
    for name, step in _STEPS.items():
        shorter = step(text) if name in ignored else text
        text = shorter if shorter.strip() or not text.strip() else text
    return text


def score_answer(answer: str, gold: Sequence[str], *, unanswerable: bool) -> tuple[bool, float]:
    """Exact match and F1 of one answer: of each the best over the gold answers.

    F1 is 2 p r / (p + r) in float64, of the words that both have, with their multiplicity, over the answer's
    words (p) and over the gold answer's (r); 0 where they share none.
    """
    normalized = normalize_answer(answer)
    right = {normalize_answer(text) for text in gold}
    if unanswerable:
        right = right - {""} or {""}
    words = normalized.split()
    return normalized in right, max(_f1(words, text.split(), unanswerable) for text in right)


def _f1(words: Sequence[str], gold: Sequence[str], unanswerable: bool) -> float:
    if unanswerable and not (words and gold):
        return float(words == gold)
    shared = sum((Counter(words) & Counter(gold)).values())
    if shared == 0:
        return 0.0
    precision = shared / len(words)
    recall = shared / len(gold)
    return 2 * precision * recall / (precision + recall)


class _OfAnswers:
    """A mean over the questions; with ``parts`` also over those with an answer, and over those without."""

    name: str
    suffix: str

    def __init__(self, *, parts: bool) -> None:
        self._keys = (self.name, *(f"{part}{self.suffix}" for part in _PARTS)) if parts else (self.name,)
        self.columns = (self.name, "has_answer") if parts else (self.name,)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of the column of this name, and of ``has_answer`` with parts."""
        count = len(self._keys)
        for slots, chosen in zip(ledger.view(count, -1), _groups(columns, count), strict=True):
            self._add(slots, columns[self.name][chosen])

    def compute(self, ledger: Tensor) -> Measured:
        """The percentage of each key, and its interval; None without samples."""
        values: dict[str, Value] = {}
        intervals = {}
        for key, slots in zip(self._keys, ledger.view(len(self._keys), -1), strict=True):
            values[key] = None
            if slots[0]:
                values[key], (low, high) = self._measured(slots)
                intervals[key] = (_PERCENT * low, _PERCENT * high)
        return Measured(
            values=values,
            intervals=intervals,
            units=dict.fromkeys(values, PERCENT),
            directions=dict.fromkeys(values, "higher"),
            scores={key: _score(self.name, key) for key in values},
        )

    def _add(self, slots: Tensor, values: Tensor) -> None:
        """Add values to the slots of a group, of which the first is their number."""
        raise NotImplementedError

    def _measured(self, slots: Tensor) -> tuple[float, Ends]:
        """The percentage, and the ends of the interval of the fraction."""
        raise NotImplementedError


class ExactMatch(_OfAnswers):
    """The percentage of questions whose answer is right, with its Wilson interval.

    Ledger: the number of questions, the number of them that are right; likewise of each part.
    """

    name, suffix = "exact_match", "exact"

    def __init__(self, *, parts: bool) -> None:
        super().__init__(parts=parts)
        self.size = 2 * len(self._keys)

    def _add(self, slots: Tensor, values: Tensor) -> None:
        slots[0] += len(values)
        slots[1] += torch.count_nonzero(values)

    def _measured(self, slots: Tensor) -> tuple[float, Ends]:
        samples, right = slots.tolist()
        return _PERCENT * right / samples, wilson_interval(right, samples)


class F1(_OfAnswers):
    """The mean F1 in percent, equal to ``100 * math.fsum(f1) / N``, with Wilson's interval for its variance.

    Where each F1 is 0 or 1, as where there is no answer, the interval is that of the exact match.

    Ledger: the ``Moments`` of a mean; likewise of each part.
    """

    name, suffix = "f1", "f1"

    def __init__(self, *, parts: bool) -> None:
        super().__init__(parts=parts)
        self._moments = Moments(counts=1, sums=1, products=1, cubes=0)
        self.size = len(self._keys) * self._moments.size

    def _add(self, slots: Tensor, values: Tensor) -> None:
        column = ExactColumn(values)
        self._moments.add(slots, ([len(values)], (0, 0, 0), (column.total(), column.dot(column))))

    def _measured(self, slots: Tensor) -> tuple[float, Ends]:
        [samples], _, (total, squares) = self._moments.read(slots)
        return mean_of_sum(samples, total, _PERCENT), _interval_of_f1(samples, total, squares)


def _interval_of_f1(samples: int, total: int, squares: int) -> Ends:
    if squares == total << DOUBLE_UNIT_BITS:
        # No value of 0 to 1 is below its square: each is 0 or 1.
        return wilson_interval(total >> DOUBLE_UNIT_BITS, samples)
    mean = Fraction(total, samples << DOUBLE_UNIT_BITS)
    of_squares = Fraction(squares, samples << 2 * DOUBLE_UNIT_BITS)
    return bounded_interval(mean, (of_squares - mean * mean) / samples, samples)


def _score(column: str, key: str) -> Score:
    if not key.startswith(_PARTS):
        return Score(column=column, factor=_PERCENT)
    return Score(column=column, where="has_answer", where_is=key.startswith(_PARTS[0]), factor=_PERCENT)


def _groups(columns: Mapping[str, Tensor], count: int) -> list[Tensor | slice]:
    """All samples; where two more groups are wanted, those with an answer, and those without."""
    if count == 1:
        return [slice(None)]
    has_answer = columns["has_answer"]
    return [slice(None), has_answer, ~has_answer]


class AnswerCounts:
    """How many questions have an answer (HasAns_total) and how many have none (NoAns_total).

    Ledger: these two numbers.
    """

    name = "answer_counts"
    columns = ("has_answer",)
    size = 2

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of column ``has_answer``."""
        answerable = int(torch.count_nonzero(columns["has_answer"]))
        ledger[0] += answerable
        ledger[1] += len(columns["has_answer"]) - answerable

    def compute(self, ledger: Tensor) -> Measured:
        """Keys HasAns_total and NoAns_total."""
        return Measured(
            values={f"{part}total": count for part, count in zip(_PARTS, ledger.tolist(), strict=True)}
        )


class BestThresholds:
    """The thresholds of null_odds that would give the best exact match and the best F1, and these.

    As ``find_best_thresh`` of the script of v2.0: beginning with no answer to any question, questions are
    answered in the order of their null_odds (equal ones in the order of the data set), and the first best
    score on the way counts. The sums on the way are exact.
    """

    name = "best_thresholds"
    columns = ("null_odds", "has_answer", "span_is_empty", "span_exact_match", "span_f1")
    keys = ("best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh")

    def compute(self, columns: Mapping[str, npt.NDArray[Any]]) -> Measured:
        """Keys best_exact, best_exact_thresh, best_f1 and best_f1_thresh; the scores in percent."""
        odds, has_answer = columns["null_odds"], columns["has_answer"]
        order = np.argsort(odds, kind="stable")
        # A wrong answer costs the point of having given none. Python's integers: the units below are large.
        without = np.where(columns["span_is_empty"], 0, -1).astype(object)
        one = 1 << DOUBLE_UNIT_BITS
        units = np.array([units_of_double(float(value)) for value in columns["span_f1"]], dtype=object)
        values: dict[str, Value] = {}
        for key, right, whole in (("exact", columns["span_exact_match"].astype(int), 1), ("f1", units, one)):
            steps = np.where(has_answer, right, without * whole)[order]
            best = start = int(np.count_nonzero(~has_answer)) * whole
            threshold = 0.0
            current = start
            for place, step in zip(order.tolist(), steps.tolist(), strict=True):
                current += step
                if current > best:
                    best, threshold = current, float(odds[place])
            values[f"best_{key}"] = _PERCENT * (best / whole) / len(odds)
            values[f"best_{key}_thresh"] = threshold
        scores = ("best_exact", "best_f1")
        return Measured(
            values=values, units=dict.fromkeys(scores, PERCENT), directions=dict.fromkeys(scores, "higher")
        )


class WindowWork:
    """What the windows of the questions took; no metric of the answers.

    Ledger: windows, tokens in them, and tokens computed with those that only fill windows up.
    """

    name = "window_work"
    columns = ("windows", "tokens", "padded_tokens")
    # They speak of one run's forward: without one there is nothing to count again.
    keeps_rows = False
    size = 3

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of columns ``windows``, ``tokens`` and ``padded_tokens``."""
        for place, name in enumerate(self.columns):
            ledger[place] += columns[name].sum(dtype=torch.int64)

    def compute(self, ledger: Tensor) -> Measured:
        """No values; the three sums as work."""
        return Measured(values={}, work=dict(zip(self.columns, ledger.tolist(), strict=True)))
