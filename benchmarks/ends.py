"""The seconds of the end: state, message and exit code where a rank comes to harm in one of the last steps.

The steps are those of ``ends_model.STEPS``. A row starts a small job (64 images, a model that takes no time)
with a page and a tracker. One rank, the first or the last, gets a signal, raises an error or is killed as
rank 0 enters a step, or the disk is full from then on; or the launcher gets SIGTERM. Then the same command is
typed again. ``ends_cases.problems_of`` has what is wanted.

    python benchmarks/ends.py [--launchers NAMES] [--ranks NUMBERS] [--steps NAMES] [--share F] [--seed N]

Rows go into results/ends-DATE.json as they are played, and those that it has are not played again: remove the
file, or give ``--again``, for new ones. Exit code 1 where a row is not as it should be. The disk of a row is
a tmpfs of its own, so this needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from common import BIN, RESULTS, ROOT, end_on_sigterm, machine, table, write_results
from ends_cases import FAULTS, LAUNCHERS, WRITTEN, Case, cases, problems_of, shown
from ends_model import DISK, HARM, HIT, KILL, LAUNCHER, STEPS, TERM, Harm, empty

# The launchers and hosts are the tests' own.
sys.path.insert(0, str(ROOT))

from dualeval.result import checksum_of
from tests.cluster.hosts import Cluster
from tests.conftest import Launch
from tests.vehicles.requirements import SYSTEM_BIN

# A run that has not ended by then hangs; torchrun kills after 30 s what it could not end.
HANGS_S = 60.0
_DISK = "1m"
_SAMPLES = 64
_GUARDIAN_WITHIN_S = 5.0
_HEARTBEAT_S = 15
_KINDS = {
    "stopped by": r"stopped by SIG\w+\. ",
    "came when written": r"SIG\w+ came when the result was written",
    "not logged": r"may not be logged|not logged to",
    "logged": r"note: logged to",
    "page": r"note: the report is in",
    "no page": r"report.html could not be made",
    "complete, but": r"note: the result is complete",
    "cannot be written": r"cannot be written any more",
    "lost rank": r"exited without a message|can no longer be reached|was ended by SIGKILL",
    "the error": r"RuntimeError: injected",
    "other error": r"dualeval: error:",
}
_TRACEBACK = re.compile(r"Traceback \(most recent|Exception in thread")
# In a launcher's own, which says that a rank has failed.
_OF_LAUNCHERS = ("ChildFailedError", "SignalException", "horovod/runner")


# -- playing -----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Ended:
    """What has become of the processes of a command."""

    codes: list[int | None]
    said: str
    printed: str
    left: bool
    at: float


class Player:
    """Plays rows, each on a disk of its own."""

    def __init__(self, folder: Path, jobs: int, cluster: Cluster | None) -> None:
        self._launch = Launch()
        self._folder = folder
        self._cluster = cluster
        self._disks: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            self._disks.put(folder / f"disk-{number}")
        self.digest = self._undisturbed()

    def play(self, case: Case) -> dict[str, Any]:
        """Play a row; returns all that was seen."""
        disk = self._disks.get()
        try:
            with tempfile.TemporaryDirectory(dir=self._folder) as own:
                return self._played(case, Path(own), disk)
        finally:
            self._disks.put(disk)

    def _undisturbed(self) -> str:
        disk = self._disks.get()
        case = Case(launcher="variables", ranks=1, step="exit", fault=TERM, rank=0, stays_s=0.0)
        ended = self._run(case, self._folder, disk, {})
        assert ended.codes == [0], ended.said
        digest: str = _read(disk / "out/result.json")["metrics_digest"]
        _clear(disk)
        self._disks.put(disk)
        return digest

    def _played(self, case: Case, own: Path, disk: Path) -> dict[str, Any]:
        harm = Harm(
            step=case.step, fault=case.fault, rank=case.rank, stays_s=case.stays_s, folder=own, disk=disk
        )
        ended = self._run(case, own, disk, {HARM: str(harm)})
        hit = own / HIT
        limit = time.monotonic() + _GUARDIAN_WITHIN_S
        while (case.fault, case.ranks) == (KILL, 1) and time.monotonic() < limit:
            # Of a run that is alone another process writes that down.
            if _state(disk, self.digest)["state"] != "running":
                break
            time.sleep(0.05)
        row: dict[str, Any] = {
            **vars(case),
            "hit": hit.exists(),
            "codes": ended.codes,
            **_state(disk, self.digest),
            "kinds": _kinds(ended.said),
            "traceback": _has_traceback(ended.said),
            "shown": "metrics_digest" in ended.printed,
            "processes_left": ended.left,
            "seconds": round(ended.at - float(hit.read_text()), 1) if hit.exists() else None,
        }
        empty(disk)
        start = time.time()
        again = self._run(case, own, disk, {})
        row["again"] = {
            "codes": again.codes,
            **_state(disk, self.digest),
            "seconds": round(again.at - start, 1),
        }
        row["problems"] = problems_of(case, row)
        if row["problems"]:
            row["said"] = ended.said[-1500:]
            if any("again" in problem for problem in row["problems"]):
                row["said_again"] = again.said[-1500:]
        _clear(disk)
        return row

    def _run(self, case: Case, own: Path, disk: Path, variables: Mapping[str, str]) -> Ended:
        """Type the command, with its ranks' ends awaited, and the launcher's."""
        job = [
            *("dualeval", "run", "--model", "ends_model:net", "--weights", "random:3", "--no-progress"),
            *("--data", str(ROOT / "dualeval/assets"), "--limit", str(_SAMPLES), "--batch-size", "8"),
            *("--mean", "0.5", "--std", "0.5", "--heartbeat-timeout", str(_HEARTBEAT_S)),
            *("--out", str(disk / "out"), "--report", "--logger", f"jsonl:{disk / 'log.jsonl'}"),
        ]
        environ = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}",
            "OMP_NUM_THREADS": "1",
            **(self._cluster.variables if self._cluster is not None else {}),
            **variables,
        }
        hit = own / HIT
        sends = case.fault == LAUNCHER and HARM in variables
        shell = ["sh", "-c", 'exec "$@" >> "$0".printed 2>> "$0".said', str(own / "x")]
        commands = self._commands(case, job)
        for file in (own / "x.said", own / "x.printed"):
            file.unlink(missing_ok=True)
        left = False
        codes: list[int | None] = []
        at = time.time()
        try:
            with ExitStack() as stack:
                processes = [
                    stack.enter_context(
                        self._launch.started([*shell, *command], variables={**environ, **more}, cwd=own)
                    )
                    for command, more in commands
                ]
                limit = time.monotonic() + HANGS_S + (60.0 if variables else 0.0)
                while any(process.poll() is None for process in processes) and time.monotonic() < limit:
                    if sends and hit.exists():
                        sends = False
                        self._signal(processes[0], case)
                    if hit.exists() and variables and time.time() - float(hit.read_text() or "inf") > HANGS_S:
                        break
                    time.sleep(0.02)
                at = time.time()
                codes = [process.poll() for process in processes]
        except pytest.fail.Exception:
            left = None not in codes
        text = [
            file.read_text(errors="replace") if file.exists() else ""
            for file in (own / "x.said", own / "x.printed")
        ]
        return Ended(codes=codes, said=text[0], printed=text[1], left=left, at=at)

    def _signal(self, process: subprocess.Popen[str], case: Case) -> None:
        """SIGTERM to the launcher."""
        import psutil  # type: ignore[import-untyped]

        target = psutil.Process(process.pid)
        # On a host of the cluster the command runs behind a shell, and nsenter.
        while case.launcher == "srun" and target.name() != "srun":
            [target, *_] = target.children()
        target.terminate()

    def _commands(self, case: Case, job: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
        """The commands of a row, with the variables of each."""
        ranks, launcher = case.ranks, case.launcher
        number = str(ranks)
        if launcher == "variables":
            if ranks == 1:
                return [([*job], {})]
            with socket.socket() as chosen:
                chosen.bind(("127.0.0.1", 0))
                port = str(chosen.getsockname()[1])
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": number}
            shared |= {"LOCAL_WORLD_SIZE": number, "GROUP_RANK": "0"}
            return [([*job], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
        if launcher == "nproc":
            return [([*job, "--nproc", number], {})]
        if launcher == "torchrun":
            start = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", number, "-m"]
            return [([*start, *job], {})]
        if launcher == "horovodrun":
            return [([str(BIN / "horovodrun"), "--gloo", "-np", number, *job], {})]
        if launcher == "mpirun":
            return [(["mpirun", "-np", number, *job, "--backend", "mpi"], {})]
        assert self._cluster is not None
        return [(self._cluster.on("h0", ["srun", "-N1", "-n", number, "--overcommit", *job]), {})]


def _clear(disk: Path) -> None:
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _state(disk: Path, digest: str) -> dict[str, Any]:
    """What lies in the output folder."""
    out = disk / "out"
    try:
        status = _read(out / "status.json")
        state, code = status["state"], status["exit_code"]
    except OSError:
        state, code = None, None
    try:
        result = _read(out / "result.json")
        whole = result["metrics_digest"] == digest and all(
            checksum_of(out / name, lambda: None) == of for name, of in result["files"].items()
        )
        found = "whole" if whole else "damaged"
    except FileNotFoundError as error:
        found = "none" if Path(error.filename).name == "result.json" else "damaged"
    except ValueError:
        found = "damaged"
    usual = {"job.json", "predictions.parquet", "report.html", "result.json", "status.json"}
    left = sorted(re.sub(r"[0-9a-f]{8}", "*", path.relative_to(out).as_posix()) for path in out.rglob("*"))
    return {"state": state, "status_code": code, "result": found, "left": [*{*left} - usual]}


def _kinds(said: str) -> list[str]:
    """Of which kinds the lines are that were said."""
    return [kind for kind, pattern in _KINDS.items() if re.search(pattern, said)]


def _has_traceback(said: str) -> bool:
    """Whether a rank has shown a traceback."""
    _, *shown = _TRACEBACK.split(said)
    return any(not any(name in text for name in _OF_LAUNCHERS) for text in shown)


# -- the page ----------------------------------------------------------------------------------------------


def report(rows: Sequence[Mapping[str, Any]], wanted: Sequence[Case], seed: int) -> str:
    """The tables, what is wrong, and what was not played."""
    parts = [
        f"Seed {seed}. {len(rows)} rows. A cell has the exit codes of the ranks (with variables alone) or "
        "of the launcher, the state in status.json, and the seconds until all processes had ended; "
        "several where rank 0 stayed in the step for 0 or 1.5 s more. `!!` differs from the rule in "
        "`problems_of`. Not in the cells: the same command, typed again, gave exit code 0, the digest of "
        "an undisturbed run and nothing left over in every row without `!!`; where the result was whole it "
        "was typed again in a quarter of the rows.\n"
    ]
    for launcher in LAUNCHERS:
        for size in (1, 2, 3):
            mine = [row for row in rows if (row["launcher"], row["ranks"]) == (launcher, size)]
            if mine:
                parts.append(f"## {launcher}, {size} rank{'s' if size > 1 else ''}\n\n{_grid(mine)}")
    parts.append(f"## What is said\n\n{_messages(rows)}")
    wrong = [row for row in rows if row["problems"]]
    parts.append(f"## Rows that differ: {len(wrong)}\n")
    for row in wrong:
        case = _case_of(row)
        parts.append(
            f"- `{case.key}`: {'; '.join(row['problems'])} (codes {shown(row['codes'])}, {row['state']})"
        )
    played = {_case_of(row).key for row in rows}
    missing = [case for case in wanted if case.key not in played]
    parts.append(f"\n{len(missing)} rows of {len({case.key for case in wanted} | played)} were not played.\n")
    return "\n".join(parts)


def _case_of(row: Mapping[str, Any]) -> Case:
    return Case(**{name: row[name] for name in Case.__dataclass_fields__})


def _grid(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(
        dict.fromkeys(
            (row["fault"], row["rank"])
            for row in sorted(rows, key=lambda row: (FAULTS.index(row["fault"]), row["rank"]))
        )
    )
    lines = []
    for step in STEPS:
        cells = []
        for fault, rank in columns:
            mine = [row for row in rows if (row["step"], row["fault"], row["rank"]) == (step, fault, rank)]
            cells.append("<br>".join(_cell(row) for row in mine) or "-")
        lines.append([step, *cells])
    head = [
        fault if fault == DISK else "SIGTERM to it" if fault == LAUNCHER else f"{fault}, rank {rank}"
        for fault, rank in columns
    ]
    return table(["step", *head], lines)


def _cell(row: Mapping[str, Any]) -> str:
    mark = " **!!**" if row["problems"] else ""
    return f"{shown(row['codes'])} {row['state']} {row['seconds']}{mark}"


def _messages(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for fault in FAULTS:
        for name, steps in (("before", [*STEPS][: -len(WRITTEN)]), ("after", WRITTEN)):
            mine = [row for row in rows if row["fault"] == fault and row["step"] in steps]
            counted = {kind: sum(kind in row["kinds"] for row in mine) for kind in _KINDS}
            said = ", ".join(f"{kind} {count}" for kind, count in counted.items() if count)
            traces = sum(row["traceback"] for row in mine)
            lines.append([fault, name, str(len(mine)), said, str(traces)])
    return table(["harm", "the result is written", "rows", "kinds of lines, in rows", "tracebacks"], lines)


# -- the script --------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split(",")


def main() -> int:
    """Play, print and write the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--launchers", type=_words, default=[*LAUNCHERS])
    parser.add_argument("--ranks", type=lambda text: [*map(int, _words(text))], default=[1, 2, 3])
    parser.add_argument("--steps", type=_words, default=[*STEPS])
    parser.add_argument("--share", type=float, default=1.0, help="the part of the rows that is drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="play at most so many rows")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no row after that")
    parser.add_argument("--only", help="play this row alone, by its key, and write nothing")
    parser.add_argument("--again", action="store_true", help="play rows again that the file has")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("it mounts disks of its own, and needs root")
    if os.environ.get(_INSIDE) is None:
        return _inside_own_mounts()
    end_on_sigterm()
    wanted = cases(arguments.launchers, arguments.ranks, arguments.steps, arguments.share, arguments.seed)
    if arguments.only:
        wanted = [Case.read(arguments.only)]
    file = RESULTS / f"ends-{datetime.now(timezone.utc):%Y-%m-%d}.json"
    known: dict[str, dict[str, Any]] = {}
    if file.exists() and not arguments.only:
        known = {_case_of(row).key: row for row in _read(file)["rows"]}
        for row in known.values():
            # What is wanted may have been put another way since.
            row["problems"] = problems_of(_case_of(row), row)
            if not row["problems"]:
                row.pop("said", None)
                row.pop("said_again", None)
    todo = [case for case in wanted if arguments.again or case.key not in known][: arguments.rounds]
    print(f"{len(todo)} rows of {len(wanted)}", flush=True)
    host = machine()
    for row in _play_all(todo, arguments.jobs, arguments.minutes) if todo else []:
        known[_case_of(row).key] = row
        if not arguments.only:
            _keep(file, known)
    rows = [*known.values()]
    if arguments.only:
        print(json.dumps(rows, indent=1))
        print(rows[0].get("said", ""))
    else:
        body = report(rows, wanted, arguments.seed)
        write_results("ends", "The seconds of the end", body, {}, host)
        _keep(file, known)
    return 1 if any(row["problems"] for row in rows) else 0


