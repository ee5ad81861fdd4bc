"""Forks processes that have torch and the engine loaded, so that a test's start costs a tenth of a second.

    python -m tests.vehicles.fork_server SOCKET [MODULE ...]

The modules are loaded besides what all tests need.
Each connection asks for one process: JSON with ``words`` (after ``python``), ``variables`` and ``cwd``, and
with it the descriptors of its standard output and error. The answer is the process's id, and at its end its
exit code.
The server has one thread, so that a child may have its own.
"""

from __future__ import annotations

import builtins
import faulthandler
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

from dualeval.vision_library import torchvision

# What the main path and the workers of tests import; nothing that a test wants to see missing or late.
_LOADED = (
    *("dualeval.cli.run", "dualeval.engine.run", "dualeval.engine.own_loop", "dualeval.engine.session"),
    *("dualeval.tasks.image_classification", "dualeval.models.classifiers"),
    *("dualeval.backends.torch", "pyarrow.parquet", "rich.progress", "torch._dynamo"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp"),
)


class Job(Exception):
    """What a child is to run: it leaves the server's loop."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked


def serve(path: str) -> None:
    """Answer until the one who has started this server is gone."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    print("listens", flush=True)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for file in (listening, woken, sys.stdin):
            selector.register(file, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return  # its other end is closed
                if key.fileobj is listening:
                    _start(listening, children)
                else:
                    os.read(woken, 1024)
                    _reap(children)


def _start(listening: socket.socket, children: dict[int, socket.socket]) -> None:
    connection, _ = listening.accept()
    payload, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    while not payload.endswith(b"\n"):
        payload += connection.recv(1 << 20)
    assert threading.active_count() == 1 and len(list(Path("/proc/self/task").iterdir())) == 1
    child = os.fork()
    if child:
        children[child] = connection
        connection.sendall(f"{child}\n".encode())
        for file in files:
            os.close(file)
        return
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for place, file in enumerate((null, *files)):
        os.dup2(file, place)
        os.close(file)
    for other in (connection, *children.values()):
        other.close()
    listening.close()
    raise Job(json.loads(payload))


def _reap(children: dict[int, socket.socket]) -> None:
    for child in list(children):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            with children.pop(child) as connection:
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def run(asked: dict[str, Any], path: list[str]) -> None:
    """Run what is asked in this process, as ``python WORDS`` would."""
    import numpy as np
    import torch

    faulthandler.enable()  # where a thread of C++ ends the process, its log names all threads
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    np.random.seed()  # a process of its own would have another
    words = asked["words"]
    sys.orig_argv = [sys.executable, *words]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path[:] = [str(Path.cwd()), *path]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[:] = [str(Path(words[0]).resolve().parent), *path]
            main = types.ModuleType("__main__")
            vars(main).update(__file__=words[0], __builtins__=builtins)
            sys.modules["__main__"] = main
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(main))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as Python itself, but without this module's frame
        behind = error.__traceback__
        sys.excepthook(type(error), error, behind and behind.tb_next)
        sys.exit(1)


def main() -> None:
    """Load, serve, and in a child run what was asked."""
    for name in (*_LOADED, *sys.argv[2:]):
        if name == "torchvision":
            torchvision()
        __import__(name)
    path = sys.path[1:]
    gc.freeze()  # no child looks for garbage in what all share
    try:
        serve(sys.argv[1])
    except Job as job:
        asked = job.asked
    else:
        # Also where nobody is left to do it.
        shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
        return
    run(asked, path)


if __name__ == "__main__":
    main()
