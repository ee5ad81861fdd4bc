"""Metrics of classification into num_classes classes, and the per-sample columns that they read.

The columns, one value per sample, are made by ``observe_logits``:

    loss        float32  cross entropy; NaN or +inf where the logits make it so
    confidence  float32  softmax probability of the predicted class
    prediction  int32    predicted class; -1 where a logit is NaN
    target      int32    true class, 0 <= target < num_classes
    rank        int32    number of classes ahead of the target; at least num_classes where a logit is NaN
    nan_logits  bool     at least one logit is NaN
    inf_logits  bool     at least one logit is infinite
    ties        int32    on request: how many of ``top`` have the largest logit, where the target has it
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.columns.late import KEEPING_LATE, LateColumns
from dualeval.columns.ragged import all_copied
from dualeval.errors import UsageError
from dualeval.messages import nearest
from dualeval.metrics import exact
from dualeval.metrics.confusion import NO_CLASS, Confusion, Matthews, PrecisionRecall
from dualeval.metrics.intervals import wilson_interval
from dualeval.metrics.means import Mean
from dualeval.metrics.metric import Described, Measured, Metric, RowMetric, by_names
from dualeval.metrics.ordering import order_keys_in_place
from dualeval.metrics.scores import FRACTION, Score
from dualeval.options.choices import check_kind

# Columns of shape (samples, num_classes): they are large, and few metrics read them. A float32 probability
# is 1 from a margin of 17 on.
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": Tensor.float,
    "probabilities": lambda logits: _as_float32(logits).double().softmax(dim=1),
}
# Columns that are made for a metric that reads them.
ON_REQUEST = (*SCORES, "ties")
# Of ``observe_logits``, besides these.
_COLUMNS = ("loss", "confidence", "prediction", "target", "rank", "nan_logits", "inf_logits", "top")
# The logits of so many classes wait for those of other batches: 4 MiB until the ledger takes their rows. From
# a GPU come those of so many: 64 MiB, and no kernel beside the forward's.
_FEW_CLASSES, _FEW_OF_GPU = 64, 1024
# So many logits are made into columns at once.
_AT_ONCE = 1 << 20
LARGEST_CONFUSION = 2048  # classes; the dense ledger is then 33.6 MB, and grows with the square

_NO_RANK = 2**31 - 1
# As tensors, for the reason given in ``ordering.py``.
_ZERO = torch.tensor(0.0, device="cpu")  # whatever the default device is
_LOWER_HALF = torch.tensor(32, device="cpu")
_ZERO_DOUBLE = torch.tensor(0.0, dtype=torch.float64, device="cpu")
_ECE_BINS = 15
# Half precision sums a thousand classes to 1 within this.
_NEAR_ONE = 1e-2
_ROUNDED = (
    "auroc: its formula has changed since this run, which has kept no logits: its probabilities that are "
    "rounded to 1 are ties. Evaluate again with --metric auroc, which ranks log-odds"
)
_TOP = re.compile(r"top([1-9][0-9]*)")


def observe_logits(logits: Tensor, target: Tensor, top: int, read: Collection[str] = ()) -> dict[str, Tensor]:
    """Make the per-sample columns of one batch, on the device of the logits, without waiting for it.

    Classes are in the order of descending logit (``_as_float32``), equal logits in the order of their index;
    -0.0 equals 0.0. Prediction, rank and ``top`` all follow this order. A row's results depend on it alone.
    """
    return _columns_of(logits, target, top, _names(read))


def _names(read: Collection[str]) -> tuple[str, ...]:
    return (*_COLUMNS, *filter(read.__contains__, ON_REQUEST))


def _columns_of(logits: Tensor, target: Tensor, top: int, names: Collection[str]) -> dict[str, Tensor]:
    """The columns of these names."""
    wanted = {*names}
    columns = {name: scores(logits) for name, scores in SCORES.items() if name in wanted}
    target_index = target.to(torch.int64).unsqueeze(1)
    values = _as_float32(logits) + _ZERO  # -0.0 + 0.0 is 0.0: their bits must not differ in the keys
    if wanted & {"loss", "confidence"}:
        columns["loss"], columns["confidence"] = _loss_and_confidence(values, target_index)
    nan_logits = columns["nan_logits"] = values.amax(dim=1).isnan()
    if "inf_logits" in wanted:
        # Without the NaN, a float64 sum of float32 values is not finite only where one of them is infinite.
        sums = torch.nansum(values, dim=1, dtype=torch.float64)
        columns["inf_logits"] = sums.mul_(_ZERO_DOUBLE).isnan()
    keys = order_keys_in_place(values) if wanted & {"rank", "prediction", "top", "ties"} else values
    if wanted & {"rank", "ties"}:
        of_target = keys.gather(1, target_index)
        rank = (keys > of_target).sum(dim=1, dtype=torch.int32)
        columns["rank"] = rank.masked_fill_(nan_logits, _NO_RANK)
    if wanted & {"prediction", "top", "ties"}:
        largest, places = torch.topk(keys, min(top, logits.shape[1]), dim=1)
        if "ties" in wanted:  # the upper halves of the keys are the logits
            alike = largest >> _LOWER_HALF == of_target >> _LOWER_HALF
            columns["ties"] = (alike.sum(dim=1, dtype=torch.int32) * alike[:, 0]).masked_fill_(nan_logits, 0)
        first = places.to(torch.int32)
        columns["top"] = first.masked_fill_(nan_logits.unsqueeze(1), NO_CLASS)
        columns["prediction"] = first[:, 0]
    columns["target"] = target.to(torch.int32)
    return {name: columns[name] for name in names if name in columns}


def _as_float32(logits: Tensor) -> Tensor:
    """Logits in float32; of float64 the distances to the row's largest, which the cast may lose."""
    if logits.dtype == torch.float64:
        largest = logits.amax(dim=1, keepdim=True)
        logits = logits - largest.masked_fill(~largest.isfinite(), 0)
    return logits.to(torch.float32)


