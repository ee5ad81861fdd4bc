"""docker/: what the files copy is there, their make lines are the Makefile's own, and work in a fresh folder.

No image is built here. The lines of docker/Dockerfile run as far as they can without CUDA.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualeval.tools.horovod.setup import setup_horovod
from tests.conftest import BIN, ROOT, Launch
from tests.options.test_manifests import options

DOCKER = ROOT / "docker"
PAGE = (ROOT / "docs/containers.md").read_text("utf-8")
FILES = ["Dockerfile", "Dockerfile.cpu", "dualeval.def"]
# What a line may call besides make: nothing of it is this project's.
KNOWN = {"apt-get", "rm", "useradd", "chmod", "mkdir"}
SETTING = re.compile(r"\w+=")


@dataclass(frozen=True, kw_only=True)
class Image:
    """What a file says."""

    base: str  # the image that it begins with
    copied: dict[str, str]  # by path in the clone, the path in the image, from /opt/dualeval
    lines: list[str]  # the commands that build it, in their order
    defaults: dict[str, str]  # the values of its arguments

    @property
    def make_lines(self) -> list[str]:
        return [line for line in self.lines if line.startswith("make ")]

    @property
    def packages(self) -> set[str]:
        [line] = [line for line in self.lines if "apt-get install" in line]
        return {word for word in line.split("install", 1)[1].split() if not word.startswith("-")}


def commands_of(text: str) -> list[str]:
    return [part.strip() for part in text.split("&&")]


def read_dockerfile(text: str) -> Image:
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    found = [line.split(" ", 1) for line in joined.splitlines() if line]
    assert {name for name, _ in found} <= {"FROM", "RUN", "ARG", "COPY", "WORKDIR", "ENV", "USER", "CMD"}
    copied: dict[str, str] = {}
    for words in (rest.split() for name, rest in found if name == "COPY"):
        *sources, target = words
        assert target in ("./", *sources)
        copied |= {source: source for source in sources}
    runs = [re.sub(r"^--mount=\S+ +", "", rest) for name, rest in found if name == "RUN"]
    arguments = [rest.partition("=") for name, rest in found if name == "ARG"]
    [base] = [rest for name, rest in found if name == "FROM"]
    return Image(
        base=base,
        copied=copied,
        lines=[line for run in runs for line in commands_of(run)],
        defaults={name: value for name, _, value in arguments if value},
    )


def read_definition(text: str) -> Image:
    text = re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)
    head, *parts = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(sections) == {"setup", "files", "post", "environment", "runscript", "test"}
    files = dict(line.split() for line in sections["files"].splitlines() if line.strip())
    lines = re.sub(r"\\\n\s*", "", sections["post"]).splitlines()
    exported = [line.split()[1:] for line in lines if line.strip().startswith("export ")]
    return Image(
        base=re.findall(r"^From: (\S+)$", head, re.MULTILINE)[0],
        copied={source: target.removeprefix("/opt/dualeval/") for source, target in files.items()},
        lines=[
            part
            for line in lines
            for part in commands_of(line)
            if part and not part.startswith(("set -e", "export ", "cd "))
        ],
        defaults=dict(pair.split("=") for words in exported for pair in words),
    )


def read(name: str) -> Image:
    text = (DOCKER / name).read_text("utf-8")
    return read_definition(text) if name.endswith(".def") else read_dockerfile(text)


def a_folder(image: Image, folder: Path) -> Path:
    """What an image has of the clone, and nothing else."""
    for source, target in image.copied.items():
        copy = folder / target
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, copy)
    return folder


def variables(image: Image) -> dict[str, str]:
    """Nothing of the environment in which these tests run."""
    others = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != str(BIN)]
    return {
        **{name: value for name, value in image.defaults.items() if name == "EXTRAS"},
        "PATH": os.pathsep.join(others),
        "PYTHON": str(Path(sys.base_prefix) / "bin/python3"),
        **dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV", "MAKELEVEL", "MAKEFLAGS"), ""),
    }


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_there(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = read(name).copied
    assert {"Makefile", "setup.py", "constraints.txt", "dualeval", "backends", "launch"} <= set(copied)
    for path in copied:
        assert (ROOT / path).exists(), path
        assert f"!{path}" in ignored


@pytest.mark.parametrize("name", FILES)
def test_each_line_is_known(name: str, tmp_path: Path) -> None:
    image = read(name)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for line in image.lines:
        words = [word for word in shlex.split(line) if not SETTING.match(word)]
        assert words[0] in KNOWN | {"make"}, line
    assert image.make_lines[-1] == "make run" and "EXTRAS=$EXTRAS" in image.make_lines[0]
    folder = a_folder(image, tmp_path)
    for line in image.make_lines:
        for setting in filter(SETTING.match, shlex.split(line)):
            assert re.search(rf"^{setting.partition('=')[0]} [:?]=", makefile, re.MULTILINE), setting
        done = subprocess.run(
            ["bash", "-c", line.replace("make", "make -n", 1)],
            cwd=folder,
            env=variables(image),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        for command in re.findall(r"dualeval setup-horovod (.*)", done.stdout):
            given = setup_horovod.make_context("setup-horovod", shlex.split(command)).params
            assert given["with_mpi"] is True
            assert given["with_nccl"] is (name != "Dockerfile.cpu")
        assert line == "make run" or f'".[{image.defaults["EXTRAS"]}]"' in done.stdout


def test_the_files_are_alike() -> None:
    gpu, cpu, apptainer = map(read, FILES)
    assert (apptainer.base, apptainer.copied, apptainer.packages) == (gpu.base, gpu.copied, gpu.packages)
    assert (apptainer.make_lines, apptainer.defaults["EXTRAS"]) == (gpu.make_lines, gpu.defaults["EXTRAS"])
    assert cpu.copied == gpu.copied and cpu.packages < gpu.packages
    extras = re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE)
    assert set(gpu.defaults["EXTRAS"].split(",")) <= set(extras)


def test_the_page_names_what_there_is() -> None:
    for image in map(read, FILES[:2]):
        assert f"`{image.base}`" in PAGE
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    typed = [shlex.split(line) for line in re.sub(r"\\\n\s*", "", blocks).splitlines() if line]
    for words in typed:
        files = [word for word in words if word.startswith("docker/")]
        assert all((ROOT / file).is_file() for file in files)
        if words[1] == "run":
            # Fails on an option that dualeval run does not have.
            [start] = {"dualeval", "dualeval.sif"} & set(words)
            assert options(words[words.index(start) :])["out"].parts[0] == "runs"
    assert sum(words[1] in ("build", "run") for words in typed) == len(typed) == 7


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.needs("mpi", "horovod")
def test_the_make_lines_work_in_a_fresh_folder(launch: Launch, tmp_path: Path) -> None:
    image = read("Dockerfile.cpu")
    folder = a_folder(image, tmp_path / "image")
    for line in image.make_lines:
        done = launch(["bash", "-c", line], cwd=folder, variables=variables(image), timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "10,000 of 10,000 evaluated" in done.stdout + done.stderr
    run = "dualeval run --limit 100 --no-progress --json"
    for start in ("horovodrun -np 2", "mpirun -np 2", "torchrun --nproc-per-node 2 --no-python"):
        activated = {**variables(image), "PATH": f"{folder}/.venv/bin{os.pathsep}{variables(image)['PATH']}"}
        done = launch(["bash", "-c", f"{start} {run}"], cwd=tmp_path, variables=activated, timeout=300)
        assert done.returncode == 0 and '"metrics_digest"' in done.stdout, done.stderr
    # The line of the image for GPUs, which needs a torch with CUDA: it says so, and breaks nothing.
    [line] = [line for line in read("Dockerfile").make_lines if "horovod" in line]
    done = launch(["bash", "-c", line], cwd=folder, variables=variables(image), timeout=300)
    assert done.returncode != 0 and "NCCL, for --with-nccl: torch is not built with CUDA" in done.stderr
