"""Signals in a script: taken beside threads that are older, given back, and kept from children."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from dualeval.process.signals import Signals
from tests.conftest import Launch

BEGIN = """
import faulthandler, multiprocessing, os, select, signal, sys, threading
from dualeval.process.signals import DEFAULT_SIGNALS, Signals

def state():
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return handlers, signal.pthread_sigmask(signal.SIG_BLOCK, ()), wakeup, len(os.listdir("/proc/self/fd"))

def taken(number, work=lambda: None):
    came = threading.Event()
    names = []
    signals = Signals()
    signals.call(lambda name: came.set() or names.append(name))
    os.kill(os.getpid(), number)
    while not came.wait(0.01):
        work()
    signals.close()
    return names
"""
OLDER_THREADS = """
import numpy
square = numpy.ones((1500, 1500))
square @ square
assert len(os.listdir("/proc/self/task")) > 1, "OpenBLAS has no threads"
before = state()
for name in 10 * DEFAULT_SIGNALS:
    assert taken(getattr(signal, name), lambda: square @ square) == [name]
    assert state() == before
"""
A_HANDLER_OF_C = """
with open(sys.argv[1], "w+") as file:
    faulthandler.register(signal.SIGUSR2, file)
    assert taken(signal.SIGUSR2) == ["SIGUSR2"]
    assert os.path.getsize(sys.argv[1]) == 0, "its handler was called"
"""
CHILDREN = """
def child(pipe):
    os.kill(os.getpid(), signal.SIGTERM)
    pipe.send("it is blocked")
    pipe.recv()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

names = []
signals = Signals()
signals.call(names.append)
ours, theirs = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
process.start()
assert ours.recv() == "it is blocked"
ours.send("unblock it")
process.join()
assert process.exitcode == -signal.SIGTERM
signals.close()
assert names == []
"""
WHAT_IS_NOT_ITS_OWN = """
read_end, write_end = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(write_end)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: None)
before = state()
names = []
signals = Signals()
signals.call(names.append)
# Ignored; another's, who hears of it by its own descriptor.
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGUSR1)
assert select.select([read_end], [], [], 30)[0] and os.read(read_end, 9) == bytes([signal.SIGUSR1])
# Set while it was open: that is kept.
kept = lambda *_: None
signal.signal(signal.SIGTERM, kept)
signals.close()
assert names == []
assert signal.getsignal(signal.SIGTERM) is kept
signal.signal(signal.SIGTERM, signal.SIG_DFL)
assert state() == before
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(OLDER_THREADS, id="older-threads"),
        pytest.param(A_HANDLER_OF_C, id="a-handler-of-c"),
        pytest.param(CHILDREN, id="children"),
        pytest.param(WHAT_IS_NOT_ITS_OWN, id="what-is-not-its-own"),
    ],
)
def test_a_script_takes_signals_and_gives_them_back(launch: Launch, tmp_path: Path, script: str) -> None:
    # Whoever started the tests may ignore some signals, and what they start would inherit that.
    command: list[str | Path] = [
        *("env", "--default-signal", sys.executable, "-c", BEGIN + script, tmp_path / "file")
    ]
    launch(command, variables={"OPENBLAS_NUM_THREADS": "4"}, timeout=60).ok()


def test_only_the_main_thread_takes_signals() -> None:
    found = []

    def make() -> None:
        signals = Signals()
        found.append(signals.is_active)
        signals.close()

    handler = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert found == [False]
    assert signal.getsignal(signal.SIGTERM) is handler
