"""Whose source counts: what defines what is handed in, and what that reaches."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import PIL
import PIL.Image
import pytest
from torch.utils.data import Dataset, Subset

from dualeval.engine.identity import source
from dualeval.engine.identity.hasher import Hasher
from dualeval.engine.identity.job import _inside
from dualeval.engine.identity.plain import module_name
from dualeval.engine.samples.samples import wrap
from dualeval.errors import UsageError
from dualeval.user_code import origin as own_code
from dualeval.user_code.origin import library_of
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate
from tests.vehicles.tiny import TinyTask


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules, of which none stays loaded."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    forget(before)


def forget(before: set[str]) -> None:
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()


def write(home: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(textwrap.dedent(text))


def found(home: Path, files: dict[str, str], item: str = "net:Net") -> dict[str, str]:
    """The sources of a class or function, in a process that has just begun."""
    before = set(sys.modules)
    source._sources.clear()
    write(home, files)
    module, _, name = item.partition(":")
    hasher = Hasher()
    hasher.digest(getattr(importlib.import_module(module), name))
    hashes = source.source_fingerprints(hasher.met, {})["source"]
    forget(before)
    return hashes


NET = "class Net:\n    def forward(self, x): return {}\n"
# What the class's own module says before it, and the files that it reaches, of which the last is changed.
REACHED: dict[str, tuple[str, dict[str, str]]] = {
    "import": ("import a", {"a.py": "x = 1"}),
    "names of a module": ("from a import T", {"a.py": "T = {1: 1}"}),
    "import in a function": ("def f():\n    import a\n    return a.x", {"a.py": "x = 1"}),
    "star": ("from a import *", {"a.py": "x = 1"}),
    "over two": ("import a", {"a.py": "if 1: import b", "b.py": "x = 1"}),
    "loaded by name": ("import importlib\na = importlib.import_module('a')", {"a.py": "x = 1"}),
    "what an object is of": (
        "import importlib\nA = getattr(importlib.import_module('a'), 'B')()",
        {"a.py": "class B: x = 1"},
    ),
}


@pytest.mark.parametrize("name", REACHED)
def test_a_change_in_a_module_that_is_reached_is_found(home: Path, name: str) -> None:
    says, others = REACHED[name]
    first = found(home, {"net.py": f"{says}\n{NET}", **others})
    assert found(home, {}) == first
    changed = [*others][-1]
    other = found(home, {changed: f"{others[changed]}\ny = 2\n"})
    assert {name for name in first if first[name] != other[name]} == {changed.removesuffix(".py")}


def test_modules_reached_by_relative_imports_and_their_package_count(home: Path) -> None:
    files = {
        "pkg/__init__.py": "x = 1\n",
        "pkg/net.py": "from .ops import act\nfrom . import more\nfrom .last import x as y\n" + NET,
        "pkg/ops.py": "def act(x): return x\n",
        "pkg/more.py": "x = 1\n",
        "pkg/last.py": "x = 1\n",
        "pkg/other.py": "x = 1\n",
    }
    first = found(home, files, "pkg.net:Net")
    assert {name for name in first if name.startswith("pkg")} == {
        *("pkg", "pkg.net", "pkg.ops", "pkg.more", "pkg.last")
    }


def test_a_module_counts_as_it_was_when_it_was_first_asked_for(home: Path) -> None:
    write(home, {"net.py": NET})
    hasher = Hasher()
    hasher.digest(importlib.import_module("net").Net)
    first = source.source_fingerprints(hasher.met, {})
    write(home, {"net.py": NET + "# later"})
    assert source.source_fingerprints(hasher.met, {}) == first
    importlib.reload(sys.modules["net"])
    assert source.source_fingerprints(hasher.met, {}) != first


def digest(home: Path, text: str, item: str) -> bytes:
    before = set(sys.modules)
    write(home, {"net.py": text})
    value = Hasher().digest(eval(item, vars(importlib.import_module("net"))))
    forget(before)
    return value


FUNCTIONS = {
    "lines": ("def f(x):\n    return x\n", "def f(x):\n    return -x\n", "f"),
    "lambdas of one line": ("f, g = lambda x: x, lambda x: -x\n", "g, f = lambda x: x, lambda x: -x\n", "f"),
    "one of two": (
        "if True:\n    def f(x): return x\nelse:\n    def f(x): return -x\n",
        "if False:\n    def f(x): return x\nelse:\n    def f(x): return -x\n",
        "f",
    ),
    "default": ("def f(x, a=2**3): return x\n", "def f(x, a=2**3): return x\nf.__defaults__ = (9,)", "f"),
    "decorated": (
        "def d(f):\n    return lambda x: f(x)\n@d\ndef f(x): return x\n",
        "def d(f):\n    return lambda x: f(x)\n@d\ndef f(x): return -x\n",
        "f",
    ),
    "put into a class": (
        "class C:\n    def f(self): return 1\ndef f(self): return 2\n",
        "class C:\n    def f(self): return 1\ndef f(self): return 2\nC.f = f",
        "C",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_file_counts_without_the_rest_of_the_file(home: Path, name: str) -> None:
    one, other, item = FUNCTIONS[name]
    assert digest(home, one, item) == digest(home, one + "\nmore = 1\n", item) != digest(home, other, item)


# Scripts

JOB = """
import sys
import dualeval
from tests.vehicles.tiny import TinyTask

