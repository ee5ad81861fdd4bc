"""What an output folder holds before a run begins in it: nothing, this job's work, or somebody else's."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualeval.atomic_files import writable, write_text
from dualeval.engine.device.machines import check_kinds_in_folder
from dualeval.engine.folder import layout
from dualeval.engine.folder.journal import FinishedChunks, read_journal
from dualeval.engine.folder.layout import JobFacts
from dualeval.engine.folder.lease import LEASE, TAKE_OVER_AFTER_S
from dualeval.engine.values.differences import job_differences, listing, structure_hint, typed_differences
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import DualevalError, Stopped, UsageError
from dualeval.process.identity import Process
from dualeval.result import (
    JOB,
    MODELS,
    PREDICTIONS,
    RESULT,
    STATUS,
    Result,
    Status,
    checksum_of,
    json_text,
    read_job,
    read_result,
    read_status,
    result_from,
)
from dualeval.world import World

# Separates the agents of a launch in status.json.
_AND = " | "


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    """What earlier runs of this job have left in the folder."""

    # The chunks that they have finished, and those that remain.
    chunks: FinishedChunks
    # The result, if an earlier run is complete.
    finished: Result | None = None
    # Files that killed runs have left, to be removed at the end.
    stale: tuple[Path, ...] = ()
    # Sentences for people.
    notes: tuple[str, ...] = ()

    def to_message(self, plan: EvalPlan) -> dict[str, Any]:
        """What the other ranks need of it, in plain values; some kB, however many chunks there are."""
        remaining = np.zeros(plan.num_chunks, np.bool_)
        remaining[list(self.chunks.remaining)] = True
        return {
            "remaining": base64.b64encode(np.packbits(remaining).tobytes()).decode("ascii"),
            "finished": None if self.finished is None else json.loads(self.finished.to_json()),
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any], plan: EvalPlan) -> PreviousRun:
        """The inverse of ``to_message``, without the files, which only rank 0 has."""
        bits = np.frombuffer(base64.b64decode(message["remaining"]), np.uint8)
        remaining = np.flatnonzero(np.unpackbits(bits, count=plan.num_chunks)).tolist()
        finished = message["finished"]
        return cls(
            chunks=FinishedChunks(files=(), remaining=tuple(remaining), left_out=()),
            finished=None if finished is None else result_from(finished),
        )


def begins_anew(path: Path, fingerprint: str, launches: Sequence[str], *, fresh: bool) -> bool:
    """Whether to remove an earlier run's files: ``fresh`` applies only to the first start of a launch."""
    status = read_status(path)
    if status is None or not _is_restarted(status, launches):
        return fresh
    if status.state == "stopped":
        # The user stopped the run, and the launcher took its exit for a failure.
        raise Stopped(status.signal or "a signal")
    # A script may evaluate several jobs in one folder, one after the other.
    return fresh and layout.job_there(path).get("fingerprint") != fingerprint


def _is_restarted(status: Status, launches: Sequence[str]) -> bool:
    """Whether this launch wrote a status before its ranks were restarted."""
    earlier = (status.launch_id or "").split(_AND)
    # Any of the agents: rank 0 may belong to another one by now. And one process may evaluate several times.
    return not set(launches).isdisjoint(earlier) and status.process != own_process()


def named_launch(launches: Sequence[str]) -> str | None:
    """How status.json names the agents of a launch; None if nobody restarts ranks."""
    return _AND.join(launches) or None


def own_process() -> str:
    """How status.json names this process."""
    return str(Process.own())


def launch_of(world: World) -> str | None:
    """Names the agent of torchrun that starts, and restarts, this rank.

    The number of restarts does not help: an agent does not count those that another node has caused.
    """
    launch = world.meeting.launch_id
    return None if launch is None else f"{launch} {Process.of(os.getppid())}"


def folder_of_launch(runs: Path, fingerprint: str, launches: Sequence[str]) -> Path | None:
    """Find the folder that ranks of the same launch and job made before they were started again."""
    for path in sorted(runs.glob(f"*-{fingerprint[:8]}"), reverse=True):
        status = read_status(path)
        if status is not None and _is_restarted(status, launches) and status.state != "done":
            return path
    return None


def join_shares(
    out: Path, share: layout.Share, facts: JobFacts, command: Mapping[str, Any] | None, *, mix_machines: bool
) -> bool:
    """Check that the share that a command asks for belongs to the shares of a folder.

    Returns False if the result of all shares is there already, so that nothing is left to do.
    """
    with writable(out):
        _check_same_job(out, facts)
        if finished_result(out, facts) is not None:
            return False
        out.mkdir(parents=True, exist_ok=True)
        if not (out / JOB).exists():
            # If several shares write it, the last file stays: they are equal, or the others are refused.
            of_shares = {layout.COMMAND: command, layout.COUNT: share.count}
            write_text(out / JOB, json_text({**facts.to_json(), **of_shares}))
            _check_same_job(out, facts)
    there = layout.job_of_shares(out)
    if there is None:
        raise UsageError(
            f"{out} holds a run of the whole job. Go on with it without --share, or give another --out."
        )
    if (count := there[layout.COUNT]) != share.count:
        raise UsageError(
            f"{out} holds shares of {count}, and this is share {share}. Give --share I/{count}, or another "
            "--out."
        )
    check_kinds_in_folder(out, [there["machine"]], facts.machine, facts.start_over, mix=mix_machines)
    return True


