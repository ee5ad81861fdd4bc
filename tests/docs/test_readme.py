"""The README's commands work, and its links lead somewhere."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path

import pytest

from dualeval.tasks.image_classification import ImageClassification
from tests.conftest import ROOT, Launch
from tests.engine.test_evaluator import evaluate
from tests.launchers import needs

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


def test_the_table_was_found() -> None:
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
    done = launch([*start.split(), "mine.py"], cwd=folder, timeout=90).ok()
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


def test_a_checkpoint_and_pictures(launch: Launch, tmp_path: Path) -> None:
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
    assert "no difference shown" in printed[3] or "B is better" in printed[3]


@pytest.mark.parametrize("target", ["run", "test", "horovod", "gpu"])
def test_make_targets_exist(target: str) -> None:
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


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
