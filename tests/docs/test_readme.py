"""The README's commands work, also in its order in a fresh clone, and its links lead somewhere."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualeval.tasks.image_classification import ImageClassification
from tests.conftest import BIN, ROOT, Launch
from tests.engine.test_evaluator import evaluate
from tests.vehicles.launchers import needs

README = (ROOT / "README.md").read_text("utf-8")
# README has a few of these.
LAUNCHERS = (ROOT / "docs/launchers.md").read_text("utf-8")


def shown(picture: str = "run") -> list[str]:
    """The lines of text in a picture of what a command prints; spaces at their ends are cut off."""
    lines: dict[float, str] = {}
    pattern = rf'<text class="{picture}-r\d+" x="[\d.]+" y="([\d.]+)"[^>]*>(.*?)</text>'
    for height, text in re.findall(pattern, (ROOT / f"docs/{picture}.svg").read_text("utf-8"), re.DOTALL):
        said = html.unescape(text).replace("\xa0", " ")
        lines[float(height)] = lines.get(float(height), "") + said
    return [line.rstrip() for line in lines.values() if line.strip()]


def commands() -> list[str]:
    """First column of both tables of ways to start."""
    found = []
    for page in (LAUNCHERS, README):
        section = page.partition("## Ways to start")[2].partition("\n## ")[0]
        found += re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    return list(dict.fromkeys(found))


def names_of(lines: list[str]) -> list[str]:
    """The labels of the lines and the names of the metrics that a run prints."""
    found = [re.match(r"│ *(\w+)|([a-z_]+)  ", line) for line in lines]
    return [name[1] or name[2] for name in found if name]


def needs_slurm(command: str) -> bool:
    """Whether a command is for tests/cluster/test_commands.py to run."""
    return command.startswith(("srun ", "sbatch ", "dualeval submit "))


def test_the_table_of_starts_is_found_whole() -> None:
    assert len(commands()) == 10
    assert sum(map(needs_slurm, commands())) == 3
    assert len(re.findall(r"^\| `", README, re.MULTILINE)) == 5


@pytest.fixture(scope="module")
def digest() -> str:
    """Of the first 100 pictures, in this process."""
    return evaluate(ImageClassification(), None, limit=100).metrics_digest


@pytest.mark.parametrize(
    "command",
    [pytest.param(text, marks=needs(text.split()[0], "")) for text in commands() if not needs_slurm(text)],
)
def test_every_way_to_start_runs(launch: Launch, tmp_path: Path, digest: str, command: str) -> None:
    # Two ranks for every eight: this is about the words, and each rank costs a second of a core.
    words = ["2" if word in ("4", "8") else word for word in shlex.split(command)]
    done = launch([*words, "--limit", "100", "--out", tmp_path / "out"], cwd=ROOT, timeout=90).ok()
    assert "first 100 of 10,000 (10 of 10 classes), 0 failed" in done.stdout
    assert digest in done.stdout
    if command == "dualeval run":
        assert names_of(done.stdout.splitlines()) == names_of(shown()), "type: make picture"


def test_the_readme_is_short_and_has_the_picture() -> None:
    assert len(README.splitlines()) <= 120
    assert "](docs/compare.svg)" in README
    assert any("B is better" in line for line in shown("compare")), "type: make picture"


def test_the_shown_job_is_the_embedded_one() -> None:
    for label, text in ImageClassification().description().items():
        assert any(line.startswith(f"{label:<16}{text}") for line in shown())


def first_example() -> str:
    return str(re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[0])


def printed_by_first_example(launch: Launch, folder: Path, start: str) -> set[str]:
    """What each rank prints: the number of samples, the metrics and the digest."""
    (folder / "mine.py").write_text(first_example())
    # Unbuffered, the words of one print by two ranks mix.
    unbuffered = {"PYTHONUNBUFFERED": ""}
    done = launch([*start.split(), "mine.py"], variables=unbuffered, cwd=folder, timeout=90).ok()
    return set(re.findall(r"1000 \{.*\} [0-9a-f]{8}", done.stdout))


@pytest.fixture(scope="module")
def printed_alone(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    [printed] = printed_by_first_example(launch, tmp_path_factory.mktemp("alone"), "python")
    # But for the last bits of another kind of CPU.
    assert re.sub(r"(\d\.\d{5})\d+|\w{8}$", r"\1", printed) in re.sub(
        r"(\d\.\d{5})\d+|\b\w{8}$", r"\1", README, flags=re.MULTILINE
    )
    return printed


@pytest.mark.parametrize(
    "start",
    [
        "torchrun --nproc-per-node 2",
        pytest.param("horovodrun -np 2 python", marks=[*needs("horovodrun", ""), pytest.mark.long]),
    ],
)
def test_the_first_example_runs(launch: Launch, tmp_path: Path, start: str, printed_alone: str) -> None:
    assert printed_by_first_example(launch, tmp_path, start) == {printed_alone}


def test_the_lines_with_a_checkpoint_and_pictures_print_what_is_shown(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if "small_classifier" in line or "compare" in line
    ]
    assert len(lines) == 4
    printed = []
    for line in lines:
        done = launch(shlex.split(line), cwd=tmp_path, timeout=240).ok()
        printed.append(done.stdout)
    labels = [line.split("  ")[0] for line in README.partition("The second prints:")[2].splitlines()[3:9]]
    assert all(label in printed[1] for label in labels)
    assert {"data", "samples", "metrics_digest"} <= {*labels}
    # Nothing that git shows, or that 'make clean' leaves.
    assert {path.name for path in tmp_path.iterdir()} == {"examples", "runs"}
    # The table of tasks begins with a line that needs nothing but these files.
    assert lines[1].startswith(f"dualeval run {options()[0]} ")
    assert "no difference shown" in printed[3] or "B is better" in printed[3]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)
    for link in links:
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors_of(target), f"{page}: {link}"


def anchors_of(page: Path) -> set[str]:
    """What a link may name behind #: the headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -- in its order, in a clone that has what its lines installed before, and nothing else ------------------


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
    # Texts need what the line behind the table of tasks installs.
    place = found.index("pip install 'dualeval[hf]'") + 1
    typed = [f"dualeval run {each}" for each in options()]
    return list(dict.fromkeys([*found[:place], *typed, *found[place:]]))


