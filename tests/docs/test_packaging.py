"""What a user installs: sdist and wheel hold the whole package and put nothing else at the top level."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualeval
from dualeval.options.job import Job
from dualeval.tasks import options
from tests.conftest import ROOT, Launch
from tests.docs.test_readme import a_clone
from tests.engine.test_evaluator import evaluate
from tests.vehicles import requirements

SETUP = (ROOT / "setup.py").read_text("utf-8")
[OLDEST] = re.findall(r'python_requires=">=([0-9.]+)"', SETUP)


@pytest.fixture(scope="module")
def oldest_python() -> str:
    """The oldest Python that setup.py names; skips where this machine has none."""
    return str(interpreter(int(OLDEST.rpartition(".")[2])))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the tracked files, and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    # A clone, so that nothing untracked gets in, with what is not committed yet on top.
    clone = a_clone(folder / "clone")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(clone)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_sdist_and_wheel_hold_the_whole_package(built: Path) -> None:
    both = {"dualeval/backends/base.py", "dualeval/launch/detect.py"}
    both |= {"dualeval/tools/submit/slurm/eval.sbatch"}
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert both | {"README.md", "setup.py", "LICENSE"} <= names
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dualeval"}
    assets = ("fashion_cnn.safetensors", "imagenet_wnids.txt", "t10k-images-idx3-ubyte.gz")
    assert {f"dualeval/assets/{name}" for name in (*assets, "LICENSE-fashion-mnist.txt")} <= names
    assert both | {"dualeval/py.typed", "dualeval/tools/submit/slurm/eval_horovod.sbatch"} <= names


@pytest.mark.long
def test_wheel_works_in_a_fresh_environment(built: Path, tmp_path: Path, launch: Launch) -> None:
    [wheel] = built.glob("*.whl")
    assert launch([sys.executable, "-m", "venv", tmp_path / "venv"], timeout=120).returncode == 0
    python = tmp_path / "venv/bin/python"
    done = launch([python, "-m", "pip", "install", "--no-deps", "--no-index", wheel], timeout=120).ok()
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    # The dependencies, large as they are, are lent by this environment; its editable install is not.
    (Path(own) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import importlib.util, dualeval.backends, dualeval.launch\n"
        "print(dualeval.backends.__file__)\n"
        "assert not importlib.util.find_spec('backends') and not importlib.util.find_spec('launch')\n"
    )
    nothing = {"PYTHONPATH": ""}
    done = launch([python, "-c", code], cwd=tmp_path, variables=nothing).ok()
    assert done.stdout.startswith(own)
    done = launch(
        [tmp_path / "venv/bin/dualeval", "run", "--limit", "64", "--out", tmp_path / "out"],
        cwd=tmp_path,
        variables=nothing,
    ).ok()
    assert (tmp_path / "out/result.json").is_file()

    # Where torch and torchvision do not fit, one command lets every script of the environment import both.
    fits = launch([python, "-c", "import torchvision"], variables=nothing).returncode == 0
    done = launch([python, "-m", "dualeval.vision_library"], cwd=tmp_path, variables=nothing).ok()
    said = "fit together" if fits else f"with {own}/_dualeval_torchvision.pth 'import torchvision' works here"
    assert said in done.stdout
    for script in ("import torchvision; torchvision.models.resnet18()", "import torchmetrics.detection"):
        done = launch([python, "-c", script], cwd=tmp_path, variables=nothing).ok()
    # At the start of Python it is one small module, and nobody who looks for torchvision imports torch.
    code = (
        "import sys; new = {'torch', 'typing', 'dualeval'} & {*sys.modules}; assert not new, new\n"
        "import importlib.util; assert importlib.util.find_spec('torchvision')\n"
        "assert 'torch' not in sys.modules"
    )
    done = launch([python, "-c", code], cwd=tmp_path, variables=nothing).ok()


def interpreter(minor: int) -> Path:
    """A Python of this version, of the PATH or of pyenv; skips where there is none."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [str(path) for path in root.glob(f"versions/3.{minor}.*/bin/python")]
    found += filter(None, [shutil.which(f"python3.{minor}")])
    if not found:
        pytest.skip(f"there is no Python 3.{minor} on the PATH, nor of pyenv")
    return Path(found[0])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_pip_install_works_in_a_clean_environment(
    built: Path, tmp_path: Path, launch: Launch, minor: int
) -> None:
    """With all that it depends on, and without constraints: as a user types it, in the clone."""
    nothing = {"PYTHONPATH": ""}
    venv = tmp_path / "venv"
    assert launch([interpreter(minor), "-m", "venv", venv], variables=nothing).returncode == 0
    pip: list[str | Path] = [
        *(venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    ]
    launch([*pip, "."], cwd=built / "clone", variables=nothing, timeout=3000).ok()
    command: list[str | Path] = [venv / "bin/dualeval", "run", "--limit", "64", "--out", tmp_path / "out"]
    launch(command, cwd=tmp_path, variables=nothing, timeout=300).ok()
    assert (tmp_path / "out/result.json").is_file()
    shutil.rmtree(venv)  # with CUDA several GB


def test_no_run_asks_pyarrow_for_what_it_has_of_pandas() -> None:
    """pyarrow before 26 then fails where pandas is not installed; dualeval does not depend on it."""
    source = [*ROOT.glob("dualeval/**/*.py"), *ROOT.glob("backends/*.py"), *ROOT.glob("launch/**/*.py")]
    assert not [path for path in source if re.search(r"\.to_pandas\w*\(", path.read_text("utf-8"))]


def test_the_changelog_has_this_version() -> None:
    """A merge has emptied it once, and nothing noticed."""
    assert f"\n## {dualeval.__version__}\n\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")


