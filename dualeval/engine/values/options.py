"""How one evaluation runs, and a session, as the caller asks for it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from dualeval.errors import UsageError
from dualeval.messages import did_you_mean
from dualeval.options.choices import SCHEDULES, STATIC
from dualeval.options.evaluation import LAUNCH, RUN, EvaluationOptions, are_texts
from dualeval.options.fields import fields_of, option
from dualeval.process.start import DEFAULT_SIGNALS

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


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_call(value: object) -> bool:
    return value is None or callable(value)


def _check_timeout(option: str, seconds: float) -> None:
    """Raise UsageError where a timeout is none that ranks can be watched by."""
    if not _LEAST_TIMEOUT_S <= seconds <= _LONGEST_TIMEOUT_S:
        raise UsageError(
            f"{option} {seconds:g}: expected seconds, {_LEAST_TIMEOUT_S:g} to {_LONGEST_TIMEOUT_S:,.0f} (a "
            "rank reports twice a second how far it is)"
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions(EvaluationOptions):
    """The options of one evaluation; the same on every rank.

    Attributes:
        out: Output folder, the same on every rank; an unfinished run of the same job resumes there. None
            writes nothing, ``NEW_FOLDER`` makes one.
        evaluate_missing: False if what earlier runs and shares have left in out has to be all.
        reference: Folder of a finished run of the same samples, with which the predictions are compared.
    """

    out: Out = option(
        None,
        fits=lambda value: isinstance(value, NewFolder) or _is_path_or_none(value),
        expected=f"a path, None (nothing is written) or dualeval.NEW_FOLDER ({NEW_FOLDER.value})",
    )
    # How chunks go to ranks: "static", chunk c to rank c mod size; "dynamic", to the rank that has time for
    # it; or "lockstep", as static, with one forward of every rank at a time, for models whose forward holds
    # collectives. A sharded model has "lockstep" in place of "static".
    schedule: str = option(
        STATIC, "static (default); dynamic (by load); lockstep.", group=RUN, choices=SCHEDULES, metavar="WORD"
    )
    # Not again where torchrun starts the ranks of the same launch again.
    fresh: bool = option(False, "Remove an earlier run's files from --out first.", group=RUN)
    # Batches are evaluated anew and compared with their rows, also before a finished result is given back.
    replay: bool = option(True, "Check two batches before resuming (default).", group=RUN)
    # Also for going on from what another kind of machine has computed.
    mix_machines: bool = option(False, "Let devices or versions differ between ranks.", group=LAUNCH)
    # `dualeval finish` has False.
    evaluate_missing: bool = True
    # How to start over is not said alike in all commands.
    start_over: str = "Give another --out, or --fresh to remove what is there and start over"
    reference: str | Path | None = option(
        None, fits=_is_path_or_none, expected="the folder of a finished run, or None"
    )

    def __post_init__(self) -> None:
        if self.batch_size is None:
            raise UsageError("batch_size: expected a whole number, found None")
        super().__post_init__()
        self.check_schedule(self.schedule)
        if self.path is not None:
            # It imports torch, and the names of this module are wanted without.
            from dualeval.atomic_files import check_path

            check_path(self.path)
        if self.reference and self.path is not None and Path(self.reference).resolve() == self.path.resolve():
            raise UsageError(
                f"reference and out are both {self.path}: a run cannot be compared with itself. Give another "
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

    backend: str | None = option(
        None, fits=_is_text, expected="the name of a backend, or None for the launcher's own"
    )
    device: Any = None
    launcher: str | None = option(
        None, fits=_is_text, expected="the name of a launcher, or None to detect it"
    )
    allow_shared_gpu: bool = option(False, "Let several ranks of a node share a GPU.", group=LAUNCH)
    mix_machines: bool = False
    heartbeat_timeout: float = option(
        60.0,
        "Seconds until a rank counts as hung.",
        group=LAUNCH,
        metavar="S",
        shown="60",
        fits=_is_number,
        expected="seconds, as 60.0",
        also=_check_timeout,
    )
    forward_timeout: float = option(
        1800.0,
        "Seconds to compute one batch.",
        group=LAUNCH,
        metavar="S",
        shown="1800",
        fits=_is_number,
        expected="seconds, as 1800.0",
        also=_check_timeout,
    )
    stop_signals: tuple[str, ...] = option(
        DEFAULT_SIGNALS,
        "Save, exit.",
        group=LAUNCH,
        metavar="NAMES",
        fits=are_texts,
        expected="names of signals, as ('SIGTERM', 'SIGINT')",
    )
    on_stall: str | None = option(None, fits=_is_text, expected="'raise', 'exit' or None")
    debug: bool = False
    stop: Callable[[], bool | str] | None = option(
        None, fits=_is_call, expected="a function without arguments, or None"
    )
    note: Callable[[str], None] | None = option(
        None, fits=_is_call, expected="a function that takes a sentence, or None"
    )

    def __post_init__(self) -> None:
        check_session_options(vars(self))
        if self.on_stall not in (*_ON_STALL, None):
            raise UsageError(
                f"on_stall={self.on_stall!r}: expected {' or '.join(map(repr, _ON_STALL))}, or None"
            )


def or_remove(out: object) -> str:
    """How to start over, for ``start_over``, where --fresh does not do it."""
    return f"Give another --out, or remove {out} to start over"


def check_session_options(options: Mapping[str, Any]) -> None:
    """Check that options of a session, which may be among others, are of the kinds that they have to be."""
    for field in fields_of(SessionOptions):
        if field.name in options:
            field.check(options[field.name], field.name)


def run_options_of(**options: Any) -> RunOptions:
    """Make ``RunOptions`` of options by name."""
    if TYPE_CHECKING:  # for jedi, as in dualeval.evaluate
        RunOptions(evaluate_missing=True, start_over="", **options)
    known, of_session = ([each.name for each in fields(kind)] for kind in (RunOptions, SessionOptions))
    unknown = next((name for name in options if name not in known), None)
    if unknown is None:
        return RunOptions(**dict(options))
    if unknown in of_session:
        raise UsageError(f"{unknown!r} is an option of the session: write dualeval.Session({unknown}=...).")
    if unknown == "nproc":
        raise UsageError("'nproc' is an option of dualeval.evaluate, which starts the ranks.")
    # Beside these, what Session.evaluate, ModelTask and evaluate take.
    known += ["loggers", "step", "model", "data", "metrics", "collate", "forward", "observe", "rows"]
    known = sorted({*known, *of_session, "nproc"} - {"evaluate_missing", "start_over"})
    hint = did_you_mean(unknown, known) or f" There are {', '.join(known)}."
    raise UsageError(f"{unknown!r} is not an option of an evaluation.{hint}")
