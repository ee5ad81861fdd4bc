"""benchmarks/peers.py: its tables from made figures, the loops of this environment, and its smallest form."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.conftest import ROOT, Launch
from tests.docs.conftest import benchmark
from tests.requirements import PEERS_PYTHON

SIZES = ("1", "2")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    return benchmark(monkeypatch, "peers")


def made(peers: Any) -> dict[str, Any]:
    """Figures in which the n-th loop takes 1 + n / 10 times as long as the first, the bare loop."""

    def turns(slower: float) -> list[dict[str, Any]]:
        return [
            {"seconds": bare * slower, "cpu_s": bare * slower, "samples": 700, "top1": 0.5, "loss": 2.0}
            for bare in (1.0, 4.0, 2.0)
        ]

    def start(number: int, size: int) -> dict[str, Any]:
        return {
            "startup_s": 2.0 + number,
            "peak_bytes": (100 + number) * 1_000_000,
            "samples": 997 + (number > 2) * (-997 % size),
            "top1": None if number == 0 else 0.5,
            "loss": None if number == 0 else 0.25 + (number > 2) * (size - 1) / 1024,
            "exit_code": -6 if number == 7 and size == 2 else 0,
        }

    return {
        "uneven": 997,
        "exact": {"top1": 0.5, "loss": 0.25},
        "starts": {
            str(size): {loop: [start(n, size)] * (3 if size < 3 else 1) for n, loop in enumerate(peers.LOOPS)}
            for size in (1, 2, 3)
        },
        "timed": {
            size: {
                problem: {
                    "images": 700,
                    "turns": {loop: turns(1 + n / 10) for n, loop in enumerate(peers.LOOPS)},
                }
                for problem in peers.PROBLEMS
            }
            for size in SIZES
        },
    }


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    lines = text[text.index(heading) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert len({len(row) for row in rows}) == 1, "every line has as many cells as the head"
    return rows[2:]


def test_the_summary_has_medians_of_each_number_of_processes(peers: Any) -> None:
    rows = {row[0]: row[1:] for row in rows_of(peers.report(made(peers)), "Medians")}
    assert list(rows) == list(peers.LOOPS)
    assert rows["dualeval"] == [*["1.10 / 1.10"] * 3, "3.0 / 3.0", "101 / 101", "997 / 997 / 997", "yes"]
    assert rows["Lightning"] == [*["1.70 / 1.70"] * 3, "9.0 / 9.0", "107 / 107", "997 / 998 / 999", "no"]
    assert rows[peers.BARE][-2:] == ["997 / 997 / 997", ""], "it has no loss"


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
def test_the_smallest_form(launch: Launch, peers: Any) -> None:
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
    assert rows_of(peers.report(figures), "Medians")
