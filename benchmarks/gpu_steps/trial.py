"""A step of ``make gpu``: rows that processes of their own measure, and its part of the page as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from common import BIN, ONE_THREAD, ROOT, python_or_torchrun, run_process, torchrun

from dualeval.atomic_files import write_text
from dualeval.launch.ways import child_environ

PASSED, FAILED, NOT_HERE = "passed", "failed", "not available"
Verdict = tuple[str, str]  # the outcome, and what was found

_WORKER = str(ROOT / "benchmarks/gpu_worker.py")
ANSWER = "answer of a worker: "
RUN_S, LONG_S = 90.0, 150.0
# And up to 40 s in which processes that hang are ended.
MOST_S = 260.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the page."""

    step: str
    what: str
    outcome: str
    found: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """What ``--step`` names."""

    name: str
    run: Callable[[Trial], None]
    # On one card of the kind of an H100, about; nobody has timed all of them.
    minutes: float
    about: str
    # Whether it needs a GPU in this process's machine, and not in other nodes of a job.
    here: bool = True


@dataclass(kw_only=True)
class Trial:
    """What is asked for of one step, and what has been found so far."""

    step: str
    device: str
    images: int
    rounds: int
    # The folder of the parts.
    folder: Path
    ends: float = field(default_factory=lambda: monotonic() + MOST_S)
    # What else the part says: when, where, of which source.
    facts: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    # Markdown that stands behind the table.
    sections: list[str] = field(default_factory=list)

    def row(self, what: str, judge: Callable[[], Verdict], *, on_cpu: bool = True) -> None:
        """Add a row; an error while it is measured is its outcome."""
        outcome, found = NOT_HERE, "needs a GPU"
        if on_cpu or self.device != "cpu":
            try:
                outcome, found = judge()
            except Exception as error:  # noqa: BLE001 - whatever fails, the other rows are measured
                found = reason(error)
                # A page of an older torch is no page of a broken one.
                outcome = NOT_HERE if " needs torch " in found else FAILED
                self.errors[what] = str(error)[-4000:]
        self.rows.append(Row(step=self.step, what=what, outcome=outcome, found=found))
        print(f"{self.step}: {what}: {outcome}: {found}", file=sys.stderr, flush=True)
        # After each row: what is killed keeps those before.
        self.write(finished=False)

    def write(self, *, finished: bool) -> None:
        """Write the part; a step is finished if it came to its end, and none of its rows failed."""
        finished &= not any(row.outcome == FAILED for row in self.rows)
        content = {
            **self.facts,
            **{name: getattr(self, name) for name in ("step", "device", "images", "rounds")},
            "finished": finished,
            "rows": [asdict(row) for row in self.rows],
            **{name: getattr(self, name) for name in ("errors", "answers", "sections")},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(part_of(self.folder, self.step), json.dumps(content))

    @property
    def environ(self) -> dict[str, str]:
        """The variables of what is started: ranks on CPUs have a thread each."""
        return {**(ONE_THREAD if self.device == "cpu" else os.environ), "PYTHONPATH": str(ROOT)}

    def run(
        self,
        command: Sequence[str],
        limit_s: float = RUN_S,
        *,
        environ: Mapping[str, str] | None = None,
        any_exit_code: bool = False,
    ) -> str:
        """What a command prints."""
        left_s = self.ends - monotonic()
        if left_s < 1:
            raise TimeoutError("not begun: the time of the step was over")
        return run_process(
            command,
            timeout_s=min(limit_s, left_s),
            environ=self.environ if environ is None else environ,
            any_exit_code=any_exit_code,
        ).output

    def ask(
        self,
        worker: str,
        *,
        ranks: int = 0,
        start: Sequence[str] | None = None,
        limit_s: float = RUN_S,
        any_exit_code: bool = False,
        **given: Any,
    ) -> Any:
        """What a worker answers, which ``start``, torchrun or no launcher starts; it sets ``variables``."""
        given = {"device": self.device, "images": self.images, "rounds": self.rounds, **given}
        own = [_WORKER, worker, json.dumps(given)]
        command = torchrun(ranks, *own) if ranks else python_or_torchrun(1, *own)
        environ = self.environ
        if start is not None:
            # Without what would make this process itself a rank.
            command, environ = [*start, sys.executable, *own], child_environ(environ, str(BIN))
        environ |= given.get("variables", {})
        said = self.run(command, limit_s, environ=environ, any_exit_code=any_exit_code)
        # Launchers may put something before each line, and behind it.
        answer, _ = json.JSONDecoder().raw_decode(said.rpartition(ANSWER)[2])
        self.answers.append({"worker": worker, "ranks": ranks, **given, "answer": answer})
        return answer

    def run_dualeval(self, *words: str, limit_s: float = RUN_S, **options: Any) -> str:
        """What a command of dualeval's prints."""
        return self.run([sys.executable, "-m", "dualeval", *words], limit_s, **options)


def reason(error: BaseException) -> str:
    """In one line why a row could not be measured."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"took longer than {error.timeout:.0f} s"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # The first one: torchrun says more behind it.
    said = next((line for line in lines if "rror: " in line), lines[-1])
    return f"{type(error).__name__}: {said[:300]}"


def judged_problems(problems: Sequence[str], found: str) -> Verdict:
    """Whether a worker has found no problem."""
    return (FAILED, "; ".join(problems)) if problems else (PASSED, found)


# -- the parts -----------------------------------------------------------------------------------------


def part_of(folder: Path, step: str) -> Path:
    """The file of a step's part."""
    return folder / f"{step}.json"


def read_part(folder: Path, step: str) -> dict[str, Any] | None:
    """The part of a step; None where there is none."""
    file = part_of(folder, step)
    content: dict[str, Any] | None = json.loads(file.read_text("utf-8")) if file.exists() else None
    return content


def is_finished(folder: Path, step: str, settings: Mapping[str, Any]) -> bool:
    """Whether a step need not run again: it has passed, on such a device, with as many images and rounds."""
    part = read_part(folder, step)
    return part is not None and part["finished"] and all(part[name] == settings[name] for name in settings)


def source_here() -> str:
    """A hash of the package's source: parts of another one are named on the page."""
    hasher = hashlib.sha256()
    for folder in ("dualeval", "backends", "launch"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            hasher.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return hasher.hexdigest()[:8]


@contextmanager
def running(trial: Trial) -> Iterator[None]:
    """The context in which a step runs: its part is written however it ends, and an error is a row of it."""
    finished = False
    try:
        yield
        finished = True
    except Exception as error:  # noqa: BLE001 - the other steps are run
        trial.errors["the step itself"] = str(error)[-4000:]
        trial.rows.append(Row(step=trial.step, what="the step itself", outcome=FAILED, found=reason(error)))
    finally:
        trial.write(finished=finished)
