"""EvaluationOptions: what every evaluation can be asked for, declared once.

A field is a flag of ``dualeval run``, a key of a job file and an option of ``Session.evaluate``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dualeval.errors import UsageError
from dualeval.options.choices import (
    DYNAMIC,
    FOLD,
    FSDP,
    LAYOUTS,
    ON_ERROR,
    OPTIMIZATIONS,
    SHARDINGS,
    check_groups,
)
from dualeval.options.fields import fields_of, flag_of, option
from dualeval.options.precision import PRECISIONS, Precision

# Headings of the help; those of a task's own options stand between DATA and RUN.
MODEL = "Model"
DATA = "Data"
RUN = "Run"
LAUNCH = "Launch"

# Beside a GPU, a rank has a thread that launches kernels and one that copies.
_OWN_THREADS = 2
# Each keeps two batches in shared memory; where a rank computes on the same cores, more are of no use.
_MOST_READERS, _MOST_READERS_ON_CPU = 32, 8


def readers_of(cores: int, device: str) -> int:
    """How many processes read for a rank with so many cores that computes on a type of device."""
    if device == "cpu":
        return min(_MOST_READERS_ON_CPU, cores)
    return min(_MOST_READERS, max(1, cores - _OWN_THREADS))


def cores_for(readers: int) -> int:
    """How many cores a rank needs for so many processes that read beside a GPU."""
    return readers + _OWN_THREADS


def is_name(value: object) -> bool:
    return value is None or (isinstance(value, str) and value != "")


def are_texts(value: object) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(isinstance(name, str) for name in value)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What is evaluated, how the model computes and who reads; the same on every rank."""

    # Names of metrics: of the task's own, or those of installed packages; empty for the task's.
    metric: tuple[str, ...] = option(
        (),
        "Metric.",
        group=RUN,
        metavar="NAME",
        shown="all",
        is_repeated=True,
        fits=are_texts,
        expected="names of metrics, as ('loss', 'top1')",
    )
    limit: int | None = option(None, "Evaluate only the first N samples.", group=DATA, least=1)
    # Those with the smallest sha256 of seed and id, in data-set order.
    sample: int | None = option(None, "Evaluate only N samples, drawn at random.", group=DATA, least=1)
    seed: int | None = option(
        None, "With --sample: another number draws others.", group=DATA, least=0, shown="0"
    )
    # Equal entries of this column mark them, such as questions on one text; the intervals allow for that.
    # None: the task's own, which most have not.
    cluster: str | None = option(
        None,
        "Samples with equal entries are not independent.",
        group=DATA,
        metavar="COLUMN",
        fits=is_name,
        expected="the name of a column, or None",
    )
    # Empty for all small ones.
    keep: tuple[str, ...] = option(
        (),
        "Columns of the data for the rows, or none.",
        group=DATA,
        metavar="A,B",
        fits=are_texts,
        expected="names of columns, as ('patient', 'scanner')",
    )
    by: tuple[str, ...] = option(
        (),
        "Metrics by group (A*B: crossed).",
        group=RUN,
        metavar="COLUMN",
        is_repeated=True,
        fits=are_texts,
        expected="columns, as ('scanner', 'scanner*sex')",
    )
    bins: tuple[float, ...] = option(
        (), "With --by: cuts numbers.", group=RUN, metavar="0,40,60", shown="quartiles"
    )
    batch_size: int = option(64, "Samples per batch.", group=RUN, least=1)
    precision: str = option(
        "fp32", "fp32 (default), tf32, [amp-]fp16, [amp-]bf16.", group=RUN, choices=tuple(PRECISIONS)
    )
    keep_batchnorm_fp32: bool = option(False, "With fp16, bf16: batch norms in fp32.", group=RUN)
    # "auto" decides by the kinds of the model's layers.
    layout: str = option("auto", "auto (default), contiguous or channels-last.", group=RUN, choices=LAYOUTS)
    # "fold" makes batch norms a part of the convolutions before them, "compile" uses torch.compile.
    optimize: str | None = option(None, "fold (batch norms) or compile.", group=RUN, choices=OPTIMIZATIONS)
    # Each rank gathers a layer's parameters while it computes it. The numbers are the same.
    shard: str | None = option(None, "Divide the model over the ranks: fsdp.", group=RUN, choices=SHARDINGS)
    offload: bool = option(False, "With --shard: a rank's part in host memory.", group=RUN)
    on_error: str = option(
        "stop", "An unreadable sample: stop (default) or skip it.", group=RUN, choices=ON_ERROR
    )
    # 0 reads in the rank's own process. None: none where the samples lie in memory already, else
    # ``readers_of`` its cores; a loop of the caller's own has none.
    workers: int | None = option(None, "Reading processes per rank.", group=LAUNCH, least=0, shown="by task")

    # What stands before an option's name in messages: whoever types flags has typed "--limit".
    _sign: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            field.check(getattr(self, field.name), self._option_name(field.name))
        self._check_part()
        check_groups(self.by, self.bins, sign=self._sign)
        self._check_preparation()
        self._check_sharding()

    def _option_name(self, name: str) -> str:
        return flag_of(name) if self._sign else name

    def _check_part(self) -> None:
        """Which part of the data set is evaluated."""
        sign = self._sign
        if self.limit is not None and self.sample is not None:
            raise UsageError(
                f"{sign}limit {self.limit} takes the first samples and {sign}sample {self.sample} draws "
                "some: leave out one of the two"
            )
        if self.seed is not None and self.sample is None:
            raise UsageError(f"{sign}seed {self.seed} alone draws nothing: give {sign}sample N too")

    def _check_preparation(self) -> None:
        """How the model is prepared."""
        if not self.keep_batchnorm_fp32:
            return
        sign, flag = self._sign, self._option_name("keep_batchnorm_fp32")
        casts = [name for name, each in PRECISIONS.items() if each.cast is not None]
        if self.precision not in casts:
            raise UsageError(
                f"{flag}: with {sign}precision {self.precision} nothing is cast, and batch norms are in "
                "float32 anyway (under autocast too). Leave it out, or give "
                f"{sign}precision {' or '.join(casts)}."
            )
        if self.optimize == FOLD:
            raise UsageError(
                f"{flag}: {sign}optimize {FOLD} makes batch norms a part of the convolutions before them, so "
                "none is left to keep. Leave out one of the two."
            )

    def _check_sharding(self) -> None:
        """How the model is divided over the ranks."""
        sign = self._sign
        if self.shard is None:
            if self.offload:
                raise UsageError(
                    f"{sign}offload keeps a rank's part of a sharded model in host memory, and the model is "
                    f"not sharded: give {sign}shard {FSDP} too"
                )
            return
        if self.optimize is not None:
            raise UsageError(
                f"{sign}optimize {self.optimize}: with {sign}shard {self.shard} a layer's weights are only "
                "there while it computes, so nothing can be folded into them, or compiled with them. Leave "
                "out one of the two"
            )

    def check_schedule(self, schedule: str) -> None:
        """Check that a schedule can be had with a model that is divided."""
        sign = self._sign
        if self.shard is not None and schedule == DYNAMIC:
            raise UsageError(
                f"{sign}schedule {schedule}: with {sign}shard {self.shard} each forward waits for all ranks, "
                f"so none can take more batches than another. Leave {sign}schedule out"
            )


def precision_of(options: EvaluationOptions) -> Precision:
    """How the model computes, as the options say."""
    return replace(PRECISIONS[options.precision], keeps_batchnorm=options.keep_batchnorm_fp32)
