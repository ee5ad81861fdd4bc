"""Files that are whole under their name, or not there: written beside it, synced, renamed."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dualeval.errors import UsageError
from dualeval.urls import ON_A_DISK, refuse_url, url_of

_ABANDONED_AFTER_S = 60.0


@contextmanager
def whole_file(path: Path, partial: Path | None = None) -> Iterator[Path]:
    """Give the file to write in the place of another, and put it there when the block ends.

    Where the block raises, that file is removed. Another name than its own may be given for it.
    """
    # A name of its own: several processes may write the file, and then the last one's is there.
    beside = partial or path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield beside
        put_in_place(beside, path)
    except BaseException:
        # On a full disk its space is needed. What refuses to write may refuse this as well; the first error
        # is the one to tell.
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    if partial is None:
        with suppress(OSError):
            _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    """Remove what killed writers of a file, which was written just now, have left beside it."""
    now = path.stat().st_mtime  # the disk's clock
    name = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    for file in path.parent.glob("*.partial"):
        # Another that is alive, as one of two watchers, writes for a moment.
        if name.fullmatch(file.name) and now - file.stat().st_mtime > _ABANDONED_AFTER_S:
            file.unlink()


def put_in_place(partial: Path, path: Path) -> None:
    """Give a file that is written its name, and wait until both are on the disk."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text as a ``whole_file``."""
    # A user's text may hold what UTF-8 has no bytes for. As \\udcff JSON gives it back as it was.
    with whole_file(path) as partial:
        partial.write_text(text, "utf-8", errors="backslashreplace")


def partial_of(path: Path) -> Path:
    """Where a file of the journal is written until it is whole."""
    return path.with_name(path.name + ".partial")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where its file system can say so."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems sync files, but no folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def check_path(path: Path) -> None:
    """Check that a folder can hold a run."""
    refuse_url("--out", url_of(path) or "", ON_A_DISK)
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            f"the output folder's name, {str(path)!a}, is not UTF-8: it could not be written into "
            f"result.json. Give another --out."
        ) from None
    with writable(path):  # its name may be too long
        is_file = path.is_file()
    if is_file:
        raise UsageError(f"{path} is a file, and a run needs a folder. Give another --out.")


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write in a folder into a message."""
    try:
        yield
    except OSError as error:
        # The target of a failed rename.
        named = f"{Path(error.filename2).name}: " if error.filename2 else ""
        raise UsageError(
            f"the output folder {path} cannot be written on {socket.gethostname()} "
            f"({named}{error.strerror or error}). Give a folder of your own with --out."
        ) from error
