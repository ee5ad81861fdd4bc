"""Files of containers and manifests: what they copy, promise and type."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from dualeval.cli.run import run
from dualeval.tools.horovod.setup import setup_horovod
from tests.conftest import BIN, ROOT, Launch

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
    extras: str

    @property
    def make_lines(self) -> list[str]:
        return [line for line in self.lines if line.startswith("make ")]

    @property
    def packages(self) -> set[str]:
        [line] = [line for line in self.lines if "apt-get install" in line]
        return {word for word in line.split("install", 1)[1].split() if not word.startswith("-")}


def read(name: str) -> Image:
    text = re.sub(r"^ *#.*\n", "", (DOCKER / name).read_text("utf-8"), flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", "", text)
    if name.endswith(".def"):
        copied = dict(re.findall(r"^ +(\S+) /opt/dualeval/(\S+)$", text, re.MULTILINE))
        commands = text.partition("%post\n")[2].partition("\n%")[0].splitlines()
    else:
        sources = re.findall(r"^COPY (.*) (\S+)$", text, re.MULTILINE)
        assert all(target in ("./", words) for words, target in sources)
        copied = {source: source for words, _ in sources for source in words.split()}
        commands = re.findall(r"^RUN (?:--mount=\S+ +)?(.*)$", text, re.MULTILINE)
    lines = [part.strip() for command in commands for part in command.split("&&")]
    [base] = re.findall(r"^(?:FROM|From:) (\S+)$", text, re.MULTILINE)
    [extras] = re.findall(r"\bEXTRAS=(\w\S+)$", text, re.MULTILINE)
    lines = [line for line in lines if line and not line.startswith(("set -e", "export ", "cd "))]
    return Image(base=base, copied=copied, lines=lines, extras=extras)


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
        "EXTRAS": image.extras,
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
        assert line == "make run" or f'".[{image.extras}]"' in done.stdout


def test_the_files_install_the_same() -> None:
    gpu, cpu, apptainer = map(read, FILES)
    assert (apptainer.base, apptainer.copied, apptainer.packages) == (gpu.base, gpu.copied, gpu.packages)
    assert (apptainer.make_lines, apptainer.extras) == (gpu.make_lines, gpu.extras)
    assert cpu.copied == gpu.copied and cpu.packages < gpu.packages
    extras = re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE)
    assert set(gpu.extras.split(",")) <= set(extras)


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


# -- manifests for Kubernetes and AzureML: they parse, have what their pages promise, and are read -----


KUBERNETES = ROOT / "examples/kubernetes"
AZURE = ROOT / "examples/azureml"


def read_yaml(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return content


def options(words: list[str]) -> dict[str, Any]:
    """What ``dualeval run`` makes of the words after it; fails on one that it does not have."""
    assert "run" in words
    given = words[words.index("run") + 1 :]
    return run.make_context("dualeval run", given).params


def pods(kind: str) -> dict[str, dict[str, Any]]:
    """By replica, the only container of its pod: with memory for /dev/shm, and --out on a claim."""
    found = {}
    content = read_yaml(KUBERNETES / f"{kind}job.yaml")
    for name, replica in content["spec"][f"{kind}ReplicaSpecs"].items():
        assert replica["restartPolicy"] == "OnFailure"
        spec = replica["template"]["spec"]
        [found[name]] = spec["containers"]
        if name != "Launcher":
            volumes = {one["name"]: one for one in spec["volumes"]}
            places = {mount["mountPath"]: volumes[mount["name"]] for mount in found[name]["volumeMounts"]}
            assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
            assert "persistentVolumeClaim" in places["/work"]
    return {**found, "": content}


def test_the_pytorch_job_has_a_rank_for_each_gpu() -> None:
    found = pods("pytorch")
    assert found["Master"] == found["Worker"]
    assert found["Master"]["command"] == ["torchrun"]
    assert options(found["Master"]["args"])["out"] == Path("/work/runs/r18")
    # As many ranks as GPUs.
    gpus = found["Master"]["resources"]["limits"]["nvidia.com/gpu"]
    assert str(gpus) == found[""]["spec"]["nprocPerNode"]


def test_the_mpi_job_has_a_rank_for_each_gpu() -> None:
    found = pods("mpi")
    words = found["Launcher"]["args"]
    assert options(words)["backend"] == "mpi"
    count = found[""]["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    gpus = found["Worker"]["resources"]["limits"]["nvidia.com/gpu"]
    assert found[""]["spec"]["slotsPerWorker"] == gpus
    assert int(words[words.index("-np") + 1]) == count * gpus


@pytest.mark.parametrize("kind", ["pytorch", "mpi"])
def test_the_azureml_job_types_a_known_command(kind: str) -> None:
    content = read_yaml(AZURE / f"{kind}.yml")
    assert content["type"] == "command"
    assert content["distribution"] == {"type": kind, "process_count_per_instance": 8}
    words = content["command"].split()
    assert words[0] == "dualeval"
    assert options(words)["backend"] == ("mpi" if kind == "mpi" else None)
    for kind_of, name in re.findall(r"\$\{\{(inputs|outputs)\.(\w+)\}\}", content["command"]):
        assert name in content[kind_of]
    assert content["outputs"]["runs"]["mode"] == "rw_mount"
