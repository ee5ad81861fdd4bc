"""Starts of Python as forks of a server (fork_server.py), for tests that are not about the start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# Read when a library is loaded, which the server has done: with one of these a start is a real one.
_READ_EARLY = re.compile(
    r"(OMP|MKL|KMP|OPENBLAS|ATEN|TORCH|DNNL|ONEDNN|CUDA|NVIDIA|GLIBC|MALLOC|LD|PYTHON|HOME|PATH|HF|TMPDIR|ARROW)"
)
_LIMIT_S = 120.0
# How long the other ranks get when one has failed, as torchrun's.
_GRACE_S = 30.0


@dataclass(kw_only=True)
class _Rank:
    connection: socket.socket
    pid: int
    code: int | None = None


@dataclass
class ForkServer:
    """The server, started with the first fork; it loads ``modules`` besides what all tests need."""

    modules: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(
        self, words: Sequence[str], variables: Mapping[str, str], cwd: Path | None, files: Any
    ) -> _Rank:
        """Fork one process."""
        with self.lock:
            if self.process is None:
                self._start(variables)
        assert self.folder is not None
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_LIMIT_S)
        connection.connect(f"{self.folder.name}/socket")
        asked = {"words": [*words], "variables": dict(variables), "cwd": str(cwd or Path.cwd())}
        payload = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(connection, [payload], [file.fileno() for file in files])
        connection.sendall(payload[sent:])
        return _Rank(connection=connection, pid=int(_line(connection)))

    def _start(self, variables: Mapping[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="forks-")
        path = f"{self.folder.name}/socket"
        # Both start threads when they are loaded.
        early = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vehicles.fork_server", path, *self.modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                name: value
                for name, value in {**variables, **early}.items()
                if name != "DUALEVAL_TEST_LAUNCH"
            },
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"listens\n", "the fork server did not start"

    def stop(self) -> None:
        """End the server."""
        if self.process is not None and self.folder is not None:
            self.process.communicate(timeout=_LIMIT_S)
            self.folder.cleanup()


def _line(connection: socket.socket) -> str:
    found = b""
    while not found.endswith(b"\n"):
        part = connection.recv(64)
        if not part:
            raise RuntimeError("the fork server is gone")
        found += part
    return found.decode()


def ranks_of(command: Sequence[str | Path], variables: Mapping[str, str]) -> tuple[int, list[str]] | None:
    """How many ranks a command starts, and what follows ``python``; None where it is to start as it is."""
    if any(_READ_EARLY.match(name) for name in variables if name != "OMP_NUM_THREADS"):
        return None
    words, size = list(map(str, command)), 0
    if len(words) > 4 and words[0] == str(BIN / "torchrun") and words[1] == "--standalone":
        size, words = int(words[2].partition("=")[2]), words[4:]
    if words[0] in (str(BIN / "dualeval"), "dualeval"):
        words = [sys.executable, "-m", "dualeval", *words[1:]]
    if words[0] != sys.executable or len(words) < 2:
        return None
    if words[1] == "-m" and words[2] != "dualeval":
        return None
    if words[1] != "-m" and not words[1].endswith(".py"):
        return None
    return size, words[1:]


def run(
    server: ForkServer,
    size: int,
    words: Sequence[str],
    variables: Mapping[str, str],
    cwd: Path | None,
    timeout: float,
) -> tuple[int | None, str, str]:
    """Run ``python WORDS`` in one process (``size`` 0), or in as many ranks as torchrun would start."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        store, ranks = None, []
        environs = [dict(variables)]
        if size:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            environs = [{**variables, **_of_torchrun(rank, size, store.port)} for rank in range(size)]
        try:
            ranks = [server.start(words, environ, cwd, (out, err)) for environ in environs]
            code = _wait(ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                if rank.code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rank.pid, signal.SIGKILL)
                    rank.connection.settimeout(_LIMIT_S)
                    _line(rank.connection)
                rank.connection.close()
            del store
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return code, texts[0], texts[1]


def _of_torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    text = (
        f"OMP_NUM_THREADS=1 RANK={rank} LOCAL_RANK={rank} GROUP_RANK=0 ROLE_RANK={rank} ROLE_NAME=default "
        f"WORLD_SIZE={size} LOCAL_WORLD_SIZE={size} GROUP_WORLD_SIZE=1 ROLE_WORLD_SIZE={size} "
        f"MASTER_ADDR=localhost MASTER_PORT={port} TORCHELASTIC_USE_AGENT_STORE=True "
        "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 "
        f"TORCHELASTIC_RUN_ID=forks-{os.getpid()}-{port}"
    )
    return dict(word.split("=") for word in text.split())


def _wait(ranks: Sequence[_Rank], deadline: float) -> int | None:
    """Wait for all; when one has failed the others are ended, as torchrun does. Its exit code is then 1."""
    failed = False
    while left := [rank for rank in ranks if rank.code is None]:
        ready, _, _ = select.select(
            [rank.connection for rank in left], [], [], max(0, deadline - time.monotonic())
        )
        if not ready:
            return None
        for rank in left:
            if rank.connection in ready:
                rank.code = int(_line(rank.connection))
        if not failed and any(rank.code for rank in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
            for rank in left:
                if rank.code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank.pid, signal.SIGTERM)
    if len(ranks) == 1:
        return ranks[0].code
    return int(failed)