FACTOR = 1.0

class Mine(TinyTask):
    name = "mine"

    def __init__(self) -> None:
        super().__init__(20)

    def forward(self, model, batch):
        return super().forward(model, batch) * FACTOR

def main():
    print(dualeval.evaluate(Mine(), out=sys.argv[1], batch_size=5, launcher="none", layout="contiguous"))

if __name__ == "__main__":
    main()
"""


def test_a_job_is_the_same_from_python_and_from_the_command_line(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(JOB)
    launch([sys.executable, script, tmp_path / "a"]).ok()
    words = [sys.executable, "-m", "dualeval", "run", "--task", f"{script}:Mine", "--batch-size", "5"]
    words += ["--layout", "contiguous", "--out", str(tmp_path / "b")]
    launch(words).ok()
    jobs = [json.loads((tmp_path / name / "job.json").read_text())["job"] for name in "ab"]
    assert jobs[0] == jobs[1]
    # And one finds the other's result there.
    assert "finished before" in launch([sys.executable, script, tmp_path / "b"]).ok().stderr
    skipped = json.loads(launch([*words, "--no-replay", "--json"]).ok().stdout)
    assert (skipped["earlier"], skipped["replay"]) == (True, "skipped")
    script.write_text(JOB.replace("FACTOR = 1.0", "FACTOR = 2.0"))
    done = launch([sys.executable, script, tmp_path / "b"])
    assert done.returncode == 2
    assert "the code of mine (job.source.mine): " in done.stderr


# What is installed


INSTALLED: dict[str, tuple[dict[str, str], str, str | None]] = {
    "by RECORD": ({"thing-1.2.dist-info/RECORD": "thing/__init__.py,,\n"}, "thing/__init__.py", "thing-1.2"),
    "a file": ({"thing-1.2.dist-info/RECORD": "one.py,,\n"}, "one.py", "thing-1.2"),
    "another name": (
        {"Thing-1.2.dist-info/RECORD": "a/b.py,,\nother/__init__.py,,\n"},
        "other/x.py",
        "Thing-1.2",
    ),
    "own among installed": ({"thing-1.2.dist-info/RECORD": "thing/__init__.py,,\n"}, "mine.py", None),
    "begins alike": ({"thing-1.2.dist-info/RECORD": "thing/__init__.py,,\n"}, "things/a.py", None),
    "editable": (
        {
            "thing-1.2.dist-info/RECORD": "__editable__.thing-1.2.pth,,\n",
            "thing.egg-info/top_level.txt": "thing\n",
        },
        "thing/a.py",
        None,
    ),
}


@pytest.mark.parametrize("name", INSTALLED)
def test_a_library_is_what_a_distribution_owns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files, module, wanted = INSTALLED[name]
    write(tmp_path, files)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert library_of(tmp_path / module) == wanted


def test_a_file_of_ones_own_called_as_one_of_pythons_is_no_library(tmp_path: Path) -> None:
    assert library_of(tmp_path / "statistics.py") is None


def test_all_files_of_dualeval_that_count_are_there() -> None:
    root = Path(own_code.__file__).parents[1]
    assert [name for name in source._OWN_FILES if not (root / name).exists()] == []


def test_a_library_counts_with_its_version() -> None:
    hasher = Hasher()
    hasher.digest(PIL.Image.Image)
    libraries = source.source_fingerprints(hasher.met, {})["libraries"]
    assert libraries["pillow"].startswith(f"{PIL.__version__} ")


def test_a_folder_of_another_version_of_dualeval_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(TinyTask(20), tmp_path)
    monkeypatch.setattr(source, "_own_digest", lambda: b"another")
    said = r"job\.source\.dualeval\): .* the other one has a different version of it"
    with pytest.raises(UsageError, match=said):
        evaluate(TinyTask(20), tmp_path)


# What data sets and metrics keep


class Pictures(Dataset[int]):
    """A data set without a fingerprint."""

    def __init__(self, transform: object) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


class Doubles:
    def apply(self, value: int) -> int:
        return 2 * value


def halves(value: int) -> float:
    return value / 2


@pytest.mark.parametrize(
    ("transform", "reached"),
    [(halves, halves), (partial(halves), halves), ([{"a": halves}], halves), (Doubles().apply, Doubles)],
    ids=["function", "partial", "nested", "method"],
)
def test_what_a_subset_is_of_is_reached(transform: object, reached: object) -> None:
    found = [*_inside(Subset(Pictures(transform), [0]))]
    assert any(isinstance(each, Pictures) for each in found)
    assert any(each is reached or type(each) is reached for each in found)


def test_a_data_set_of_the_script_has_the_name_by_which_it_is_imported() -> None:
    kinds = [type("Rows", (list,), {"__module__": name}) for name in ("__main__", module_name("__main__"))]
    one, other = (wrap(kind([1.0])).fingerprint(1) for kind in kinds)
    assert one == other