def _play_all(todo: Sequence[Case], jobs: int, minutes: float) -> Iterator[dict[str, Any]]:
    """Play rows, so many at once; gives each as soon as those before it are there."""
    end = time.monotonic() + minutes * 60
    with _disks(jobs) as folder, ExitStack() as stack:
        uses_srun = any(case.launcher == "srun" for case in todo)
        cluster = stack.enter_context(Cluster()) if uses_srun else None
        player = Player(folder, jobs, cluster)

        def play(case: Case) -> dict[str, Any] | None:
            if time.monotonic() > end:
                return None
            row = player.play(case)
            mark = f"!! {'; '.join(row['problems'])}" if row["problems"] else "as it should be"
            print(f"{case.key}: {shown(row['codes'])} {row['state']}, {row['seconds']} s: {mark}", flush=True)
            return row

        with ThreadPoolExecutor(jobs) as pool:
            yield from filter(None, pool.map(play, todo))


def _keep(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the rows, a line each."""
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    partial = file.with_suffix(".partial")
    partial.write_text(f'{{"rows": [\n{lines}\n]}}\n')
    partial.replace(file)


_INSIDE = "DUALEVAL_ENDS_INSIDE"


def _inside_own_mounts() -> int:
    """Run this script where what it mounts is gone with it."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), SYSTEM_BIN))
    words = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
    # In its place: a signal reaches it.
    os.execvpe(words[0], words, {**os.environ, _INSIDE: "1", "PATH": path})


@contextmanager
def _disks(count: int) -> Iterator[Path]:
    """A folder with so many small disks."""
    with tempfile.TemporaryDirectory(prefix="dualeval-ends-") as name, ExitStack() as stack:
        for number in range(count):
            disk = Path(name) / f"disk-{number}"
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(disk)], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main())
