"""What was found in a large file, kept in the user's cache for the next run; it may be deleted."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.data.image_files import digest_of_file

_FORM = 3


class IndexCache:
    """Arrays and values of JSON for a file and a purpose, while its size, time and ends are the same."""

    def __init__(self, file: Path, purpose: str) -> None:
        status, file = file.stat(), file.absolute()
        self._key = {
            "form": _FORM,
            "file": os.fsencode(file).hex(),
            "purpose": purpose,
            "size": status.st_size,
            "time": status.st_mtime_ns,
            "ends": digest_of_file(file, whole=False).hex(),
        }
        # Size and time of change, in ns.
        self.state = status.st_size, status.st_mtime_ns
        # Named by the file alone: of one that has changed nothing is left behind.
        name = hashlib.sha256(os.fsencode(file) + b"\0" + purpose.encode()).hexdigest()
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self._path = Path(base).expanduser() / "dualeval" / "shards" / f"{name[:40]}.index"

    @property
    def ends(self) -> str:
        """A hash of the file's size, and of its first and last 4 KiB."""
        return str(self._key["ends"])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let one process of a machine look at a time; where no lock can be had, all of them."""
        with ExitStack() as stack:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self._path.with_suffix(".lock").open("wb"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def load(self) -> tuple[Mapping[str, npt.NDArray[Any]], Any] | None:
        """What was kept; None where there is none, or it is damaged or of another state of the file."""
        try:
            with self._path.open("rb") as kept:
                digest, head, body = kept.readline(), kept.readline(), kept.read()
        except OSError:
            return None
        # Over names and labels as over arrays: what is damaged may be a label that reads well.
        if digest != _digest(head, body) or (values := json.loads(head))["key"] != self._key:
            return None
        arrays, start = {}, 0
        for name, kind, count in values["arrays"]:
            arrays[name] = np.frombuffer(body, np.dtype(kind), count, start)
            start += arrays[name].nbytes
        return arrays, values["values"]

    def keep(self, arrays: Mapping[str, npt.NDArray[Any]], values: Any) -> None:
        """Keep it; where that cannot be written the next run finds it again."""
        body = b"".join(array.tobytes() for array in arrays.values())
        values = {
            "key": self._key,
            "arrays": [[name, array.dtype.str, len(array)] for name, array in arrays.items()],
            "values": values,
        }
        head = json.dumps(values).encode() + b"\n"
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Not waited for until it is on the disk: one that is torn has another sum.
            partial = self._path.with_suffix(f".{secrets.token_hex(4)}.partial")
            partial.write_bytes(_digest(head, body) + head + body)
            partial.replace(self._path)


def _digest(head: bytes, body: bytes) -> bytes:
    """The first line of a file."""
    digest = hashlib.sha256(head)
    digest.update(body)
    return digest.hexdigest().encode() + b"\n"
