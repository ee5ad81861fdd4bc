"""The house stands as designed: who may import whom, the public names, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dualeval
from dualeval.tasks import class_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dualeval"

# Each room and the rooms it may import from, besides itself and the ground floor; a module may have a line of
# its own.
GROUND = {
    *("errors", "messages", "atomic_files", "user_code", "process", "vision_library", "columns.of_data"),
    *("options.choices", "options.evaluation", "options.fields", "options.precision"),
    *("world", "world.network", "world.store", "world.waiting", "world.meetings"),
    *("models.model_errors", "models.weights", "torch_errors", "urls"),
}
ALLOWED = {
    "door": {"metrics", "engine", "tasks", "world.local_ranks", "report.loggers", "result"},
    "cli": {
        *("options.job", "options.plugins", "options.several", "launch", "backends", "world.devices"),
        *("world.local_ranks", "engine", "tasks", "models", "metrics.by_name", "report", "comparison"),
        *("result", "data.cache", "report.page", "tasks.stored"),
    },
    "tools": {
        *("cli", "options.job", "options.plugins", "options.several", "data.cache", "launch", "backends"),
        *("data.pack_file", "world.devices"),
        *("world.local_ranks", "engine", "tasks", "models", "columns", "metrics.by_name", "report", "result"),
    },
    "columns": set(),
    # print(compare(a, b)) is its table, as print(result) is.
    "comparison": {
        "columns",
        "engine",
        "metrics.scores",
        "metrics.intervals",
        "result",
        "tasks.stored",
        "report.comparison",
    },
    "training": {"backends", "launch", "result"},
    "engine": {"columns", "metrics", "result", "tasks", "backends.base"},
    "tasks": {"columns", "models", "data", "metrics"},
    # It reads a run's job.json.
    "tasks.stored": {"tasks", "metrics", "result"},
    "models": {"data"},
    "data": set(),
    "metrics": {"columns", "options.plugins"},
    "report": {"result", "comparison"},
    "report.page": {"report", "result", "comparison", "options.job"},
    # The one import of a result that goes up: print(result) is the table of a run.
    "result": {"metrics", "report.table"},
    "options": set(),
    "options.plugins": {"tasks", "data.cache"},
    "options.job": {"options.plugins", "tasks", "data.cache"},
    "options.several": {"options.job", "options.plugins", "result"},
    "world": set(),
    "world.devices": {"launch", "backends"},
    "world.local_ranks": {"launch", "backends", "world.devices"},
    # The one import that goes up: ranks that meet over MPI do so by the broadcast of MPI's backend.
    "world.meetings.mpi": {"backends.mpi"},
    "backends": {"launch.launchers"},
    "launch": {"world.meetings.mpi"},
    "errors": set(),
    "torch_errors": set(),
    "urls": set(),
    "columns.of_data": set(),
    "vision_library": set(),
    "user_code": set(),
    "process": set(),
    "atomic_files": set(),
    "messages": set(),
    "assets": set(),
}
# What joins the rooms: a session joins the ranks, whatever backend and launcher, and shows the result.
JOINS = {
    PACKAGE / "engine" / "joining.py": {"backends", "world.devices", "launch"},
    PACKAGE / "engine" / "session.py": {"report.loggers", "report.page"},
}
# Of tasks, the engine knows the protocol alone.
ENGINE_TASK_NAMES = {"Task", "Dataset"}


def sources() -> list[Path]:
    """Every module of the package, those behind the two links included."""
    linked = [path for name in ("backends", "launch") for path in sorted((PACKAGE / name).rglob("*.py"))]
    own = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parts[len(PACKAGE.parts)] not in ("backends", "launch")
    ]
    return own + linked


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def allowed_to(path: Path) -> set[str]:
    """What a module may import: by a line of its own, else by its room's."""
    line = names_above(name_of(path).removeprefix("dualeval."))[-1]
    return GROUND | {line} | ALLOWED[line]


def names_above(inner: str) -> list[str]:
    """A module, and what it lies in, up to the first that has a line in ALLOWED."""
    names = [inner.rsplit(".", number)[0] for number in range(inner.count(".") + 1)]
    lines = [place for place, name in enumerate(names) if name in ALLOWED]
    return names[: lines[0] + 1] if lines else names


def imports(path: Path) -> list[tuple[str, set[str]]]:
    """(module, names) of every import statement, inside functions and type-checking blocks too."""
    found: list[tuple[str, set[str]]] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.append((node.module, {alias.name for alias in node.names}))
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    for module, names in imports(path):
        if not module.startswith("dualeval."):
            assert module not in ("backends", "launch"), f"{path}: import dualeval.{module}"
            continue
        inner = module.removeprefix("dualeval.")
        top = inner.split(".")[0]
        allowed = allowed_to(path) | JOINS.get(path, set())
        assert {*names_above(inner)} & allowed, f"{path} imports {module}"
        if room == "engine" and top == "tasks":
            assert inner == "tasks", f"{path} names an implementation of a task: {module}"
            assert names <= ENGINE_TASK_NAMES, f"{path} imports {names} from tasks"


