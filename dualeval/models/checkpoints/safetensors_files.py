"""Reading where the tensors of a .safetensors file lie."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from dualeval.errors import UsageError
from dualeval.models.checkpoints.file_parts import FilePart, StampedFile, contiguous_strides
from dualeval.models.checkpoints.late import LateTensor

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def read_safetensors(path: Path) -> OrderedDict[str, LateTensor]:
    """The tensors of a file, by name; their values are not read."""
    from safetensors import SafetensorError, safe_open

    file = StampedFile.of(path)
    try:
        # The library checks the header: that it is whole, and that the tensors fill the file without gaps.
        safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}") from error
    with file.opened() as descriptor:
        length = torch.empty(1, dtype=torch.int64)
        file.read_into(descriptor, 0, length)
        header = torch.empty(int(length), dtype=torch.uint8)
        file.read_into(descriptor, 8, header)
    entries = json.loads(header.numpy().tobytes())
    entries.pop("__metadata__", None)
    first = 8 + len(header)
    # In the order in which they lie in the file, and are read.
    ordered = sorted(entries.items(), key=lambda entry: entry[1]["data_offsets"])
    return OrderedDict((name, _late(file, first, name, entry)) for name, entry in ordered)


def _late(file: StampedFile, first: int, name: str, entry: dict[str, Any]) -> LateTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise UsageError(
            f"{file.path} holds {name} as {entry['dtype']}, which is not read. Save it as floats."
        )
    shape, begin = tuple(entry["shape"]), first + entry["data_offsets"][0]
    strides = contiguous_strides(shape)
    return LateTensor(FilePart(file=file, offset=begin, shape=shape, strides=strides, dtype=dtype))
