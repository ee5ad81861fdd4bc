"""RunOptions: how one evaluation runs, as the caller asks for it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from dualeval.errors import UsageError
from dualeval.options.choices import (
    LAYOUTS,
    ON_ERROR,
    OPTIMIZATIONS,
    PRECISIONS,
    SCHEDULES,
    SHARDINGS,
    check_choice,
    check_count,
    check_groups,
    check_kind,
    check_part,
    check_preparation,
    check_sharding,
)
from dualeval.process_start import DEFAULT_SIGNALS
from dualeval.wording import did_you_mean

_LEAST_TIMEOUT_S = 1.0
_LONGEST_TIMEOUT_S = 1e6


class NewFolder(enum.Enum):
    """The value of ``out`` that asks for a new folder, ``runs/<UTC time>-<fingerprint>``."""

    NEW_FOLDER = "runs/<UTC time>-<fingerprint>"


NEW_FOLDER: Final = NewFolder.NEW_FOLDER
Out: TypeAlias = str | Path | Literal[NewFolder.NEW_FOLDER] | None
_ON_STALL = ("raise", "exit")


def _is_path_or_none(value: object) -> bool:
    # Path("") is the folder of the script's caller.
    return value is None or (isinstance(value, str | Path) and value != "")


def _is_out(value: object) -> bool:
    return isinstance(value, NewFolder) or _is_path_or_none(value)


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_name(value: object) -> bool:
    return value is None or (isinstance(value, str) and value != "")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_call(value: object) -> bool:
    return value is None or callable(value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(isinstance(name, str) for name in value)


def of_kind(default: Any, fits: Callable[[object], bool], expected: str) -> Any:
    """A field of options whose value has to be of a kind; a bool of its default's needs none."""
    return field(default=default, metadata={"fits": fits, "expected": expected})