def test_no_module_imports_one_that_imports_it() -> None:
    """Also not by way of others, inside of functions, or for types alone."""
    modules = {name_of(path): path for path in sources()}
    graph = {
        name: {
            found
            for module, names in imports(path)
            for each in names or {""}
            for found in (f"{module}.{each}" if f"{module}.{each}" in modules else module,)
            if found in modules and found != name
        }
        for name, path in modules.items()
    }
    graph["dualeval.result"].remove("dualeval.report.table")  # of ALLOWED
    graph["dualeval.comparison.compared"].remove("dualeval.report.comparison")  # likewise
    graph["dualeval.tasks"] -= {*class_names().values()}  # names for editors, as of dualeval itself
    TopologicalSorter(graph).prepare()


ROOMS = ("engine", "tasks", "models", "metrics", "report", "tools", "process", "user_code", "columns", "data")


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_inside_a_room_stand_on_floors(room: str) -> None:
    """No folder or file in a room imports one that imports it, by way of others or for types either."""
    inner: dict[str, set[str]] = {}
    modules = {name_of(path) for path in sources()}
    for path in sources():
        _, top, *names = name_of(path).split(".") + [""]
        if top != room or not names[0]:
            continue  # the room's __init__.py, which offers what is inside
        below = inner.setdefault(names[0], set())
        for module, imported in imports(path):
            for each in imported or {""}:
                whole = f"{module}.{each}" if f"{module}.{each}" in modules else module
                parts = whole.split(".")
                if parts[:2] == ["dualeval", room] and len(parts) > 2 and parts[2] != names[0]:
                    below.add(parts[2])
    sorter = TopologicalSorter(inner)
    sorter.prepare()
    floor = 0
    while ready := sorter.get_ready():
        print(f"{room}, floor {floor}: {' '.join(sorted(ready))}")
        sorter.done(*ready)
        floor += 1


def test_a_room_says_what_it_is() -> None:
    """Each folder's door says in at most ten lines what it is, and who calls it; many, where to begin."""
    for door in (path for path in sources() if path.name == "__init__.py"):
        text = ast.get_docstring(ast.parse(door.read_text("utf-8"))) or ""
        assert len(text.splitlines()) < 10, door
        room = door.parent.relative_to(PACKAGE).parts
        if room and (len(room) == 1 or room[0] == "engine") and room != ("assets",):
            assert "Caller" in text, door
        if room and room[0] in ("engine", *ROOMS[6:9]):
            assert "Begin with" in text, door


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_backends_import_communication_libraries(path: Path) -> None:
    if room_of(path) == "backends":
        return
    for module, names in imports(path):
        assert module.split(".")[0] not in ("horovod", "mpi4py"), f"{path} imports {module}"
        if module == "torch.distributed":
            # The store is no collective: the control plane stands on it, and ranks meet there.
            store = {"TCPStore", "DistStoreError", "DistNetworkError"}
            if "meetings" in path.parts:
                store |= {"PrefixStore", "Store", "rendezvous"}
            assert names and names <= store, f"{path}: {names}"


def test_nothing_writes_the_environment() -> None:
    for path in sources():
        if room_of(path) == "backends":
            continue  # a library whose only way in are variables is fed and cleaned up after by its backend
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
            for target in targets:
                assert "os.environ" not in ast.unparse(target), f"{path}:{target.lineno} writes os.environ"


def test_links_are_relative_and_hold_the_folders() -> None:
    for name in ("backends", "launch"):
        link = PACKAGE / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


@pytest.mark.parametrize("name", ["backends", "launch"])
def test_a_plain_import_of_backends_or_launch_is_refused(name: str) -> None:
    code = f"import {name}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert f"dualeval.{name}" in done.stderr


PUBLIC = (
    "__version__ Backend BackendError Dataset DualevalError EarlyStopping ExactlyOnceError Job "
    "LaunchError Measured Metric ModelTask NEW_FOLDER PeerError Ragged Result RowMetric Session "
    "Stopped Task Text UsageError World compare connect detect evaluate export late_model rescore "
    "wrap"
)


def test_public_names_are_those_of_the_list_and_import_no_torch() -> None:
    assert dualeval.__all__ == PUBLIC.split()
    for name in dualeval.__all__:
        assert getattr(dualeval, name) is not None
    assert {*dir(dualeval)} == {*dualeval.__all__, "metrics", "tasks"}
    code = "import dualeval, sys; print('torch' in sys.modules, dualeval.tasks.Task, dualeval.metrics.Mean)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False <class")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dualeval.nothing  # noqa: B018 - the access is what is tested


def test_no_room_is_named_utils() -> None:
    assert not [path for path in sources() if path.stem in ("utils", "util", "helpers", "common", "misc")]
