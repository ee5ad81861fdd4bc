"""What is shown before the first batch: a line on a terminal, else a line of what takes long."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

import dualeval
from dualeval.process import status_line
from dualeval.process.status_line import LINE, StatusLine, doing
from dualeval.report.progress import ProgressDisplay
from dualeval.tasks.image_data import ASSETS
from tests.conftest import ROOT
from tests.process.test_process_start import DUALEVAL

LIMIT_S = 120.0
CTRL_C = b"\x03"
# A model that is not built before there is a file.
WAITING = """
import pathlib, time
from dualeval.models.sources.fashion_cnn import FashionCNN

def net():
    pathlib.Path("begun").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    print("the user's own words")
    return FashionCNN()
"""
RUN = [
    *(*DUALEVAL, "run", "--model", "waiting:net", "--num-classes", "10", "--weights", "random:0"),
    *("--data", str(ASSETS), "--limit", "64"),
]


class Terminal:
    """A command on a terminal of its own, with all that it has shown."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.shown = b""
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={**os.environ, "TERM": "xterm", "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"},
            preexec_fn=own_terminal,
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def read_until(self, awaited: str) -> None:
        """Read until something is shown."""
        while awaited.encode() not in self.shown:
            assert self._read(), self.shown

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        return self._process.wait(LIMIT_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], LIMIT_S)
        assert ready, self.shown
        try:
            more = os.read(self._ours, 65536)
        except OSError:  # how Linux says that the last process has closed its terminal
            more = b""
        self.shown += more
        return bool(more)

    @property
    def screen(self) -> list[str]:
        """The lines that a person sees."""
        lines, row, column = [""], 0, 0
        pieces = re.findall(r"\x1b\[\??(\d*)[;\d]*([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)", self.shown.decode())
        for number, letter, home, new, text in pieces:
            if home:
                column = 0
            elif new:
                row += 1
                lines += [""] * (row == len(lines))
            elif text:
                line = lines[row].ljust(column)
                lines[row] = line[:column] + text + line[column + len(text) :]
                column += len(text)
            elif letter == "K":
                lines[row] = lines[row][:column] if number != "2" else ""
            elif letter == "A":
                row -= int(number or 1)
        return [line.rstrip() for line in lines if line.strip()]


def own_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "waiting.py").write_text(WAITING)
    return tmp_path


def test_a_run_speaks_from_its_start_and_leaves_nothing_of_it(folder: Path) -> None:
    with Terminal(RUN, folder) as terminal:
        terminal.read_until("dualeval: importing torch")
        assert terminal.shown.startswith(b"\r\x1b[Kdualeval: starting (0 s)\r")
        terminal.read_until("dualeval: building the model")
        (folder / "go").touch()
        assert terminal.end() == 0
    first, *rest = terminal.screen
    assert first == "the user's own words"
    assert any(line.startswith("metrics_digest") for line in rest)
    assert not [line for line in rest if "dualeval:" in line]


@pytest.mark.parametrize(
    "more", [[], pytest.param(["--nproc", "2"], marks=pytest.mark.long)], ids=["alone", "two ranks"]
)
def test_ctrl_c_says_that_nothing_was_begun(folder: Path, more: list[str]) -> None:
    with Terminal([*RUN, *more], folder) as terminal:
        terminal.read_until("dualeval: building the model")
        terminal.type(CTRL_C)
        assert terminal.end() == 75
    said = "dualeval: stopped by SIGINT. Nothing was started."
    assert [line.removeprefix("^C") for line in terminal.screen] == [said]
    assert not (folder / "runs").exists()


def test_a_refusal_leaves_no_status_line(folder: Path) -> None:
    (folder / "waiting.py").write_text("import torch\n\ndef net():\n    raise ValueError('no such model')\n")
    with Terminal(RUN, folder) as terminal:
        assert terminal.end() == 1
    assert "dualeval: importing torch" in terminal.shown.decode()
    screen = terminal.screen
    assert screen[-1].startswith("dualeval: error: ") and "no such model" in screen[-1]
    assert not [line for line in screen if re.search(r"\(\d+ s\)", line)]


