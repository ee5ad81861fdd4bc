"""Files that are not what they are given for are named."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from tests.report.test_messages import said_of


def zipped(*names: str) -> bytes:
    """A zip file with files of these names."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return made.getvalue()


PAGE = b"<!DOCTYPE html>\n<html><title>404</title>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
FILES: dict[str, tuple[bytes, str]] = {
    "empty.pt": (b"", "weights file empty.pt is empty (0 bytes): its download or copy has failed. Fetch it"),
    "empty.safetensors": (b"", "empty.safetensors is empty (0 bytes)"),
    "page.pt": (PAGE, "page.pt is a web page, and begins with '<!DOCTYPE html>': the server has sent"),
    "page.safetensors": (PAGE, "page.safetensors is a web page"),
    "denied.pt": (b"<?xml version='1.0'?><Error>AccessDenied", "denied.pt is a web page"),
    "pointer.pt": (
        POINTER,
        "pointer.pt is a pointer of Git LFS, and not the file itself. Type: git lfs pull",
    ),
    "words.pt": (b'{"message": "Not Found"}', 'words.pt is a text file, and begins with \'{"message": "Not'),
    "packed.pt": (b"\x1f\x8b\x08\x00", "packed.pt is a gzip archive. Unpack it first"),
    "tar.pt": (
        b"model.pt".ljust(257, b"\0") + b"ustar",
        "is a tar archive. Unpack it first, and give the file",
    ),
    "h.h5": (b"\x89HDF\r\n\x1a\n", "h.h5 is an HDF5 file, as Keras and h5py write it. This form is not read"),
    "x.onnx": (b"\x08\x07\x12\x07pytorch\x1a\x052.1.0", "x.onnx is an ONNX model. This form is not read"),
    "saved_model.pb": (b"\x08\x01\x12\xf1\x0a", "is a SavedModel of TensorFlow. This form is not read"),
    "q.gguf": (b"GGUF\x03\0\0\0", "q.gguf is a GGUF file of llama.cpp"),
    "a.npz": (zipped("0.weight.npy", "0.bias.npy"), "a.npz is a file of arrays, as numpy.savez writes it"),
    "z.zip": (zipped("model.pth", "notes.txt"), "is a zip archive of model.pth, notes.txt. Unpack it first"),
    "other.pt": (b"\x02\0\0\0\0\0\0\0{}", "is a safetensors file. Rename it to other.safetensors"),
    "other.safetensors": (b"PK\x03\x04", "was written by torch.save. Rename it to other.pt"),
    "short.pt": (b"PK\x03\x04" + bytes(60), "short.pt is cut short"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_weights_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, words = FILES[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    message = said_of("fashion-cnn", weights=name, data=None)
    assert words in message
    assert "pickle" not in message.lower()
