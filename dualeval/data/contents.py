"""What a file is by its first bytes, where it is not what it was given for: a failed download, mostly."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from dualeval.messages import listed

HEAD = 512
_SHOWN = 60
_SAFETENSORS = re.compile(rb".{8}\s*\{", re.DOTALL)
_LONGEST_HEADER = 100_000_000  # safetensors itself refuses a longer one
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_OF_PYTORCH = ("/data.pkl", "/archive_format", "serialized_exported_program.json")
_FETCH, _UNPACK = "Fetch it again", "Unpack it first"
_SAVE = "This form is not read: PyTorch's weights are saved with torch.save(model.state_dict(), PATH)"
_PAGE = rb"(?i)(?!.*<svg)\s*(<!doctype html|<html|<head|<\?xml|<error)"  # a drawing is XML, too
_SENT = "is a web page, and begins with {!r}: the server has sent an error or a login page for the file"
# How a file begins, what it is, and what to do.
_SIGNATURES = (
    (rb"\Z", "is empty (0 bytes): its download or copy has failed", _FETCH),
    (_PAGE, _SENT, f"{_FETCH} from the right address"),
    (rb"version https://git-lfs", "is a pointer of Git LFS, and not the file itself", "Type: git lfs pull"),
    (rb"\x1f\x8b", "is a gzip archive", _UNPACK),
    (rb"BZh", "is a bzip2 archive", _UNPACK),
    (rb"\xfd7zXZ", "is a xz archive", _UNPACK),
    (rb"7z\xbc\xaf", "is a 7z archive", _UNPACK),
    (rb"Rar!", "is a rar archive", _UNPACK),
    (rb".{257}ustar", "is a tar archive", f"{_UNPACK}, and give the file in it"),
    (rb"\x89HDF", "is an HDF5 file, as Keras and h5py write it", _SAVE),
    (rb"\x08[\x03-\x1f][\x12\x1a\x22:B]", "is an ONNX model", _SAVE),
    (rb"\x08\x01\x12", "is a SavedModel of TensorFlow", _SAVE),
    (rb"GGUF", "is a GGUF file of llama.cpp", _SAVE),
)


def what_it_is(path: Path) -> str | None:
    """What a file is that cannot be what it was given for, and what to do."""
    with path.open("rb") as file:
        return what_it_holds(file.read(HEAD))


def what_it_holds(head: bytes) -> str | None:
    """As ``what_it_is``, of a file's first ``HEAD`` bytes."""
    for begin, what, mend in _SIGNATURES:
        if re.match(begin, head, re.DOTALL):
            return f"{what.format(_first_line(head))}. {mend}"
    return None


def _first_line(head: bytes) -> str:
    return head.strip().split(b"\n")[0].decode("utf-8", "backslashreplace")[:_SHOWN]


def what_weights_are(path: Path) -> str | None:
    """As ``what_it_is``, of a file that should hold weights, by its suffix safetensors or torch's own."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    is_safetensors = path.suffix == ".safetensors"
    # Its first bytes are the header's length, and may be those of any other format: 128 is pickle's.
    header = int.from_bytes(head[:8], "little")
    if is_safetensors and _SAFETENSORS.match(head) and header <= _LONGEST_HEADER:
        return None
    content = what_it_holds(head)
    if content is not None:
        return content
    if head.startswith((_ZIP, _PICKLE)):
        if is_safetensors:
            return f"was written by torch.save. Rename it to {path.with_suffix('.pt').name}"
        names = names_in_zip(path)
        if not names or any(name.endswith(_OF_PYTORCH) for name in names):
            return None
        if all(name.endswith(".npy") for name in names):
            mend = "Save tensors: torch.save({name: torch.from_numpy(array), ...}, PATH)"
            return f"is a file of arrays, as numpy.savez writes it. {mend}"
        return f"is a zip archive of {listed(names, 3)}. {_UNPACK}, and give the file in it"
    if not is_safetensors and _SAFETENSORS.match(head):
        return f"is a safetensors file. Rename it to {path.with_suffix('.safetensors').name}"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        return f"is a text file, and begins with {_first_line(head)!r}. Give the file of the weights"
    return None


def names_in_zip(path: Path) -> list[str]:
    """The names in a zip file; none in a damaged one, or in another file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return []