def test_nothing_else_is_imported_before_the_first_word() -> None:
    code = (
        "import sys; from dualeval.process.start import prepare; before = {*sys.modules}; prepare(['run']); "
        "print(*sorted({*sys.modules} - before)); "
        "print(*sorted(name for name in sys.modules if name.startswith('dualeval')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    inner = "errors process process.start process.status_line"
    assert done.stdout.split() == ["dualeval", *(f"dualeval.{name}" for name in inner.split())]


# -- the line itself -----------------------------------------------------------------------------------


class Drawn:
    """A line on a terminal, and what has been written there since."""

    def __init__(self, stream: TextIO, descriptor: int) -> None:
        self.line = StatusLine()
        self._stream, self._descriptor = stream, descriptor

    def begin(self, *, speaks: bool) -> StatusLine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", self._stream)
            self.line.begin(speaks=speaks)
        return self.line

    def written(self) -> str:
        # A terminal hands on what it gets a moment later.
        os.write(self._stream.fileno(), b"#")
        found = b""
        while not found.endswith(b"#"):
            found += os.read(self._descriptor, 65536)
        return re.sub(r" \(\d+ s\)|[\r#]", "", found.decode()).replace("\x1b[K", "|")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drawn]:
    monkeypatch.setattr(status_line, "DRAW_EVERY_S", LIMIT_S)
    monkeypatch.setattr(status_line, "on_screen", lambda _: True)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        drawn = Drawn(stream, ours)
        yield drawn
        drawn.line.speak(speaks=False)
    os.close(ours)


def test_the_line_is_drawn_anew_where_something_else_is_done(drawn: Drawn) -> None:
    line = drawn.begin(speaks=True)
    assert drawn.written() == "|dualeval: starting"
    assert line.show("listing the files of a\x1b[2Jb") == "starting"
    assert drawn.written() == "|dualeval: listing the files of a?[2Jb"
    line.count = 50_000
    assert str(line).startswith("dualeval: listing the files of a?[2Jb: 50,000 (")
    line.before_output(b"a note\n")
    assert drawn.written() == "|"
    line.before_output(b"another\n")
    line.show(None)
    assert drawn.written() == ""
    line.speak(speaks=False)
    line.show("a run that is over")
    assert drawn.written() == ""


def test_other_ranks_erase_the_line_and_draw_nothing(drawn: Drawn) -> None:
    line = drawn.begin(speaks=False)
    assert drawn.written() == ""
    line.before_output(b"half a line")
    assert drawn.written() == "|"
    line.before_output(b" and its end\n")
    assert drawn.written() == ""
    line.show(None)
    line.before_output(b"a note\n")
    assert drawn.written() == ""


def test_a_narrow_terminal_is_no_two_lines(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((20, 5)))
    drawn.begin(speaks=True).show("listing the files of /a/long/path")
    # One column stays free: some terminals go to a new line behind the last.
    assert drawn.written() == "|dualeval: starting |dualeval: listing t"


def test_the_progress_waits_for_the_first_batch(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter(range(0, 100, 10))
    progress = ProgressDisplay(sys.stdout, clock=lambda: next(times))
    with doing("checking the first samples"):
        progress(0, 10)
        progress(0, 10)
    progress(0, 10)
    progress(5, 10)
    assert capsys.readouterr().out == "5/10 samples, 0 samples/s, 10 s left\n"


# -- from a script: no line on its terminal, and one of what takes long ---------------------------------


class Heard:
    """A standard error that says when something is written."""

    def __init__(self) -> None:
        self.text, self.has_come = "", threading.Event()

    def write(self, text: str) -> None:
        self.text += text
        if "building the model" in text:
            self.has_come.set()

    def flush(self) -> None:
        return

    def isatty(self) -> bool:
        return True


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setattr(status_line, "DRAW_EVERY_S", 0.01)
    monkeypatch.setattr(status_line, "LONG_S", 0.02)
    monkeypatch.setattr(LINE, "_written", set())
    return Heard()


def evaluated(model: Callable[[], torch.nn.Module], heard: Heard, **options: Any) -> None:
    data = [(torch.ones(2) * each, torch.ones(())) for each in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", heard)
        dualeval.evaluate(model=model, data=data, **options)


def test_what_takes_long_is_a_line_of_its_own_once(heard: Heard) -> None:
    def net() -> torch.nn.Module:
        assert heard.has_come.wait(LIMIT_S)
        return torch.nn.Linear(2, 1).eval()

    evaluated(net, heard)
    evaluated(net, heard)
    lines = [line for line in heard.text.splitlines() if "building the model" in line]
    assert len(lines) == 1 and re.fullmatch(r"dualeval: building the model \(\d+ s\)", lines[0])
    assert "\r" not in heard.text and "\x1b" not in heard.text
    assert LINE.name is None


def test_a_caller_that_takes_the_notes_reads_no_lines(heard: Heard) -> None:
    notes: list[str] = []

    def net() -> torch.nn.Module:
        assert not heard.has_come.wait(0.2)
        return torch.nn.Linear(2, 1).eval()

    evaluated(net, heard, note=notes.append)
    assert "building" not in heard.text
