"""A tool, task, logger or form of data is taken out with its lines in tables, and the rest stays green."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs.test_architecture import ROOT, imports, name_of, sources

_COMMANDS, _TASKS, _KINDS = "cli/__init__.py", "tasks/__init__.py", "report/loggers/loggers.py"
_OPTIONS, _NAMES = "tasks/options/__init__.py", "data/set_names.py"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is taken out of ``dualeval/``."""

    files: Sequence[str]
    # By file the pattern of its lines in a table.
    lines: Mapping[str, str] = field(default_factory=dict)
    # Why it cannot be taken out.
    tied: str = ""


def tool(name: str, **others: str) -> Part:
    return Part(files=[f"tools/{name}"], lines={_COMMANDS: rf"    .*dualeval\.tools\.{name}\..*\n", **others})


def task(name: str, *files: str, tied: str = "") -> Part:
    module = name.replace("-", "_")
    lines = {_OPTIONS: rf'    "{name}",\n', _TASKS: rf"    .*tasks\.{module} .*\n"}
    files = (f"tasks/{module}.py", f"tasks/options/{module}.py", *files)
    return Part(files=files, lines=lines, tied=tied)


def logger(kind: str) -> Part:
    return Part(files=[f"report/loggers/{kind}.py"], lines={_KINDS: rf'    "{kind}": .*\n'})


def table(form: str) -> Part:
    return Part(files=[f"data/tables/{form}.py"], lines={_NAMES: rf'"\.\w+": "{form}"(, )?'})


def store(kind: str) -> Part:
    return Part(files=[f"data/stores/{kind}.py"], lines={"urls.py": rf'"\w+": "{kind}"(, )?'})


def images(kind: str) -> Part:
    lines = {
        _NAMES: rf'    .*\), "{kind}"\),\n|    "{kind}": Kind\(\n(        .*\n)*    \),\n|    "{kind}": .*\n'
    }
    return Part(files=[f"data/image_sets/{kind}.py"], lines=lines)


PARTS = {
    "tool bench": tool("bench"),
    "tool conformance": tool("conformance"),
    "tool doctor": tool("doctor"),
    "tool horovod": tool("horovod"),
    "tool invariance": Part(
        files=["tools/invariance"],
        lines={"tools/doctor/command.py": r'    "--invariance": \((.|\n)*?\n    \)\n'},
    ),
    "tool submit": tool("submit"),
    "tool watch": tool("watch"),
    "task image-classification": task(
        "image-classification",
        "tasks/image_data.py",
        tied="the embedded job and evaluate(model=..., data=PATH), thus the door, are of this task",
    ),
    "task segmentation": task(
        "segmentation",
        "tasks/mask_layers.py",
        "data/masks.py",
        "data/masked_shards.py",
        "models/segmenters.py",
        "data/image_sets/packed_masks.py",
    ),
    "task detection": Part(
        files=["tasks/detection", "tasks/options/detection.py", "metrics/detection"],
        lines={
            _OPTIONS: r'    "detection",\n',
            _TASKS: r"    .*tasks\.detection .*\n",
            "metrics/__init__.py": r"    .*\bAveragePrecision\b.*\n",
        },
    ),
    "task text-classification": task("text-classification"),
    "task question-answering": task(
        "question-answering",
        *("tasks/given_answers.py", "tasks/scored_answers.py"),
        *("data/squad.py", "data/windows.py", "metrics/spans.py"),
    ),
    "task language-modeling": task("language-modeling", "tasks/language_kinds.py", "data/language_rows.py"),
    "task lm-eval": Part(
        files=["tasks/lm_eval", "tasks/options/lm_eval.py", "cli/requests.py"],
        lines={
            _OPTIONS: r'    "lm-eval",\n',
            _TASKS: r"    .*tasks\.lm_eval .*\n",
            _COMMANDS: r"    .*cli\.requests.*\n",
        },
    ),
    "logger tensorboard": logger("tensorboard"),
    "logger wandb": logger("wandb"),
    "logger mlflow": logger("mlflow"),
    "logger jsonl": logger("jsonl"),
    "data csv and tsv": table("delimited"),
    "data json lines": table("jsonl"),
    "data parquet": table("parquet"),
    "data cifar": images("cifar"),
    "data idx": images("idx"),
    "data class folders": images("class_folders"),
    "data manifests": images("manifest"),
    "data tar shards": images("tar_shards"),
    "data in object stores": store("arrow"),
    "data on the web": store("web"),
    "packs": Part(
        files=[
            *("tools/pack", "data/pack_file.py"),
            *("data/image_sets/pack.py", "data/image_sets/packed_masks.py"),
        ],
        lines={_COMMANDS: r"    .*tools\.pack\..*\n", _NAMES: r'    "pack": .*\n'},
    ),
    "data hugging face": images("hugging_face"),
    "data mds": images("mds"),
}
# Quick tests that name none of the parts.
_SMOKE = (
    "tests/columns/test_columns.py",
    "tests/docs/test_architecture.py::test_no_module_imports_one_that_imports_it",
    "tests/docs/test_architecture.py::test_rooms_inside_a_room_stand_on_floors",
)
# Of what is left every module, and a run of the embedded job.
_RUNS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from dualeval.cli import COMMANDS, dualeval, main
for words in (["--help"], *([name, "--help"] for name in COMMANDS), ["list", "tasks"], ["list", "metrics"]):
    dualeval.main(words, standalone_mode=False)
main(["run", "--limit", "64", "--out", "out"])
"""


def copy_without(names: Sequence[str], folder: Path) -> Path:
    """Copy what is imported and tested, without some parts."""
    for name in ("dualeval", "backends", "launch", "slurm", "tests"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    parts = [PARTS[name] for name in names]
    for file, pattern in (line for part in parts for line in part.lines.items()):
        path = folder / "dualeval" / file
        text, count = re.subn(pattern, "", path.read_text("utf-8"))
        assert count, f"no line of {names} in {file}"
        path.write_text(text, "utf-8")
    for file in (file for part in parts for file in part.files):
        path = folder / "dualeval" / file
        # Two parts may have a file.
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def type_in(folder: Path, *words: str) -> None:
    variables = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=part.tied)] if part.tied else [])
        for name, part in PARTS.items()
    ],
)
def test_what_is_left_can_be_imported_and_runs(name: str, tmp_path: Path) -> None:
    folder = copy_without([name], tmp_path / "house")
    there = {name_of(path): path for path in sources()}
    left = {each: path for each, path in there.items() if (folder / path.relative_to(ROOT)).exists()}
    for each, path in left.items():
        for module, names in imports(folder / path.relative_to(ROOT)):
            gone = ({module} | {f"{module}.{one}" for one in names}) & (there.keys() - left.keys())
            assert not gone, f"{each} imports {gone}"
    type_in(folder, "-c", _RUNS, *left)
    type_in(folder, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *_SMOKE)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_is_left_passes_mypy(tmp_path: Path) -> None:
    """Of all that can be taken out at once: what names one of them is found for each alone, above."""
    folder = copy_without([name for name, part in PARTS.items() if not part.tied], tmp_path / "house")
    type_in(folder, "-m", "mypy", "dualeval")