def options() -> list[str]:
    """What the table of tasks has behind ``dualeval run``."""
    return re.findall(r"^\| \[[^|]+\| `(--[^`]+)` \|", README, re.MULTILINE)


def test_the_lines_are_found_and_in_the_order_of_installing() -> None:
    found = lines()
    assert set(ELSEWHERE) < set(found)
    for line in ("make run", ". .venv/bin/activate", "make horovod", "pip install 'dualeval[hf]'"):
        assert line in found
    assert sum(" --task " in line for line in found) == 5
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


def in_one_shell(launch: Launch, clone: Path, typed: list[str], timeout: float) -> list[Done]:
    """What lines come to that are typed into one bash: what one of them sets holds for the next."""
    output = clone.parent / "output"
    output.mkdir(exist_ok=True)
    script = "".join(
        f"{{ {line}\n}} >{output}/{number} 2>&1; echo $? >{output}/{number}.code\n"
        for number, line in enumerate(typed)
    )
    # Nothing of the environment in which these tests run.
    others = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != str(BIN)]
    variables = dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV", "MAKELEVEL", "MAKEFLAGS"), "")
    variables |= {"PATH": os.pathsep.join(others), "PYTHON": str(Path(sys.base_prefix) / "bin/python3")}
    launch(["bash", "-c", script], variables=variables, cwd=clone, timeout=timeout).ok()
    return [
        Done(
            code=int((output / f"{number}.code").read_text()),
            said=(output / str(number)).read_text(errors="replace"),
        )
        for number in range(len(typed))
    ]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.needs("mpi", "horovod")
def test_each_line_works_with_what_was_installed_before(launch: Launch, tmp_path: Path) -> None:
    clone, pictures = a_clone(tmp_path / "clone"), tmp_path / "pictures"
    launch([sys.executable, "-m", "tests.vehicles.readers_files", clone, pictures]).ok()
    wanted = [line for line in lines() if line not in ELSEWHERE and not needs_slurm(line)]
    # For those who do without Horovod: tried last, when that is gone.
    wanted.remove(WITHOUT_HOROVOD)
    digests = {}
    for line, done in zip(
        wanted, in_one_shell(launch, clone, [as_typed(line, pictures) for line in wanted], 1500), strict=True
    ):
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
    for (line, error), done in zip(after.items(), in_one_shell(launch, clone, [*after], 600), strict=True):
        assert (done.code == 0) is (error is None), f"{line}\n{done.said}"
        assert done.said.count("dualeval: error: ") == (error is not None), f"{line}\n{done.said}"
        assert error is None or error in done.said, f"{line}\n{done.said}"
    assert json.loads(done.said)["world"]["backend"] == "mpi"
