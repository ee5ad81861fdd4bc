"""What a file is by its first bytes, where it is not what it was given for: a failed download, mostly."""

from __future__ import annotations

import re
from pathlib import Path

HEAD = 512
_SHOWN = 60
_PAGE = re.compile(rb"\s*(<!doctype html|<html|<head|<\?xml|<error)", re.IGNORECASE)
_POINTER = b"version https://git-lfs"
_SAFETENSORS = re.compile(rb".{8}\s*\{", re.DOTALL)
_LONGEST_HEADER = 100_000_000  # safetensors itself refuses a longer one
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_ARCHIVES = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7z", b"Rar!": "rar"}


def what_it_is(path: Path) -> str | None:
    """What a file is that cannot be what it was given for, and what to do."""
    with path.open("rb") as file:
        return what_it_holds(file.read(HEAD))


def what_it_holds(head: bytes) -> str | None:
    """As ``what_it_is``, of a file's first ``HEAD`` bytes."""
    if not head:
        return "is empty (0 bytes): its download or copy has failed. Fetch it again"
    first = head.strip().split(b"\n")[0].decode("utf-8", "backslashreplace")[:_SHOWN]
    # A drawing is XML, too.
    if _PAGE.match(head) and b"<svg" not in head.lower():
        return (
            f"is a web page, and begins with {first!r}: the server has sent an error or a login page in "
            "place of the file. Fetch it again from the right address"
        )
    if head.startswith(_POINTER):
        return "is a pointer of Git LFS, and not the file itself. Type: git lfs pull"
    for magic, name in _ARCHIVES.items():
        if head.startswith(magic):
            return f"is a {name} archive. Unpack it first"
    return None


def what_weights_are(path: Path) -> str | None:
    """As ``what_it_is``, of a file that should hold weights, by its suffix safetensors or torch's own."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    is_safetensors = path.suffix == ".safetensors"
    # Its first bytes are the header's length, and may be those of any other format: 128 is pickle's.
    header = int.from_bytes(head[:8], "little")
    if is_safetensors and _SAFETENSORS.match(head) and header <= _LONGEST_HEADER:
        return None
    found = what_it_holds(head)
    if found is not None:
        return found
    if is_safetensors and head.startswith((_ZIP, _PICKLE)):
        return f"was written by torch.save. Rename it to {path.with_suffix('.pt').name}"
    if not is_safetensors and _SAFETENSORS.match(head) and not head.startswith((_ZIP, _PICKLE)):
        return f"is a safetensors file. Rename it to {path.with_suffix('.safetensors').name}"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        first = head.strip().split(b"\n")[0].decode()[:_SHOWN]
        return f"is a text file, and begins with {first!r}. Give the file of the weights"
    return None