def read_previous(
    path: Path,
    plan: EvalPlan,
    facts: JobFacts,
    mix_machines: bool,
    step: Callable[[], None],
    *,
    kept: Path,
    share: layout.Share | None,
) -> PreviousRun:
    """Find out what a folder holds beside the file ``kept``, and whether this job may go on there."""
    _check_same_job(path, facts)
    notes = []
    status = read_status(path)
    finished = None
    try:
        finished = finished_result(path, facts)
        if finished is not None:
            _check_files(path, finished, step)
        elif status is not None and status.state == "done" and share is None:
            notes.append(f"{path / RESULT} is missing; all samples are evaluated again")
    except UsageError:
        raise
    except DualevalError as error:
        finished = None
        notes.append(f"{error}; all samples are evaluated again")
    journal = layout.journal_of(path)
    # Shares come first: a finished share is complete, a run of the whole job that ended early is not.
    folders = [*map(layout.journal_of, layout.folders_of(path)), journal]
    wanted = None if share is None else share.chunks(plan)
    chunks = read_journal(folders, plan, facts.fingerprint, step, retried=journal, wanted=wanted)
    stale = tuple(file for file in layout.journal_files(journal) if file not in {*chunks.foreign, kept})
    notes += [f"{reason}; it is left out, and its chunks are evaluated again" for reason in chunks.left_out]
    machines = [file.machine for file in chunks.files] if finished is None else finished.machines
    check_kinds_in_folder(path, machines, chunks.machine(facts.machine), facts.start_over, mix=mix_machines)
    return PreviousRun(chunks=chunks, finished=finished, stale=stale, notes=tuple(notes))


def remove_leftovers(path: Path) -> None:
    """Remove files that killed runs have left half written; for the holder of the folder's lease.

    Ranks on other hosts may outlive rank 0, so their files go only if nobody has written to them for a while.
    """
    of_rank_0 = (f"{PREDICTIONS}.", f"{RESULT}.")  # an earlier rank 0 has lost the lease
    # The disk's clock, which may be another host's.
    now = (path / LEASE).stat().st_mtime
    for file in layout.partial_files(path):
        with suppress(FileNotFoundError):
            if file.name.startswith(of_rank_0) or now - file.stat().st_mtime > TAKE_OVER_AFTER_S:
                file.unlink()


def _check_same_job(path: Path, facts: JobFacts) -> None:
    """Check that a folder holds no run, or one of this job."""
    old = [name for name in (RESULT, PREDICTIONS, STATUS) if (path / name).exists()]
    try:
        kept = read_job(path, layout.to_mend_job(path, facts.start_over))
    except FileNotFoundError:
        if (path / MODELS).exists():
            raise UsageError(
                f"{path} holds a run of several models ({MODELS}). Give another --out; the result of each of "
                "them is in its own folder there."
            ) from None
        # A failed run writes its status even into an emptied folder.
        if old and (old != [STATUS] or read_status(path) is None):
            raise UsageError(
                f"{path} holds an earlier run ({old[0]}), but no {JOB} that says which job it is. "
                f"{facts.start_over}."
            ) from None
        foreign = [name for name in facts.files if (path / name).exists()]
        if foreign:
            raise UsageError(
                f"{path} holds {' and '.join(foreign)}, which this run would overwrite, and no {JOB}: it is "
                "not a run's. Give another --out."
            ) from None
        return
    # As JSON has them: a tuple comes back as a list.
    differing = job_differences(kept["job"], json.loads(json.dumps(facts.job)))
    if differing:
        # A folder of an earlier version has no options.
        typed = typed_differences(kept.get("options") or {}, facts.options)
        repeated = re.compile(r"job\.task_options\.(.*\.)?" + f"({'|'.join(typed)})")
        rest = [each for each in differing if not (typed and repeated.fullmatch(each[0]))]
        shown = "; ".join(filter(None, [*typed.values(), listing(rest, "there", "now")]))
        raise UsageError(
            f"{path} holds another job ({shown}). {facts.start_over}.{structure_hint(differing)}"
        )


def _check_files(path: Path, result: Result, step: Callable[[], None]) -> None:
    """Check the files beside a result.json against the checksums in it."""
    for name, wanted in result.files.items():
        try:
            checksum = checksum_of(path / name, step)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            problem = "is missing" if gone else f"cannot be read: {error.strerror or error}"
            raise DualevalError(f"{path / name} {problem}") from error
        if checksum != wanted:
            raise DualevalError(
                f"{path / name} is damaged: its content does not fit its checksum in {RESULT}"
            )


def finished_result(path: Path, facts: JobFacts) -> Result | None:
    """The result of a complete run of this job; raises DualevalError if it is damaged."""
    try:
        result = read_result(path / RESULT)
    except FileNotFoundError:
        return None
    if result.fingerprint != facts.fingerprint:
        raise UsageError(f"{path} holds the result of another job. {facts.start_over}.")
    return result
