"""A TorchMetrics metric as one of this package: sums in the ledger, or all rows in data-set order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualeval.errors import RefusedSamples, UsageError, text_of
from dualeval.metrics.exact import NONFINITE_KINDS, SUM_SLOTS, add_each, each_rounded
from dualeval.metrics.metric import Measured, Value, direction
from dualeval.metrics.torchmetrics.arguments import Arguments, normaliser_of
from dualeval.metrics.torchmetrics.states import (
    State,
    StateKind,
    check_additive,
    check_attributes,
    checked,
    fresh,
    is_own,
    isolated,
    states_of,
)

# Rows of one update. Fixed: the bits of a metric that rounds within an update depend on it.
_PIECE_ROWS = 4_096
_SEED = 0
# What TorchMetrics raises where it does not take what it is given.
_REFUSALS = (ValueError, RuntimeError, TypeError, LookupError, ArithmeticError)


@contextmanager
def _same_everywhere() -> Iterator[None]:
    """Compute as on every other machine, whatever the process is set to.

    A sum over several threads is rounded otherwise. And where torch is asked for deterministic algorithms
    TorchMetrics counts by comparing each value with each class, also on a CPU: gigabytes for a thousand
    classes.
    """
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode(0)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)


class _Wrapped:
    """What both routes share."""

    # What is made of the metric, and no part of what it is.
    dualeval_identity_ignores = ("_checked", "spelled")

    def __init__(
        self,
        metric: Any,
        arguments: Arguments,
        *,
        name: str,
        own_name: bool,
        version: str,
        keeps_rows: bool = True,
    ) -> None:
        self.metric = metric
        self.name = name
        self.columns = arguments.columns
        self.keeps_rows = keeps_rows
        self.torchmetrics = version
        self._arguments = arguments
        self._own_name = own_name
        self._floats = str(metric.dtype)  # not those of earlier versions
        self._normaliser = normaliser_of(metric)

    def sources(self) -> Sequence[Any]:
        """The classes of the metric and of those inside it."""
        return list({type(part): None for part in self.metric.modules()})

    def _update(self, metric: Any, columns: Mapping[str, Any], samples: range, logits: bool = False) -> int:
        """Update a metric; how many scores lie outside 0 to 1. What it refuses is said in one sentence."""
        outside = 0
        try:
            positional, named = self._arguments.of(columns, samples, metric.dtype == torch.float64)
            self._check_classes(named)
            scores = named.get("preds")
            if self._normaliser and isinstance(scores, Tensor) and scores.is_floating_point():
                if scores.isnan().any():
                    raise ValueError("preds holds a NaN.")
                outside = int(((scores < 0) | (scores > 1)).sum())
                if logits:
                    named["preds"] = scores.sigmoid() if self._normaliser == "sigmoid" else scores.softmax(1)
            metric.update(*positional, **named)
        except _REFUSALS as error:
            kinds = self._arguments.column_forms(columns)
            index = getattr(metric, "input_format", "index") == "index"
            advice = "Change the metric's arguments" if index else "Of classes, give it input_format='index'"
            raise UsageError(
                f"metric {self.name!r}: TorchMetrics' {type(metric).__name__} refuses its columns ({kinds}): "
                f"{_sentence(error)} {advice} or its columns (docs/torchmetrics.md)."
            ) from error
        return outside

    def _check_classes(self, named: Mapping[str, Any]) -> None:
        """Check classes: of few samples TorchMetrics counts one that is none as another one."""
        count = getattr(self.metric, "num_classes", None)
        if not type(self.metric).__name__.startswith("Multiclass") or not count:
            return
        for argument, ignored in (("preds", None), ("target", getattr(self.metric, "ignore_index", None))):
            classes = named.get(argument)
            if isinstance(classes, Tensor) and not classes.is_floating_point():
                wrong = classes[(classes < 0) | (classes >= count)]
                wrong = wrong if ignored is None else wrong[wrong != ignored]
                if len(wrong):
                    nan = " (-1 means a NaN logit: accuracy and f1 count it as wrong)" * (-1 in wrong)
                    raise ValueError(f"{argument} has the class {int(wrong[0])}, not 0 to {count - 1}{nan}.")

    def _measured(self, metric: Any) -> Measured:
        """What a metric computes; likewise. What it warns of is a warning of the result."""
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                computed = metric.compute()
        except _REFUSALS as error:
            raise RefusedSamples(
                f"metric {self.name!r}: TorchMetrics' {type(metric).__name__} cannot compute from these "
                f"samples: {_sentence(error)}"
            ) from error
        prefix = f"{self.name}_" if self._own_name else ""
        better = self.metric.higher_is_better
        measured = measured_of(self.name, computed, prefix=prefix, higher_is_better=better)
        by_metric = dict.fromkeys(f"{self.name}: TorchMetrics warns: {each.message}" for each in caught)
        return replace(measured, warnings=(*measured.warnings, *by_metric))


class InLedger(_Wrapped):
    """A metric whose states are sums: an update of a copy for each batch, and its states into the ledger.

    Ledger: the number of updates and of scores outside 0 to 1; then the states one after the other: of
    integers a slot each; of floats the number of updates that gave float64, then 3 counts of what is not
    finite and 67 limbs each. Of scores they follow again, as logits: all decide, not those of an update.
    """

    # Floats are rounded within an update, and a metric may average over one.
    per_batch = True

    def __init__(self, metric: Any, arguments: Arguments, states: list[State], **common: Any) -> None:
        super().__init__(metric, arguments, **common)
        self._sizes = [1, 1, *[state.size for state in states] * (2 if self._normaliser else 1)]
        self.size = sum(self._sizes)
        self._states = states
        self._checked = False

    def update(self, ledger: Tensor, columns: Mapping[str, Any]) -> None:
        """Add the samples of one batch."""
        samples = len(columns[self.columns[0]])
        with _same_everywhere():
            if not self._checked and samples > 1:
                check_additive(
                    self.metric, self._states, lambda each, half: self._update(each, columns, half), samples
                )
                self._checked = True
            values = []
            # All of them first: an error must leave the ledger as it was.
            for logits in (False, True) if self._normaliser else (False,):
                metric = fresh(self.metric)
                outside = self._update(metric, columns, range(samples), logits=logits)
                check_attributes(self.metric, metric)
                values += [checked(metric, state).reshape(-1) for state in self._states]
        ledger[:2] += torch.tensor([1, outside])
        for state, sums, value in zip(self._states * 2, self._slots_by_state(ledger), values, strict=False):
            if state.kind is StateKind.INTEGER:
                sums += value.to(torch.int64)
            elif state.kind is StateKind.FLOAT:
                sums[0] += value.dtype == torch.float64
                add_each(sums[1:].view(-1, SUM_SLOTS), value)

    def compute(self, ledger: Tensor) -> Measured:
        """Put the sums into a copy of the metric, and let it compute; without samples a None."""
        updates, outside = ledger[:2].tolist()
        if not updates:
            return Measured(values={self.name: None})
        metric = fresh(self.metric)
        slots = self._slots_by_state(ledger)[-len(self._states) if outside else 0 :]
        for state, sums in zip(self._states, slots, strict=False):
            dtype = metric._defaults[state.name].dtype
            if state.kind is StateKind.INTEGER:
                # In the state's own dtype where that can hold the totals.
                fits = torch.equal(sums.to(dtype).to(torch.int64), sums)
                setattr(metric, state.name, (sums.to(dtype) if fits else sums.clone()).view(state.shape))
            elif state.kind is StateKind.FLOAT:
                total = each_rounded(sums[1:].view(-1, SUM_SLOTS))
                setattr(metric, state.name, total.to(torch.float64 if sums[0] else dtype).view(state.shape))
        metric._update_count = updates
        with _same_everywhere():
            return self._measured(metric)

    def _slots_by_state(self, ledger: Tensor) -> list[Tensor]:
        return list(torch.split(ledger, self._sizes))[2:]


def _sentence(error: BaseException) -> str:
    """An error's text in one line, with a full stop."""
    text = " ".join(text_of(error).split()) or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


