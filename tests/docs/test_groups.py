"""Tests that share what is made once run on one worker, and others on all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import Launch

# What this folder's own conftest.py does for its tests.
HOOK = "from tests.conftest import pytest_collection_modifyitems\n"
# Each test writes down which worker runs it.
TESTS = """
import os
from pathlib import Path
import pytest

@pytest.fixture(autouse=True)
def note(request):
    name = f"{Path(__file__).stem} {request.node.originalname} {request.node.callspec.id}"
    Path(__file__).with_name(name).write_text(os.environ["PYTEST_XDIST_WORKER"])

@pytest.fixture(scope="module")
def wanted():
    pass

@pytest.fixture(scope="module")
def cluster():
    pass

each = pytest.mark.parametrize("number", range(4))

@each
def test_shared(wanted, number):
    pass

@each
def test_cluster(cluster, wanted, number):
    pass

@each
@pytest.mark.xdist_group("own")
def test_own(wanted, number):
    pass

@each
def test_free(number):
    pass
"""


@pytest.mark.long
def test_a_group_is_one_workers(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOK)
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    options = ["-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = launch([sys.executable, "-m", "pytest", *options], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 passed" in done.stdout

    def workers(*names: str) -> set[str]:
        notes = [path for name in names for path in tmp_path.glob(f"{name} *")]
        assert len(notes) == 4 * len(names)
        return {path.read_text() for path in notes}

    assert len(workers("test_one test_shared")) == len(workers("test_two test_shared")) == 1
    assert len(workers("test_one test_cluster", "test_two test_cluster")) == 1
    assert len(workers("test_one test_own", "test_two test_own")) == 1
    # Which of them depends on who is free, so nothing more can be said of these.
    assert workers("test_one test_free", "test_two test_free") <= {"gw0", "gw1"}