class LogitColumns(LateColumns, Mapping[str, Tensor]):
    """The columns of ``observe_logits``, made on the host when they are read; and others as they are.

    A batch of few classes takes as long as its thirty kernels take to be called, also on a GPU: what waits to
    be counted is made of many batches at once, and only the columns that somebody reads. As a row depends on
    itself alone, these are the columns that each batch would have by itself.
    """

    def __init__(self, given: Mapping[str, Tensor], top: int, read: Collection[str], any_label: bool) -> None:
        self.given = given
        self._top, self._read, self._any_label = top, read, any_label
        self.of: Callable[[Mapping[str, Any]], LogitColumns] = partial(
            LogitColumns, top=top, read=read, any_label=any_label
        )
        self._made: dict[str, Tensor] = {}
        logits, target, *others = given.values()
        # What batches have in common whose columns can be made at once.
        self.kind = logits.dtype, logits.shape[1:], target.dtype, target.shape[1:], read
        if others:
            self.kind += tuple((other.dtype, other.shape[1:]) for other in others)

    def _columns(self) -> tuple[str, ...]:
        _, _, *others = self.given
        return (*_names(self._read), *others)

    def __getitem__(self, name: str) -> Tensor:
        self._made = self._made or self.made(self._columns())
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns())

    def __len__(self) -> int:
        return len(self._columns())

    def made(self, names: Collection[str]) -> dict[str, Tensor]:
        (_, logits), (_, target), *others = self.given.items()
        rows = max(1, _AT_ONCE // max(1, logits.shape[1]))
        parts = [slice(start, start + rows) for start in range(0, len(target) or 1, rows)]
        pieces = [self._made_of(logits[part], target[part], names) for part in parts]
        columns = pieces[0]
        if len(pieces) > 1:
            columns = {name: torch.cat([piece[name] for piece in pieces]) for name in columns}
        return {**columns, **{name: column for name, column in others if name in names}}

    def _made_of(self, logits: Tensor, target: Tensor, names: Collection[str]) -> dict[str, Tensor]:
        known = _known(target, logits) if self._any_label else target
        columns = _columns_of(logits, known, self._top, names)
        return {**columns, **({"target": as_labels(target)} if "target" in columns else {})}

    def joined(self, others: Sequence[LateColumns]) -> LogitColumns:
        batches = [self.given, *(batch.given for batch in others)]
        return self.of({name: torch.cat([batch[name] for batch in batches]) for name in self.given})


def observed_logits(
    logits: Tensor,
    target: Tensor,
    top: int,
    read: Collection[str] = (),
    *,
    observe: Any = None,
    any_label: bool = False,
    others: Mapping[str, Tensor] = MappingProxyType({}),
) -> Mapping[str, Tensor]:
    """As ``observe_logits``, with other columns; but of few classes made on the host when they are read.

    ``observe`` is the method that returns them: one that the user has put in its place, or around it, gets
    columns that are there.
    With ``any_label`` a label that no class has is no error here: the host, which knows its sample, says it.
    """
    if logits.ndim != 2 or len(logits) != len(target):
        raise UsageError(
            f"the model returned the shape {tuple(logits.shape)} for a batch of {len(target)}, expected "
            f"({len(target)}, classes). A squeeze() without a dimension drops that of a batch of one sample: "
            "write squeeze(-1), or flatten(1)"
        )
    late = observe is None or getattr(observe, "__func__", None) in KEEPING_LATE
    if late and logits.shape[1] <= (_FEW_CLASSES if logits.is_cpu else _FEW_OF_GPU):
        given = {"logits": logits, "target": target}
        if logits.is_cpu:  # copied, as the next batch may be written into this memory; a GPU's are anyway
            given = {"logits": logits.clone(), "target": target.clone()}
            others = all_copied(others) if others else {}
        return LogitColumns({**given, **others}, top, read, any_label)
    known = _known(target, logits) if any_label else target
    return {**observe_logits(logits, known, top, read), "target": as_labels(target), **others}


def _known(target: Tensor, logits: Tensor) -> Tensor:
    return target.clamp(0, logits.shape[1] - 1)


def as_labels(target: Tensor) -> Tensor:
    """Labels as int32; one beyond that is the nearest, which no model has either, and never another one."""
    limits = torch.iinfo(torch.int32)
    return (target.clamp(limits.min, limits.max) if target.dtype == torch.int64 else target).to(torch.int32)


def are_probabilities(outputs: Tensor) -> bool:
    """Whether outputs are what a softmax gives; one class alone tells nothing."""
    values = outputs.double()
    sums_to_one = (values.sum(dim=1) - 1).abs() < _NEAR_ONE
    return outputs.shape[1] > 1 and bool(((values >= 0).all(dim=1) & sums_to_one).all())


# Apart from observe_logits so that their (batch, classes) buffers are free again before the next is made:
# with all of them alive at once, 256 x 1000 logits on a CPU took twice as long, in page faults.
def _loss_and_confidence(values: Tensor, target_index: Tensor) -> tuple[Tensor, Tensor]:
    log_probabilities = torch.log_softmax(values, dim=1)
    loss = log_probabilities.gather(1, target_index).squeeze(1).neg_()
    return loss, log_probabilities.amax(dim=1).exp_()  # the predicted class has the largest probability


def classification_metric(name: str, num_classes: int, others: Sequence[str] = ()) -> Metric | RowMetric:
    """The metric of that name; see ``docs/metrics.md`` for what each one is.

    ``others`` are names that the caller knows besides, for the message.
    """
    if match := _TOP.fullmatch(name):
        k = int(match.group(1))
        if k > num_classes:
            raise UsageError(
                f"metric {name!r} needs at least {k} classes, found {num_classes}: ask for a smaller k"
            )
        return TopK(k)
    if name == "confusion" and num_classes > LARGEST_CONFUSION:
        raise UsageError(
            f"metric 'confusion' is kept for at most {LARGEST_CONFUSION} classes, found {num_classes}: "
            "ask for 'precision_recall', which keeps the counts of each class"
        )
    if make := BY_NAME.get(name):
        return make(num_classes)
    known = ["top1", "top5", *BY_NAME, *others]
    known += ["default", *(f"{over}_{key}" for over in ("macro", "micro") for key in _AVERAGED)]
    raise UsageError(
        f"there is no metric {name!r}.{nearest(name, known)} Metrics: {', '.join([*BY_NAME, *others])}, "
        f"and top<k> for k from 1 to {num_classes}"
    )


def classification_metrics(asked: Sequence[str], num_classes: int) -> list[Metric | RowMetric]:
    """The metrics of these names, each once; the default ones without names."""
    default = [classification_metric(name, num_classes) for name in default_metrics(num_classes)]
    return by_names(asked, default, lambda name: classification_metric(name, num_classes)) or default


def default_metrics(num_classes: int) -> tuple[str, ...]:
    """The names of the metrics that a run computes when it is asked for none."""
    return (
        "loss",
        "top1",
        *(["top5"] if num_classes > 5 else []),
        "precision_recall",
        *(["confusion"] if num_classes <= LARGEST_CONFUSION else []),
        "ece",
        "nonfinite_logits",
    )


class TopK(Described):
    """The fraction of samples with fewer than k classes ahead of the target, with its Wilson interval.

    Reads the column ``rank``, the number of these classes.

    Ledger: the number of samples, the number of them that are right.

    Args:
        k: at least 1.
        name: of metric and value; without one as ``top5``.
        unit: as in ``Measured``.
        higher_is_better: None where neither is better.

    Raises:
        UsageError: k is no whole number of at least 1.
    """

    columns = ("rank",)
    size = 2

    def __init__(
        self,
        k: int,
        *,
        name: str | None = None,
        unit: str | None = FRACTION,
        higher_is_better: bool | None = True,
    ) -> None:
        check_kind("k", k, isinstance(k, int) and k >= 1, "a whole number of at least 1")
        super().__init__(f"top{k}" if name is None else name, unit, higher_is_better)
        self.k = k

    @property
    def score(self) -> Score:
        """Whether fewer than k classes are ahead."""
        return Score(column="rank", below=self.k)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of column ``rank``."""
        rank = columns["rank"]
        ledger[0] += len(rank)
        ledger[1] += torch.count_nonzero(rank < self.k)

    def compute(self, ledger: Tensor) -> Measured:
        """The fraction under the metric's name; None without samples."""
        samples, correct = ledger.tolist()
        if samples == 0:
            return self.measured(None)
        return self.measured(correct / samples, wilson_interval(correct, samples))


class CalibrationError(Described):
    """The expected calibration error over 15 equal bins of confidence, ((m - 1) / 15, m / 15].

    The sum over bins of |samples that are right - sum of confidence|, over the number of samples (C. Guo et
    al., "On calibration of modern neural networks", ICML 2017, equation 3), as an exact rational number that
    is rounded once. A confidence of 0 is in the first bin. With a NaN confidence the value is None.

    Ledger: the counts of NaN, +inf and -inf, then for each bin the samples, the right ones and 10 limbs.
    """

    columns = ("confidence", "prediction", "target")
    size = len(exact.NONFINITE_KINDS) + _ECE_BINS * (2 + exact.SUM_LIMBS)

    def __init__(self) -> None:
        super().__init__("ece", FRACTION, higher_is_better=False)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of columns ``confidence``, ``prediction`` and ``target``."""
        confidence = columns["confidence"]
        right = columns["prediction"] == columns["target"]
        finite = confidence.isfinite()
        # Fifteen times a float32 needs 28 bits: exact in float64, so a border falls into the lower bin.
        bins = (confidence.to(torch.float64) * _ECE_BINS).nan_to_num_(0.0, 0.0, 0.0).ceil_().to(torch.int64)
        bins = bins.sub_(1).clamp_(0, _ECE_BINS - 1)
        added = exact.exact_sums(confidence, bins, _ECE_BINS, powers=False)
        samples = torch.bincount(bins[finite], minlength=_ECE_BINS).tolist()
        correct = torch.bincount(bins[finite & right], minlength=_ECE_BINS).tolist()

        ledger[: len(exact.NONFINITE_KINDS)] += torch.tensor(added.nonfinite)
        for slots, *new in zip(self._bins(ledger), samples, correct, added.sums, strict=True):
            if new[0]:
                slots[:2] += torch.tensor(new[:2])
                limbs = slots[2:].numpy()
                limbs[:] = exact.to_limbs(exact.from_limbs(limbs) + new[2], exact.SUM_LIMBS)

    def compute(self, ledger: Tensor) -> Measured:
        """Key ece; None without samples."""
        nonfinite = ledger[: len(exact.NONFINITE_KINDS)].tolist()
        if any(nonfinite):
            return self.measured(None, nonfinite=exact.nonfinite_counts(nonfinite))
        samples = gaps = 0
        for count, correct, *limbs in self._bins(ledger).tolist():
            if count:
                samples += count
                gaps += abs((correct << exact.SUM_UNIT_BITS) - exact.from_limbs(limbs))
        if samples == 0:
            return self.measured(None)
        return self.measured(gaps / (samples << exact.SUM_UNIT_BITS))

    @staticmethod
    def _bins(ledger: Tensor) -> Tensor:
        """A row for each bin: samples, right ones, and the limbs of the sum in units of 2**-149."""
        return ledger[len(exact.NONFINITE_KINDS) :].view(_ECE_BINS, 2 + exact.SUM_LIMBS)


class NonfiniteLogits:
    """How many samples have a NaN among their logits, and how many an infinity; a sample may have both.

    Ledger: these two numbers.
    """

    name = "nonfinite_logits"
    columns = ("nan_logits", "inf_logits")
    size = 2

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of columns ``nan_logits`` and ``inf_logits``."""
        ledger[0] += torch.count_nonzero(columns["nan_logits"])
        ledger[1] += torch.count_nonzero(columns["inf_logits"])

    def compute(self, ledger: Tensor) -> Measured:
        """Key nonfinite_logits: the numbers of samples, nan and inf."""
        nan, inf = ledger.tolist()
        warnings = (f"logits: {nan} samples have a NaN, {inf} an infinity",) if nan or inf else ()
        return Measured(values={"nonfinite_logits": {"nan": nan, "inf": inf}}, warnings=warnings)


class NonfiniteWarning(NonfiniteLogits):
    """Warns as ``NonfiniteLogits`` does, and gives no value: for runs that do not ask for that metric."""

    name = "nonfinite_warning"
    keeps_rows = False

    def compute(self, ledger: Tensor) -> Measured:
        """No value; a warning where there is a NaN or an infinity."""
        return Measured(values={}, warnings=super().compute(ledger).warnings)


class TieWarning:
    """Warns where the order of the classes decides which of several with the largest logit is predicted.

    Ledger: samples; those whose class shares the largest logit; of these the right ones, and those that would
    be by chance, in parts of 2**-32.
    """

    name = "tie_warning"
    columns = ("ties", "rank")
    size = 4
    keeps_rows = False

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of columns ``ties`` and ``rank``."""
        tied = columns["ties"] > 1
        ledger[0] += len(tied)
        ledger[1] += torch.count_nonzero(tied)
        ledger[2] += torch.count_nonzero(tied & (columns["rank"] == 0))
        ledger[3] += ((1 << 32) // columns["ties"][tied].to(torch.int64)).sum()

    def compute(self, ledger: Tensor) -> Measured:
        """No value; a warning where chance would give at least 1 % of the samples otherwise."""
        samples, tied, right, parts = ledger.tolist()
        by_chance = parts / 2**32
        # Half precision has ties, too, whose classes are in no order: four standard deviations.
        if abs(right - by_chance) < max(0.01 * samples, 2 * tied**0.5) or not tied:
            return Measured(values={})
        warning = (
            f"in {tied} of {samples} samples the target shares the largest logit with other classes, and the "
            f"first of these in the order of classes is predicted: {right} are right, {by_chance:.0f} would "
            "be by chance. Check first whether logits are rounded or saturated (float16, a sigmoid), and "
            "whether the right choice always has the same index"
        )
        return Measured(values={}, warnings=(warning,))


class MacroF1(PrecisionRecall):
    """The ``macro_f1`` of ``PrecisionRecall`` alone."""

    kind_name = "f1"

    def compute(self, ledger: Tensor) -> Measured:
        """Under the metric's name; None without samples."""
        value = {self.name: self._value(super().compute(ledger).values)}
        return Measured(values=value, units={self.name: FRACTION}, directions={self.name: "higher"})

    def _value(self, values: Mapping[str, Any]) -> Any:
        return values["macro_f1"]


class BinaryF1(MacroF1):
    """The F1 of class 1 of two."""

    kind_name = "binary_f1"

    def _value(self, values: Mapping[str, Any]) -> Any:
        return None if values["macro_f1"] is None else values["per_class"]["f1"][1]


class Auroc(Described):
    """The area under the ROC curve of each class against the rest, a mean over the classes that have one."""

    def __init__(self, column: str = "logits") -> None:
        super().__init__("auroc", FRACTION, higher_is_better=True)
        self.columns = (column, "target")

    def compute(self, columns: Mapping[str, Any]) -> Measured:
        """None with a logit that is NaN or +inf, or without pairs."""
        scores, target = (np.asarray(columns[name]) for name in self.columns)
        warnings = [_ROUNDED] if self.columns[0] != "logits" else []
        if not warnings:
            scores = np.concatenate(
                [log_odds(scores[at : at + 4096]) for at in range(0, len(scores) or 1, 4096)]
            )
        areas = []
        for place in range(scores.shape[1]):
            values, inverse, counts = np.unique(scores[:, place], return_inverse=True, return_counts=True)
            if np.isnan(values[-1:]).any():
                return self.measured(None, nonfinite={"nan": int(np.isnan(scores).any(axis=1).sum())})
            # Of the pairs of one inside and one of the others, those in order count twice, and ties once.
            inside = np.bincount(inverse[target == place], minlength=len(values))
            others = counts - inside
            twice = int((inside * (2 * np.cumsum(others) - others)).sum())
            if pairs := int(inside.sum()) * int(others.sum()):
                areas.append(twice / (2 * pairs))
        return self.measured(math.fsum(areas) / len(areas) if areas else None, warnings=warnings)


def log_odds(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """log p / (1 - p) of each class: its logit minus the logarithm of the others' summed exponentials."""
    with np.errstate(all="ignore"):
        values = logits.astype(np.float64)
        values -= values.max(axis=1, keepdims=True)
        in_order = np.sort(values, axis=1)  # so that the order of the other classes decides nothing
        others = np.logaddexp.reduce(in_order[:, :-1], axis=1, keepdims=True)
        below = values - np.logaddexp(others, in_order[:, -1:])
        return np.where(values == 0, -others, below - np.log1p(-np.exp(below)))


_AVERAGED = ("f1", "precision", "recall")
# Besides top<k>: each is made for a number of classes.
BY_NAME: dict[str, Callable[[int], Metric | RowMetric]] = {
    "loss": lambda num_classes: Mean("loss", higher_is_better=False, least=0),
    "precision_recall": PrecisionRecall,
    "confusion": Confusion,
    "ece": lambda num_classes: CalibrationError(),
    "nonfinite_logits": lambda num_classes: NonfiniteLogits(),
    "accuracy": lambda num_classes: TopK(1, name="accuracy"),
    "acc": lambda num_classes: TopK(1, name="acc"),
    "f1": MacroF1,
    "mcc": Matthews,
    "auroc": lambda num_classes: Auroc(),
}
# The same, for 'dualeval list metrics'.
LINES = {
    "loss": "mean cross entropy",
    "top1": "fraction of samples whose class is the first prediction; also top2, top3, ...",
    "accuracy": "the same as top1; also acc",
    "f1": "mean of the F1 of each class (macro_f1 of precision_recall)",
    "mcc": "Matthews' correlation coefficient, of any number of classes",
    "auroc": "area under the ROC curve of each class against the rest, averaged",
    "precision_recall": "precision, recall and F1, for each class and averaged",
    "confusion": "counts of each class predicted as each other class",
    "ece": "expected calibration error, 15 bins",
    "nonfinite_logits": "how many samples have a NaN or an infinity among their logits",
}
