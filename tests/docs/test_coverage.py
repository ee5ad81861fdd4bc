"""Whether 95 % intervals cover: a short form of benchmarks/coverage.py, which the usual ones do not pass."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.docs.conftest import benchmark


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> Any:
    return benchmark(monkeypatch, "coverage")


def test_few_rounds(coverage: Any) -> None:
    # As skewed as the losses of the embedded job, 5.8.
    losses = np.random.default_rng(1).lognormal(-3.0, 1.7, 10_000)
    found = {population.name: population for population in coverage.populations(losses)}
    for name, size, least, usual_at_most, rough in (
        ("losses of the embedded job", 50, 0.84, 0.83, True),
        ("F1: 0 in 1%, 1 in 97%, else between", 30, 0.88, 0.70, False),
        ("70% right, correlation 0.2, clusters of 50", 10, 0.86, 0.70, False),
        ("97% right, correlation 1, clusters of 50", 35, 0.90, 0.70, True),
        ("sqrt of squared normal errors", 30, 0.88, 0.97, True),
    ):
        cell = coverage.measure(found[name], size, 150)
        print(cell)
        assert cell.held >= least, cell
        assert cell.usual <= usual_at_most, cell
        assert (cell.rough > 0.5) == rough, cell


def test_the_tables_are_where_the_docs_say(coverage: Any) -> None:
    [page] = re.findall(r"results/coverage-[\d-]+\.md", (ROOT / "docs/metrics.md").read_text("utf-8"))
    text = (ROOT / "benchmarks" / page).read_text("utf-8")
    for population in coverage.populations(np.ones(3)):
        assert population.name in text


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_all_rounds() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/coverage.py"), "--only-check", "--rounds", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3_000, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