IMPORTED = """
import ast, sys
from pathlib import Path
for path in map(Path, sys.argv[1:]):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in sys.stdlib_module_names:
            try:
                exec(ast.unparse(node))
            except ImportError as error:
                print(f"{path}:{node.lineno}: {error}")
"""


def test_the_oldest_python_has_all_that_is_imported_from_it(oldest_python: str, launch: Launch) -> None:
    """Python 3.10 has no typing.Self, and every run ended there in an ImportError."""
    files = [path for room in ("dualeval", "backends", "launch") for path in (ROOT / room).rglob("*.py")]
    done = launch([oldest_python, "-I", "-c", IMPORTED, *files])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_oldest_versions_that_setup_py_names_work(
    oldest_python: str, built: Path, tmp_path: Path, launch: Launch
) -> None:
    """A fresh environment of the oldest Python, with the oldest of each package: gigabytes, and minutes."""
    [install_requires] = re.findall(r"install_requires=\[(.*?)\]", SETUP, re.DOTALL)
    oldest = [needed.replace(">=", "==") for needed in re.findall('"(.+)",', install_requires)]
    assert oldest and all("==" in needed for needed in oldest)
    [wheel] = built.glob("*.whl")
    nothing = {"PYTHONPATH": ""}
    # Not in a folder of pytest's, which would keep the gigabytes.
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin/python"
        assert launch([oldest_python, "-m", "venv", folder], timeout=120).returncode == 0
        install: list[str | Path] = [python, "-m", "pip", "install", "-q", *oldest, wheel]
        launch(install, timeout=1800, variables=nothing).ok()
        digests = []
        for ranks in ("1", "2"):
            words = ["run", "--limit", "256", "--nproc", ranks, "--out", ranks]
            command: list[str | Path] = [python.with_name("dualeval"), *words]
            launch(command, cwd=tmp_path, variables=nothing, timeout=300).ok()
            digests.append(json.loads((tmp_path / ranks / "result.json").read_text())["metrics_digest"])
    assert digests[0] == digests[1]


# -- what CONTRIBUTING.md says ---------------------------------------------------------------------------


PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
OPTIONS, TASK = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
NAMED = sorted(set(re.findall(r"[\w./-]+/[\w.-]*(?:::\w+)?|[\w-]+\.md", PROSE)))


def test_files_and_tests_that_contributing_names_are_there() -> None:
    checked = [name for name in NAMED if "NAME" not in name]
    assert {"tests/metrics/test_means.py", "tests/backends/", ".ci/run", "docs/metrics.md"} <= {*checked}
    for name in checked:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert f"\ndef {test}" in (ROOT / path).read_text("utf-8") if test else True, name


def test_make_targets_that_contributing_names_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for name in ("CONTRIBUTING.md", "README.md"):
        targets = set(re.findall(r"\bmake ([\w-]+)", (ROOT / name).read_text("utf-8")))
        assert name != "README.md" or {"run", "test", "horovod", "gpu"} <= targets
        for target in targets if name != "README.md" else ("run", "test", "horovod", "gpu"):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def linear(num_classes: int) -> nn.Module:
    return nn.Linear(6, num_classes)


def test_the_task_of_contributing_evaluates_and_is_rescored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = []
    for name, text in (("dualeval.tasks.options.multilabel", OPTIONS), ("dualeval.tasks.multilabel", TASK)):
        file = tmp_path / f"{name}.py"
        file.write_text(text, "utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        modules.append(importlib.util.module_from_spec(spec))
        monkeypatch.setitem(sys.modules, name, modules[-1])
        spec.loader.exec_module(modules[-1])
    monkeypatch.setattr(options, "_NAMES", (*options._NAMES, "multilabel"))
    draw = np.random.default_rng(0)
    targets = draw.integers(0, 2, (97, 3))
    inputs = draw.normal(size=(97, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, targets=targets)
    torch.manual_seed(0)
    right = (linear(3)(torch.from_numpy(inputs)) > 0) == torch.from_numpy(targets).bool()

    given = {"model": f"{__name__}:linear", "weights": "random:0", "data": tmp_path / "data.npz"}
    result = evaluate(Job.of("multilabel", **given).make_task(), tmp_path / "out", batch_size=16)
    assert result.samples["evaluated"] == 97
    assert result.metrics["exact_match"] == right.all(1).double().mean().item()
    again = dualeval.rescore(tmp_path / "out", metrics=modules[1].stored_metrics({}, ["exact_match"]))
    assert again.metrics_digest == result.metrics_digest


# -- a test whose requirements are missing is skipped by name, or fails where they are required -----------


@pytest.mark.parametrize(
    ("required", "outcome", "said"),
    [
        ("", pytest.skip.Exception, "needs mpi: there is no mpirun; type: apt install openmpi-bin"),
        ("horovod", pytest.skip.Exception, "needs mpi: there is no mpirun"),
        ("mpi,horovod", pytest.fail.Exception, "DUALEVAL_REQUIRE has mpi, but there is no mpirun"),
        ("mpy", pytest.exit.Exception, r"DUALEVAL_REQUIRE names \['mpy'\]; it knows"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, required: str, outcome: Any, said: str
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DUALEVAL_REQUIRE", required)
    item: Any = SimpleNamespace(iter_markers=lambda name: [pytest.mark.needs("mpi").mark])
    with pytest.raises(outcome, match=said):
        requirements.check(item)
