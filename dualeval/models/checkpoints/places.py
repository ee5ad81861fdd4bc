"""What lies where in a zip file of torch: the tensors of ``torch.save``, and whether it is a program."""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from dualeval.models.checkpoints.file_parts import FilePart, Record, StampedFile

_LOCAL_HEADER = struct.Struct("<26xHH")
_BYTE_ORDER = "byteorder"  # the name of a record behind the folder's
_PICKLE = "data.pkl"  # likewise: small, and read before any tensor
SCRIPT = "a TorchScript archive"
EXPORTED = "a torch.export program"


class NotInPlace(Exception):
    """A tensor's values are not plainly in the file: it is sparse or quantized, or in a foreign layout."""


def records_of(stream: BinaryIO) -> dict[int, Record]:
    """The records of a zip stream, by the byte at which they begin."""
    found = {}
    try:
        with zipfile.ZipFile(stream) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    return {}
                inside = entry.filename.rpartition("/")[2]
                if inside == _BYTE_ORDER and archive.read(entry) != sys.byteorder.encode():
                    return {}
                if inside == _PICKLE and entry.CRC:
                    archive.read(entry)  # torch does not compare its CRC32
                stream.seek(entry.header_offset)
                name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
                begin = entry.header_offset + _LOCAL_HEADER.size + name + extra
                found[begin] = Record(name=entry.filename, begin=begin, size=entry.file_size, crc=entry.CRC)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        return {}
    return found


def check_records(path: Path) -> None:
    """Compare the records of a zip file that torch then reads by itself, without a look at their CRC32."""
    with zipfile.ZipFile(path) as archive:
        archive.filelist = [entry for entry in archive.filelist if entry.CRC]  # 0: written without
        if (name := archive.testzip()) is not None:
            raise ValueError(f"its record {name} does not fit its CRC32. Fetch or save it again.")


def part_of(value: Tensor, file: StampedFile, records: Mapping[int, Record], begin: int = 0) -> FilePart:
    """Where the values of a tensor lie that was loaded to the device "meta"."""
    is_plain = value.layout == torch.strided and not (value.is_quantized or value.is_conj() or value.is_neg())
    offset = getattr(value.untyped_storage(), "_checkpoint_offset", None) if is_plain else None
    if not isinstance(offset, int) or offset not in records:
        raise NotInPlace
    first = int(value.storage_offset()) * value.dtype.itemsize
    record = records[offset]
    part = FilePart(
        file=file,
        offset=begin + record.begin + first,
        shape=tuple(value.shape),
        strides=tuple(value.stride()),
        dtype=value.dtype,
        record=replace(record, begin=begin + record.begin),
    )
    if first + part.nbytes > record.size:
        raise NotInPlace
    return part


def program_in(path: Path) -> str | None:
    """What kind of program a file is; None for one that is none."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            # The first part is a folder that is named like the file.
            names = {name.partition("/")[2] or name for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return EXPORTED  # the second of torch before 2.8
    # What torch.save writes has neither code nor constants.
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return SCRIPT
    return None
