"""The README's commands in its order, in a clone that has what they installed before, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import BIN, ROOT, Launch
from tests.docs.test_readme import README, needs_slurm

PROGRAMS = (
    *("make", "dualeval", "torchrun", "horovodrun", "mpirun", "srun", "sbatch", "python", "pip", "apt"),
    ".",
)
# Begun by the README's words, but not tried here.
ELSEWHERE = {
    "apt install git make python3-venv": "the system's own: tests do not install any of it",
    "make test": "this is one of its tests",
    "make gpu": "it wants a GPU",
}
# What needs no environment; anything else comes after the line that activates it.
BEFORE = {*ELSEWHERE, "make run", ". .venv/bin/activate"}
# Two ranks where the README has more: this is about what has to be there, and each costs a second of a core.
FEWER = {"8": "2", "4": "2"}
WITHOUT_HOROVOD = "pip install -e '.[mpi]'"


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a line came to."""

    code: int
    said: str


def lines() -> list[str]:
    """All commands, in the order in which a reader meets them, each once."""
    shell = r"^```sh\n(.*?)^```$"
    inline = r"`([^`\n]+)`"
    found = []
    for block, code in re.findall(f"{shell}|{inline}", README, re.MULTILINE | re.DOTALL):
        for line in (block or code).splitlines():
            if line.split(" ")[0] in PROGRAMS and " " in line:
                found.append(line)
    # The table of tasks has the options alone; texts need what the line behind it installs.
    options = re.findall(r"^\| \[[^|]+\| `(--[^`]+)` \|", README, re.MULTILINE)
    place = found.index("pip install -e '.[qa]'") + 1
    return list(
        dict.fromkeys([*found[:place], *(f"dualeval run {each}" for each in options), *found[place:]])
    )


def test_the_lines_were_found() -> None:
    found = lines()
    assert set(ELSEWHERE) < set(found)
    for line in ("make run", ". .venv/bin/activate", "make horovod", "pip install -e '.[qa]'"):
        assert line in found
    assert sum(" --task " in line for line in found) == 4
    # What installs stands before what needs it.
    order = [found.index(line) for line in ("make run", ". .venv/bin/activate", "dualeval run --nproc 2")]
    assert order == sorted(order)
    assert all(
        found.index(". .venv/bin/activate") < found.index(line) for line in found if line not in BEFORE
    )
    for line in ("horovodrun -np 8 dualeval run", "mpirun -np 4 dualeval run"):
        assert found.index("make horovod") < found.index(line)


def a_clone(folder: Path) -> Path:
    """A copy of what git knows or would add, with nothing that was built or installed."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    folder.mkdir()
    for name in sorted({Path(os.fsdecode(name)) for name in names.split(b"\0") if name}):
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            copy.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            copy.write_bytes((ROOT / name).read_bytes())
    return folder


def as_typed(line: str, pictures: Path) -> str:
    words = [FEWER.get(word, word) for word in shlex.split(line)]
    typed = line if words == shlex.split(line) else shlex.join(words)
    return typed.replace("/data/imagenet/val", str(pictures))


class Shell:
    """One bash for all lines, so that what one of them sets holds for the next."""

    def __init__(self, launch: Launch, clone: Path) -> None:
        self._launch, self._clone = launch, clone

    def __call__(self, typed: list[str], timeout: float) -> Iterator[Done]:
        output = self._clone.parent / "output"
        output.mkdir(exist_ok=True)
        script = "".join(
            f"{{ {line}\n}} >{output}/{number} 2>&1; echo $? >{output}/{number}.code\n"
            for number, line in enumerate(typed)
        )
        # Nothing of the environment in which these tests run.
        others = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != str(BIN)]
        variables = {
            "PATH": os.pathsep.join(others),
            "PYTHONPATH": "",
            "VIRTUAL_ENV": "",
            "PYTHON": str(Path(sys.base_prefix) / "bin/python3"),
            "MAKELEVEL": "",
            "MAKEFLAGS": "",
        }
        self._launch(["bash", "-c", script], variables=variables, cwd=self._clone, timeout=timeout).ok()
        for number in range(len(typed)):
            said = (output / str(number)).read_text(errors="replace")
            yield Done(code=int((output / f"{number}.code").read_text()), said=said)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.needs("mpi", "horovod")
def test_each_line_works_with_what_was_installed_before(launch: Launch, tmp_path: Path) -> None:
    clone, pictures = a_clone(tmp_path / "clone"), tmp_path / "pictures"
    launch([sys.executable, "-m", "tests.readers_files", clone, pictures]).ok()
    shell = Shell(launch, clone)
    wanted = [line for line in lines() if line not in ELSEWHERE and not needs_slurm(line)]
    # For those who do without Horovod: tried last, when that is gone.
    wanted.remove(WITHOUT_HOROVOD)
    digests = {}
    for line, done in zip(wanted, shell([as_typed(line, pictures) for line in wanted], 1500), strict=True):
        assert done.code == 0, f"{line}\n{done.said}"
        if re.search(r"make run|dualeval run(?!.*--(model|task|help))", line):
            assert "10,000 of 10,000 evaluated" in done.said, f"{line}\n{done.said}"
            digests[line] = re.findall(r"metrics_digest +([0-9a-f]{64})", done.said)
    assert len(digests) >= 6
    assert len({tuple(found) for found in digests.values()}) == 1, digests

    # A library that has gone is named once, with what to type; and that is enough.
    lack, gone = "mpi4py is not installed", "pip uninstall -q -y"
    run = "dualeval run --limit 100 --no-progress"
    after = {
        f". .venv/bin/activate; {gone} mpi4py": None,
        f"mpirun -np 2 {run}": lack,
        f"horovodrun -np 2 {run}": lack,
        "dualeval setup-horovod": None,
        f"horovodrun -np 2 {run} --json": None,
        f"{gone} mpi4py horovod": None,
        f"mpirun -np 2 {run} --backend mpi": lack,
        WITHOUT_HOROVOD: None,
        f"mpirun -np 2 {run} --json": None,
    }
    for (line, error), done in zip(after.items(), shell(list(after), 600), strict=True):
        assert (done.code == 0) is (error is None), f"{line}\n{done.said}"
        assert done.said.count("dualeval: error: ") == (error is not None), f"{line}\n{done.said}"
        assert error is None or error in done.said, f"{line}\n{done.said}"
    assert json.loads(done.said)["world"]["backend"] == "mpi"