def _check_kinds(kind: type[RunOptions | SessionOptions], options: Mapping[str, Any]) -> None:
    for option in fields(kind):
        if option.name in options:
            name, value, of = option.name, options[option.name], option.metadata
            if isinstance(option.default, bool):
                check_kind(name, value, isinstance(value, bool), "True or False")
            elif of:
                check_kind(name, value, of["fits"](value), of["expected"])


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one evaluation; the same on every rank."""

    # Folder for result.json and the rest, the same path on every rank; a run of the same job that was begun
    # there is gone on with. `NEW_FOLDER` makes a new one, None writes nothing at all.
    out: Out = of_kind(
        None, _is_out, f"a path, None (nothing is written) or dualeval.NEW_FOLDER ({NEW_FOLDER.value})"
    )
    batch_size: int = 64
    # Names of metrics: of the task's own, or those of installed packages; empty for the task's.
    metric: Sequence[str] = of_kind((), _are_texts, "names of metrics, as ('loss', 'top1')")
    # Evaluate only the first samples; None for all.
    limit: int | None = None
    # Evaluate only so many samples, drawn by their ids: those with the smallest sha256 of seed and id, in
    # data-set order; None for all.
    sample: int | None = None
    # Another one draws other samples; None is 0.
    seed: int | None = None
    # A column whose equal entries mark samples that are not independent, such as questions on one text; the
    # intervals allow for that. None: the task's own, which most have not.
    cluster: str | None = of_kind(None, _is_name, "the name of a column, or None")
    # Columns of the data that the rows keep; empty for all small ones, ("none",) for none.
    keep: Sequence[str] = of_kind((), _are_texts, "names of columns, as ('patient', 'scanner')")
    # Columns by whose values the metrics are computed again, each a name or a cross of names ("scanner*sex").
    by: Sequence[str] = of_kind((), _are_texts, "columns, as ('scanner', 'scanner*sex')")
    # Where columns of numbers are cut for that; else into quartiles.
    bins: Sequence[float] = ()
    # One of `choices.PRECISIONS`.
    precision: str = "fp32"
    # With precision "fp16" or "bf16", leave batch norms in float32.
    keep_batchnorm_fp32: bool = False
    # "contiguous", "channels-last", or "auto", which decides by the kinds of the model's layers.
    layout: str = "auto"
    # "fold" makes batch norms a part of the convolutions before them, "compile" uses torch.compile; None does
    # neither.
    optimize: str | None = None
    # "fsdp" divides the model's parameters over the ranks, each of which gathers a layer's while it computes
    # it; None gives each rank all of them. The numbers are the same.
    shard: str | None = None
    # With `shard`, keep a rank's part in host memory, for a model that fits no device.
    offload: bool = False
    # Reading processes of each rank; 0 reads in the rank's own process. None: none where the samples lie in
    # memory already, else up to one a core; a loop of the caller's own has none.
    workers: int | None = None
    # Take fewer, with a note, where the shared memory has no room for the batches of all. Without it that is
    # an error.
    fewer_workers: bool = False
    # What a sample that cannot be read does: "stop" ends the run, "skip" leaves it out.
    on_error: str = "stop"
    # How chunks go to ranks: "static", chunk c to rank c mod size; "dynamic", to the rank that has time for
    # it; or "lockstep", as static, with one forward of every rank at a time, for models whose forward holds
    # collectives. A sharded model has "lockstep" in place of "static".
    schedule: str = "static"
    # Remove an earlier run's files from `out` first; not again where torchrun starts the ranks of the same
    # launch again.
    fresh: bool = False
    # Before going on from what is finished in `out`, or giving back a finished result, evaluate two finished
    # batches anew and compare them with their rows.
    replay: bool = True
    # Let ranks of different device types or versions compute one result, and go on from what another kind of
    # machine has computed.
    mix_machines: bool = False
    # The folder of a finished run over the same samples; the result says how the predictions differ from its.
    # None compares with nothing.
    reference: str | Path | None = of_kind(None, _is_path_or_none, "the folder of a finished run, or None")

    def __post_init__(self) -> None:
        _check_kinds(RunOptions, vars(self))
        if self.batch_size is None:
            raise UsageError("batch_size: expected a whole number, found None")
        check_count("batch_size", self.batch_size, 1)
        check_part(limit=self.limit, sample=self.sample, seed=self.seed)
        check_groups(self.by, self.bins)
        check_count("workers", self.workers, 0)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("layout", self.layout, LAYOUTS)
        if self.optimize is not None:
            check_choice("optimize", self.optimize, OPTIMIZATIONS)
        if self.shard is not None:
            check_choice("shard", self.shard, SHARDINGS)
        check_choice("on_error", self.on_error, ON_ERROR)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_preparation(
            precision=self.precision,
            keep_batchnorm_fp32=self.keep_batchnorm_fp32,
            optimize=self.optimize,
        )
        check_sharding(shard=self.shard, offload=self.offload, optimize=self.optimize, schedule=self.schedule)
        if self.path is not None:
            # It imports torch, and the names of this module are wanted without.
            from dualeval.engine.folder.layout import check_path

            check_path(self.path)
        if self.reference and self.path is not None and Path(self.reference).resolve() == self.path.resolve():
            raise UsageError(
                f"reference and out are both {self.path}: a run is compared with another one. Give another "
                "out"
            )
        if self.fresh and self.out is None:
            raise UsageError(
                "fresh=True removes an earlier run's files from out, and out is None: give a folder"
            )

    @property
    def path(self) -> Path | None:
        """The folder that was given by its path; None where there is none, or a new one is wanted."""
        return None if self.out is None or isinstance(self.out, NewFolder) else Path(self.out)


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """The options of a session, as ``Session`` describes them."""

    backend: str | None = of_kind(None, _is_text, "the name of a backend, or None for the launcher's own")
    device: Any = None
    launcher: str | None = of_kind(None, _is_text, "the name of a launcher, or None to find it out")
    allow_shared_gpu: bool = False
    mix_machines: bool = False
    heartbeat_timeout: float = of_kind(60.0, _is_number, "seconds, as 60.0")
    forward_timeout: float = of_kind(1800.0, _is_number, "seconds, as 1800.0")
    stop_signals: Sequence[str] = of_kind(
        DEFAULT_SIGNALS, _are_texts, "names of signals, as ('SIGTERM', 'SIGINT')"
    )
    on_stall: str | None = of_kind(None, _is_text, "'raise', 'exit' or None")
    debug: bool = False
    stop: Callable[[], bool | str] | None = of_kind(None, _is_call, "a function without arguments, or None")
    note: Callable[[str], None] | None = of_kind(None, _is_call, "a function of a sentence, or None")

    def __post_init__(self) -> None:
        check_session_options(vars(self))
        check_timeout("heartbeat_timeout", self.heartbeat_timeout)
        check_timeout("forward_timeout", self.forward_timeout)
        if self.on_stall not in (*_ON_STALL, None):
            raise UsageError(
                f"on_stall={self.on_stall!r}: expected {' or '.join(map(repr, _ON_STALL))}, or None"
            )


def check_session_options(options: Mapping[str, Any]) -> None:
    """Check that options of a session, which may be among others, are of the kinds that they have to be."""
    _check_kinds(SessionOptions, options)


def run_options_of(options: Mapping[str, Any]) -> RunOptions:
    """Make ``RunOptions`` of options by name."""
    known, of_session = ([each.name for each in fields(kind)] for kind in (RunOptions, SessionOptions))
    unknown = next((name for name in options if name not in known), None)
    if unknown is None:
        return RunOptions(**options)
    if unknown in of_session:
        raise UsageError(f"{unknown!r} is an option of the session: write dualeval.Session({unknown}=...).")
    if unknown == "nproc":
        raise UsageError("'nproc' is an option of dualeval.evaluate, which starts the ranks.")
    # Beside these, what Session.evaluate, ModelTask and evaluate take.
    known += ["loggers", "step", "model", "data", "metrics", "collate", "forward", "observe", "rows"]
    known += [*of_session, "nproc"]
    hint = did_you_mean(unknown, known) or f" There are {', '.join(known)}."
    raise UsageError(f"{unknown!r} is not an option of an evaluation.{hint}")


def check_timeout(option: str, seconds: float) -> None:
    """Raise UsageError where a timeout is none that ranks can be watched by."""
    if not _LEAST_TIMEOUT_S <= seconds <= _LONGEST_TIMEOUT_S:
        raise UsageError(
            f"{option} {seconds:g}: expected seconds, {_LEAST_TIMEOUT_S:g} to {_LONGEST_TIMEOUT_S:,.0f} (a "
            "rank reports twice a second how far it is)"
        )