class FromRows(_Wrapped):
    """A metric of all rows: updated on rank 0 with pieces of 4,096 rows, in the order of the data set."""

    def compute(self, columns: Mapping[str, Any]) -> Measured:
        """Update a copy of the metric with all rows, and let it compute."""
        rows = len(columns[self.columns[0]])
        metric = isolated(self.metric)
        # All where these decide what scores are. No piece of one row: TorchMetrics drops a dimension of one.
        # Of a user's own that could be summed all: it may average over an update.
        at_once = any(map(normaliser_of, metric.modules())) or (is_own(metric) and states_of(metric))
        piece = rows if at_once else _PIECE_ROWS
        starts = range(0, max(rows - 1, 1), piece) if rows else ()
        # What draws, as a bootstrap, draws the same each time.
        with _same_everywhere(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            for start, stop in pairwise([*starts, rows]):
                self._update(metric, columns, range(start, stop))
            measured = self._measured(metric)
        if self._normaliser != "softmax" or hasattr(metric, "n_bins") or "probabilities" not in columns:
            return measured
        if (ones := int((np.asarray(columns["probabilities"]) == 1).any(axis=-1).sum())) < 2:
            return measured
        warning = f"{self.name}: {ones} samples have a probability that is rounded to 1, which it cannot rank"
        return replace(measured, warnings=(*measured.warnings, f"{warning}; auroc ranks log-odds"))


def measured_of(
    name: str, computed: Any, *, prefix: str = "", higher_is_better: bool | None = None
) -> Measured:
    """A number under the metric's name, a tensor as lists, a dict by its keys.

    NaN and infinities become None, and are counted under ``nonfinite``; a warning says that the metric
    gave them.
    """
    by_key = {name: computed}
    if isinstance(computed, Mapping):
        by_key = {f"{prefix}{key}": value for key, value in computed.items()}
    values: dict[str, Value] = {}
    nonfinite: dict[str, dict[str, int]] = {}
    directions: dict[str, str] = {}
    warned: list[str] = []
    for key, value in by_key.items():
        counts = dict.fromkeys(NONFINITE_KINDS, 0)
        values[key] = _plain_value(name, value, counts)
        if any(counts.values()):
            nonfinite[key] = {kind: count for kind, count in counts.items() if count}
            kinds = ", ".join(f"{count} {kind}" for kind, count in nonfinite[key].items())
            cause = f"TorchMetrics' own {name} gives this for these samples"
            warned.append(f"{key} is not finite ({kinds}): {cause}")
        if higher_is_better is not None and not isinstance(values[key], (list, dict, str)):
            directions[key] = direction(higher_is_better)
    return Measured(values=values, nonfinite=nonfinite, directions=directions, warnings=tuple(warned))


def _plain_value(name: str, value: Any, counts: dict[str, int]) -> Value:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        counts["nan" if math.isnan(value) else "pos_inf" if value > 0 else "neg_inf"] += 1
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain_value(name, part, counts) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(name, part, counts) for part in value]
    raise UsageError(
        f"{name} computes a {type(value).__name__}, expected numbers, texts, and lists and dicts of them"
    )
