"""benchmarks/gpu.py, which is made for GPUs: steps that fail, go on and are joined, and runs on CPUs."""

from __future__ import annotations

import importlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, Launch

SCRIPT = ROOT / "benchmarks/gpu.py"
SMALL = ["--device", "cpu", "--images", "64", "--rounds", "2"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def gpu(module: Callable[[str], Any]) -> Any:
    return module("gpu")


def raising(error: Exception) -> Any:
    raise error


def test_a_row_that_fails_stops_no_other(gpu: Any, tmp_path: Path) -> None:
    trial = gpu.Trial(step="s", device="cpu", images=8, rounds=2, folder=tmp_path, ends=monotonic() + 60)
    trial.row("hangs", lambda: raising(subprocess.TimeoutExpired("x", 90.0)))
    trial.row("breaks", lambda: trial.run([sys.executable, "-c", "raise ValueError('a | b')"]))
    trial.row("works", lambda: ("passed", trial.run([sys.executable, "-c", "print('fine', end='')"])))
    trial.row("newer", lambda: raising(RuntimeError("shard needs torch 2.13 or newer")))
    trial.row("elsewhere", lambda: raising(AssertionError()), on_cpu=False)
    trial.ends = monotonic()
    trial.row("late", lambda: trial.run(["true"]))
    expected = [
        ("hangs", "failed", "took longer than 90 s"),
        ("breaks", "failed", "RuntimeError: ValueError: a | b"),
        ("works", "passed", "fine"),
        ("newer", "not available", "RuntimeError: shard needs torch 2.13 or newer"),
        ("elsewhere", "not available", "needs a GPU"),
        ("late", "failed", "TimeoutError: not begun: the time of the step was over"),
    ]
    assert [(row.what, row.outcome, row.found) for row in trial.rows] == expected
    # They are on the disk before the step is through.
    part = json.loads((tmp_path / "s.json").read_text("utf-8"))
    assert [(row["what"], row["outcome"], row["found"]) for row in part["rows"]] == expected
    assert not part["finished"]


@pytest.fixture
def steps(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three steps in place of gpu.py's; the names of those that have run."""
    ran: list[str] = []

    def step(name: str, run: Callable[[Any], None], minutes: float = 1) -> Any:
        def noted(trial: Any) -> None:
            ran.append(name)
            run(trial)

        return gpu.correct.Step(name=name, run=noted, minutes=minutes, about=f"about {name}")

    def passes(trial: Any) -> None:
        trial.row("one", lambda: ("passed", f"on {socket.gethostname()} in {Path.home()}/x"))
        trial.sections.append("### A table\n")

    made = [
        step("passes", passes),
        step("fails", lambda trial: trial.row("two", lambda: raising(ValueError("why")))),
        step("breaks", lambda trial: raising(KeyError("a"))),
        step("long", lambda trial: None, minutes=5),
    ]
    monkeypatch.setattr(gpu, "STEPS", {each.name: each for each in made})
    return ran


def test_steps_that_passed_are_not_run_again_and_the_page_names_the_others(
    gpu: Any, steps: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [*SMALL, "--parts", str(tmp_path / "parts"), "--results", str(tmp_path / "results")]
    assert gpu.main([*own, "--minutes", "4"]) == 1
    assert steps == ["passes", "fails", "breaks"], "the others are run, but for one that takes too long"
    [page] = (tmp_path / "results").glob("gpu-on-cpu-*.md")
    text = page.read_text("utf-8")
    for line in (
        "**On CPUs: this page says that the steps work, and nothing about GPUs.**",
        "1 passed, 2 failed, 0 not available.",
        "- fails failed: two: ValueError: why",
        "- breaks failed: the step itself: KeyError: 'a'",
        "- Not run: long.",
        "| passes | one | passed | on node1 in ~/.../x |",
        "## Step passes\n\n### A table\n",
    ):
        assert line in text, text
    for written in (text, page.with_suffix(".json").read_text("utf-8")):
        assert socket.gethostname() not in written.split() and str(Path.home() / "x") not in written
    steps.clear()
    assert gpu.main([*own, "--step", "passes,fails", "--step", "breaks"]) == 1
    assert steps == ["fails", "breaks"]
    # Other images, or --again.
    assert gpu.main([*own, "--step", "passes", "--images", "128"]) == 1, "the page still has what failed"
    assert gpu.main([*own, "--step", "passes", "--images", "128", "--again"]) == 1
    assert steps == ["fails", "breaks", "passes", "passes"]
    capsys.readouterr()
    assert gpu.main([*own, "--images", "128", "--list"]) == 0
    assert "passes              1 min  passed  about passes\n" in capsys.readouterr().out


def test_a_step_that_was_cut_off_is_named_and_run_again(gpu: Any, steps: list[str], tmp_path: Path) -> None:
    own = [*SMALL, "--parts", str(tmp_path / "parts"), "--results", str(tmp_path), "--step", "passes"]
    gpu.main(own)
    part = tmp_path / "parts/passes.json"
    content = {**json.loads(part.read_text("utf-8")), "finished": False, "source": "other"}
    part.write_text(json.dumps(content), "utf-8")
    trial = importlib.import_module("gpu_steps.trial")
    page = importlib.import_module("gpu_steps.page")
    read = [
        trial.read_part(tmp_path / "parts", "passes"),
        {**content, "step": "b", "source": "s", "rows": []},
    ]
    text = page.body(read, list(gpu.STEPS.values()))
    assert "- passes was cut off after 1 rows.\n" in text
    assert "**Not all steps are of one machine and source.** source other: passes; source s: b.\n" in text
    gpu.main(own)
    assert steps == ["passes", "passes"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--step", "spee,ends"], "--step spee: expected some of "),
        (["--rounds", "1"], "--rounds 1: expected at least 2"),
    ],
)
def test_wrong_words_are_refused(
    gpu: Any, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_without_a_gpu_it_ends_with_2_and_writes_nothing(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--results", str(tmp_path), "--parts", str(tmp_path / "parts")]) == 2
    assert capsys.readouterr().err.startswith(f"gpu.py: no GPU here: torch {torch.__version__} ")
    assert not [*tmp_path.iterdir()]


def test_each_step_takes_five_minutes_at_most_and_is_in_the_docs(gpu: Any) -> None:
    page = (ROOT / "docs/gpus.md").read_text("utf-8")
    for step in gpu.STEPS.values():
        assert step.minutes <= 5 and f"`{step.name}`" in page
    # With the time in which processes that hang are ended.
    assert importlib.import_module("gpu_steps.trial").MOST_S + 40 <= 300


def test_the_aim_is_for_gpus(module: Callable[[str], Any]) -> None:
    judged = module("gpu_steps.speed").judged_speed
    speeds = {"forward alone": [100.0, 100.0], "bare loop": [80.0, 80.0], "dualeval": [96.0, 96.0]}
    of_loops = {"dualeval": 20.0, "bare loop": 25.0, "forward alone": 99.0}
    _, found = judged(speeds, of_loops)
    assert "0.960 (0.960 to 0.960) of the forward alone (100; aim 0.95 reached)" in found
    assert found.endswith("1.200 (1.200 to 1.200) of the bare loop, peak 20 MB, of the bare loop 25")
    _, found = judged({**speeds, "dualeval": [90.0, 90.0]}, of_loops)
    assert "aim 0.95 missed" in found
    assert "aim" not in judged(speeds, dict.fromkeys(of_loops))[1]


def test_numbers_of_ranks_follow_from_the_gpus(module: Callable[[str], Any]) -> None:
    from dualeval.launch.site import Node, Site

    sizes_on = module("gpu_steps.ranks").sizes_on
    nodes = tuple(Node(host=host, cores=8, gpus=2) for host in "ab")
    assert sizes_on(Site(nodes=nodes), "cuda") == [1, 2, 4]
    assert sizes_on(Site(nodes=nodes * 2), "cuda") == [1, 2, 4, 8]
    assert sizes_on(Site(nodes=(Node(host="a", cores=1),)), "cpu") == [1, 2, 4]


@pytest.mark.parametrize("worker", ["speed", "throughput", "float64_columns", "outer_autocast"])
def test_workers_on_a_cpu(module: Callable[[str], Any], worker: str) -> None:
    given = {"device": "cpu", "images": 64, "rounds": 2, "precision": "fp32", "backend": "single"}
    answer = module("gpu_worker").WORKERS[worker]({**given, "model": "bert-base"})
    if worker in ("speed", "throughput"):
        speeds = answer["samples_per_s"]
        assert all(speeds.values()) if worker == "speed" else len(speeds) == 2 and answer["size"] == 1
    else:
        assert answer["problems"] == [] and answer["found"]


@pytest.mark.long
def test_throughput_of_1_2_and_4_ranks_on_a_cpu(
    gpu: Any, module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same step as on a node with cards; of its launchers, torchrun."""
    ranks = module("gpu_steps.ranks")
    every = ranks._starts
    monkeypatch.setattr(
        ranks, "_starts", lambda trial, site, name: every(trial, site, name) if name == "torchrun" else []
    )
    own = ["--parts", str(tmp_path / "parts"), "--results", str(tmp_path), "--step", "ranks-speed"]
    code = gpu.main([*SMALL, *own])
    [page] = tmp_path.glob("gpu-on-cpu-*.md")
    text = page.read_text("utf-8")
    assert code == 0, text
    for size in (1, 2, 4):
        assert re.search(rf"^\| torchrun \| torch \| {size} \| 1 \| .* \| \d+% \|$", text, re.MULTILINE)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_steps_on_a_cpu(launch: Launch, tmp_path: Path) -> None:
    own = ["--parts", str(tmp_path / "parts"), "--results", str(tmp_path)]
    finished = launch([sys.executable, str(SCRIPT), *SMALL, *own], timeout=3500)
    [page] = tmp_path.glob("gpu-on-cpu-*.md")
    text = page.read_text("utf-8")
    assert finished.returncode == 0, text + finished.stderr
    assert " passed, 0 failed, " in text and "- Not run" not in text and "was cut off" not in text
    assert socket.gethostname() not in re.findall(r"[\w.-]+", text)
    assert [*tmp_path.glob("gpu-on-cpu-*-seeds-speedup.png")]
