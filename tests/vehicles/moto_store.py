"""A store of objects on this machine by moto, which somebody else wrote."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.vehicles.requirements import MOTO_PYTHON


@contextmanager
def moto_store(folder: Path) -> Iterator[str]:
    """Put the files below a folder into a bucket "bucket"; the address of the store."""
    with subprocess.Popen(
        [MOTO_PYTHON, Path(__file__).with_name("moto_server.py")],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            _put(f"{endpoint}/bucket", b"")
            for path in (each for each in folder.rglob("*") if each.is_file()):
                _put(f"{endpoint}/bucket/{path.relative_to(folder).as_posix()}", path.read_bytes())
            yield endpoint
        finally:
            server.kill()


def _put(url: str, content: bytes) -> None:
    headers = {"Authorization": "AWS test:test", "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, content, method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200
