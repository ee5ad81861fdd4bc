"""Benchmarks: loops of peers, whether intervals cover, what a batch passes on its way."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualeval.metrics import Mean
from tests.conftest import ROOT, Launch
from tests.vehicles.requirements import PEERS_PYTHON


def benchmark(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A module by its path: a package of its name may be installed."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", ROOT / f"benchmarks/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    return benchmark(monkeypatch, "peers")


@pytest.mark.parametrize("ready", [False, True])
def test_loops_without_a_library_count_every_image_once(peers: Any, ready: bool) -> None:
    problems = sys.modules["problems"]
    problem = problems.replace(problems.fashion_cnn().first(130), ready=ready)
    right = peers.exact(problem)
    for loop in (peers.BARE, "by hand: all_reduce"):
        outcome = peers.LOOPS[loop](problem)
        assert outcome.samples == 130
        assert outcome.seconds > 0
    assert outcome.top1 == right["top1"]
    assert outcome.loss == pytest.approx(right["loss"], rel=1e-6)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.needs("peers")
def test_the_smallest_comparison_of_peers_is_right(launch: Launch, peers: Any) -> None:
    options = ["--rounds=2", "--starts=1", "--images=640", "--resnet-images=16", "--json"]
    done = launch([PEERS_PYTHON, ROOT / "benchmarks/peers.py", *options], timeout=850).ok()
    figures = json.loads(done.stdout)
    right, by_loop = figures["exact"], figures["starts"]
    counted = {loop: [of[loop][0]["samples"] for of in by_loop.values()] for loop in peers.LOOPS}
    for loop in peers.LOOPS:
        alone = by_loop["1"][loop][0]
        assert alone["samples"] == 997
        if loop != peers.BARE:
            assert alone["top1"] == pytest.approx(right["top1"], abs=1e-6)
            assert alone["loss"] == pytest.approx(right["loss"], rel=1e-5)
    assert counted["dualeval"] == counted["Accelerate"] == [997, 997, 997]
    assert counted["Lightning"] == [997, 998, 999]
    assert peers.same_bits(by_loop, "dualeval") == "yes"
    assert {of["dualeval"][0]["loss"] for of in by_loop.values()} == {right["loss"]}
    for size, of_problems in figures["timed"].items():
        for problem, measured in of_problems.items():
            for loop, turns in measured["turns"].items():
                assert len(turns) == 2, (size, problem, loop)
                assert all(turn["seconds"] > 0 for turn in turns)
                if loop == "dualeval":
                    assert {turn["samples"] for turn in turns} == {measured["images"]}
    table = re.search(r"Medians.*?((?:^\|[^\n]*\n)+)", peers.report(figures), re.DOTALL | re.MULTILINE)
    assert table is not None
    cells = [row.count("|") for row in table[1].splitlines()]
    assert len(cells) > 2 and len({*cells}) == 1, "every line has as many cells as the head"


# -- benchmarks/coverage.py: a short form, which the usual intervals do not pass ---------------------


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> Any:
    return benchmark(monkeypatch, "coverage")


def test_intervals_cover_in_a_few_rounds(coverage: Any) -> None:
    # As skewed as the losses of the embedded job, 5.8.
    losses = np.random.default_rng(1).lognormal(-3.0, 1.7, 10_000)
    found = {population.name: population for population in coverage.populations(losses)}
    for name, size, least, usual_at_most, rough in (
        ("losses of the embedded job", 50, 0.84, 0.83, True),
        ("F1: 0 in 1%, 1 in 97%, else between", 30, 0.88, 0.70, False),
        ("70% right, correlation 0.2, clusters of 50", 10, 0.86, 0.70, False),
        ("97% right, correlation 1, clusters of 50", 35, 0.90, 0.70, True),
        ("sqrt of squared normal errors", 29, 0.88, 0.97, True),
        # Few samples decide these: a wrong answer in 200, and a variance that grows with N.
        ("losses of a model that is 99.5 % right", 300, 0.65, 0.80, True),
        ("squares of Student's, 3 degrees of freedom", 1_000, 0.75, 0.85, True),
        ("exponential", 300, 0.90, 0.97, False),
        ("99.9 % right", 176, 0.97, 0.20, False),
    ):
        cell = coverage.measure(found[name], size, 150)
        print(cell)
        assert cell.missed <= 0.1, cell
        assert cell.held >= least, cell
        assert cell.usual <= usual_at_most, cell
        assert (cell.rough > 0.5) == rough, cell


def test_intervals_of_means_are_those_of_the_metric(coverage: Any) -> None:
    """numpy adds, and the package makes the same interval as of its own exact sums."""
    found = {population.name: population for population in coverage.populations(np.arange(1.0, 9.0))}
    for name in ("normal", "log-normal, σ = 2", "losses of a model that is 90 % right"):
        [(ends, usual, rough)] = coverage._of_means(found[name], 40, 1, np.random.default_rng(3))
        values = found[name].draw_many(np.random.default_rng(3), (1, 40))[0]
        # Those of wrong answers are drawn negative.
        columns = {"x": np.abs(values) if found[name].right else values}
        own, normal, of_metric = coverage._intervals(Mean("x"), columns, "x")
        assert ends == pytest.approx(own, rel=1e-9) and usual == pytest.approx(normal, rel=1e-9)
        assert of_metric == rough


def test_the_tables_that_the_docs_name_have_every_population(coverage: Any) -> None:
    pages = re.findall(r"results/coverage-[\d-]+\.md", (ROOT / "docs/metrics.md").read_text("utf-8"))
    text = "".join((ROOT / "benchmarks" / page).read_text("utf-8") for page in pages)
    for population in coverage.populations(np.ones(3)):
        assert population.name in text


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_intervals_cover_in_all_rounds() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/coverage.py"), "--only-check", "--rounds", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3_000, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]


# -- benchmarks/widths.py: what a batch passes on its way does not grow unseen ------------------------


# Of dualeval's own, as benchmarks/results/ has them; and the calls of the looks and the trial before.
# More only for what every batch needs.
CALLS, FILES, CHANGES, BEFORE = 33, 16, 25, 1_506


def test_a_batch_passes_few_calls_and_files(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/widths.py"), "--out", str(tmp_path / "out")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environ)
    counts = json.loads(done.stdout.splitlines()[-1])
    assert [*map(min, counts, (CALLS, FILES, CHANGES, BEFORE))] == counts


# -- benchmarks/rooms.py: a plain run imports what it runs --------------------------------------------

# Of the files with code. More only for what every run needs.
FILES_OF_A_RUN = 126
# What other runs are for.
RARE = (
    *("engine/guest.py", "engine/own_loop.py", "engine/sharding/", "engine/model/late.py"),
    *(
        "models/late_building.py",
        "models/checkpoints/",
        "models/loading.py",
        "report/loggers/",
        "report/page/",
    ),
    *("torch_errors.py", "models/model_errors.py", "world/store.py"),
)
# How a run fails is imported before it does: a disk that hangs must not hold up the end.
OF_FAILURES = {"errors.py", "engine/control/verdict.py", "engine/end/outcome.py"}
# A CPU copies nothing; what computes there has its types, and where copies begin.
OF_DEVICES = {"engine/device/transfer.py"}


def test_a_plain_run_imports_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    files = benchmark(monkeypatch, "rooms").files_of_plain_run()
    assert len(files) <= FILES_OF_A_RUN
    assert not [name for name in files if name.startswith(RARE)]
    assert {name for name, (_, is_idle) in files.items() if is_idle} <= OF_FAILURES | OF_DEVICES
