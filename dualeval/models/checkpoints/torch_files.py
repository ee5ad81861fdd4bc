"""Files of ``torch.save``: where their tensors lie in the zip file, and what else is read of them.

Code runs only where it is trusted.
"""

from __future__ import annotations

import pickle
import struct
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals
from torch.utils._pytree import tree_map_only

from dualeval.data.contents import names_in_zip
from dualeval.errors import UsageError
from dualeval.models.checkpoints.finding import ArrayInFile, NamespaceInFile, PassedOver, choose
from dualeval.models.checkpoints.late import FilePart, LateTensor, StampedFile, ZipRecord
from dualeval.torch_errors import TorchError
from dualeval.user_code.importing import importable

_LOCAL_HEADER = struct.Struct("<26xHH")
_BYTE_ORDER = "byteorder"  # the name of a record behind the folder's
_PICKLE = "data.pkl"  # likewise: small, and read before any tensor
SCRIPT = "a TorchScript archive"
EXPORTED = "a torch.export program"


class NotInPlace(Exception):
    """A tensor's values are not plainly in the file: it is sparse or quantized, or in a foreign layout."""


def records_of(stream: BinaryIO) -> dict[int, ZipRecord]:
    """The records of a zip stream, by the byte at which they begin."""
    records = {}
    try:
        with zipfile.ZipFile(stream) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    return {}
                inside = info.filename.rpartition("/")[2]
                if inside == _BYTE_ORDER and archive.read(info) != sys.byteorder.encode():
                    return {}
                if inside == _PICKLE and info.CRC:
                    archive.read(info)  # torch does not compare its CRC32
                stream.seek(info.header_offset)
                name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
                begin = info.header_offset + _LOCAL_HEADER.size + name + extra
                records[begin] = ZipRecord(name=info.filename, begin=begin, size=info.file_size, crc=info.CRC)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        return {}
    return records


def check_records(path: Path) -> None:
    """Compare the records of a zip file that torch then reads by itself, without a look at their CRC32."""
    with zipfile.ZipFile(path) as archive:
        archive.filelist = [entry for entry in archive.filelist if entry.CRC]  # 0: written without
        if (name := archive.testzip()) is not None:
            raise ValueError(f"its record {name} does not fit its CRC32. Fetch or save it again.")


def part_of(value: Tensor, file: StampedFile, records: Mapping[int, ZipRecord], begin: int = 0) -> FilePart:
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
    # The first part is a folder that is named like the file.
    names = {name.partition("/")[2] or name for name in names_in_zip(path)}
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return EXPORTED  # the second of torch before 2.8
    # What torch.save writes has neither code nor constants.
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return SCRIPT
    return None


class TorchFile:
    """A file of ``torch.save``."""

    def __init__(self, path: Path, *, trust: bool = False) -> None:
        program = program_in(path)
        if program is not None:
            raise UsageError(
                f"{path} is {program}: a model with its code, and no weights. --model {path} takes it, with "
                "--trust-checkpoint and without --weights."
            )
        self._path = path
        self._trust = trust
        self._file = StampedFile.of(path)
        with self._file.opened() as descriptor, open(descriptor, "rb", closefd=False) as opened:
            self._begins_as_zip = opened.read(2) == b"PK"
            # Only the zip format of torch >= 1.6 has tensors in their own places.
            self._is_zip = self._begins_as_zip and zipfile.is_zipfile(opened)
            self._records = records_of(opened) if self._is_zip else {}
        # What the file holds; of the tensors only shape and dtype where the format allows it.
        self.tree = self._without_values() if self._records else None
        if self.tree is None:
            self._records, self.tree = {}, self._with_values()

    def late_state_dict(self, key: str, tensors: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """A state_dict of the tree, with tensors that are read when they are used."""
        if self._records:
            try:
                return _like(tensors, {name: self._late(value) for name, value in tensors.items()})
            except (NotInPlace, RecursionError):
                self._records, self.tree = {}, self._with_values()
                _, tensors = choose(self._path, self.tree, key or None)
        return _like(tensors, tensors)

    def _late(self, value: Any) -> Any:
        if not isinstance(value, Tensor):  # the extra state of a module, of whatever type
            return tree_map_only(Tensor, lambda tensor: self._late(tensor).read(), value)
        return LateTensor(part_of(value, self._file, self._records))

    def _without_values(self) -> object:
        """The tree with tensors that have no values; None where torch cannot make it."""
        try:
            return self._load("meta", weights_only=True)
        except Exception:  # noqa: BLE001 - it is read with values, and then it is said what is wrong
            return None

    def _with_values(self) -> object:
        try:
            if self._is_zip:
                check_records(self._path)
            return self._load("cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if self._trust:
                return self._with_code()
            detail = _torch_reason(str(error))
            raise UsageError(
                f"{self._path} cannot be read as plain tensors ({detail}). It is damaged, or holds pickled "
                "Python objects, which could run code. Save it again with torch.save(model.state_dict(), "
                "PATH) or as safetensors. If you trust whoever wrote it, --trust-checkpoint reads it as it "
                "is, and runs its code."
            ) from error
        except Exception as error:  # a damaged stream raises whatever its bytes happen to ask for
            raise self._damaged(error) from error

    def _with_code(self) -> object:
        importable(Path.cwd())
        try:
            return _modules_as_state_dicts(self._load("cpu", weights_only=False))
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"{self._path} holds objects of classes that cannot be imported here: {error}. Start in the "
                "folder of their module, or save it again with torch.save(model.state_dict(), PATH)."
            ) from error
        except Exception as error:  # of the file's own code any
            raise self._damaged(error) from error

    def _load(self, device: str, *, weights_only: bool) -> object:
        with warnings.catch_warnings(), _admitting(), self._file.opened():
            warnings.simplefilter("ignore")  # what torch guesses of a file that it then refuses
            return torch.load(self._path, map_location=device, weights_only=weights_only)

    def _damaged(self, error: Exception) -> UsageError:
        if self._begins_as_zip and not self._is_zip:
            return UsageError(
                f"{self._path} is cut short: it begins as a file of torch.save, and its end is missing "
                f"({self._file.size:,} bytes are there). Fetch or save it again."
            )
        message = str(error) or type(error).__name__
        return UsageError(f"{self._path} is not a readable torch file: {message.splitlines()[0]}")


def _torch_reason(message: str) -> str:
    """What torch refuses, without its advice to switch the protection off."""
    name = TorchError.REFUSED_CLASS.search(message)
    if name is not None:
        return f"Unsupported global: GLOBAL {name[1]}"
    detail = TorchError.REFUSED_PICKLE.search(message)
    return (detail[1] if detail else message).splitlines()[0].split(". ")[0]


def _like(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Values by name, with the versions of modules by which some of them know and convert an older layout."""
    if values is tensors and isinstance(tensors, OrderedDict):
        return tensors
    made = OrderedDict(values)
    if hasattr(tensors, "_metadata"):
        made._metadata = tensors._metadata  # type: ignore[attr-defined]
    return made


def _modules_as_state_dicts(content: Any) -> Any:
    """The content with each module replaced by its state_dict."""
    if isinstance(content, nn.Module):
        return content.state_dict()
    if isinstance(content, Mapping):
        # The same object where nothing changes: its class, and the versions beside its tensors.
        made = {name: _modules_as_state_dicts(value) for name, value in content.items()}
        return content if all(made[name] is content[name] for name in made) else made
    if isinstance(content, (list, tuple)):
        items = [_modules_as_state_dicts(value) for value in content]
        return content if all(one is other for one, other in zip(items, content, strict=True)) else items
    return content


# -- what usual checkpoints hold beside tensors, and what takes its place when a file is read ---------------


class _AsDict:
    """Makes a plain dict, the only mapping beside OrderedDict and Counter that torch fills from a file."""

    def __new__(cls, *_: object) -> dict[Any, Any]:  # type: ignore[misc]
        return {}


class _AsList:
    """Makes a plain list, the only sequence that torch fills from a file."""

    def __new__(cls, *_: object) -> list[Any]:  # type: ignore[misc]
        return []


# What usual checkpoints hold beside tensors: the names in the file, and what is made of each. None of these
# types is used itself. So no constructor and no __setstate__ of theirs sees what a file says, and it does not
# matter what they would do with it: numpy's believe the offsets in a dtype, and follow them. What a file puts
# into one of them is read by the same rules, so nothing else can hide there.
_ADMITTED: dict[str, Callable[..., object]] = {
    **dict.fromkeys(("argparse.Namespace", "types.SimpleNamespace"), NamespaceInFile),
    **{
        f"{module}.{name}": PassedOver
        for module in ("pathlib", "pathlib._local")  # the latter in files of Python 3.13
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    # Scalars and arrays; numpy 1 and numpy 2.
    **dict.fromkeys(("numpy.dtype", "numpy.ndarray"), PassedOver),
    **{
        f"{module}.multiarray.{name}": made
        for module in ("numpy.core", "numpy._core")
        for name, made in (("scalar", PassedOver), ("_reconstruct", ArrayInFile))
    },
    **{f"datetime.{name}": PassedOver for name in ("datetime", "date", "time", "timedelta", "timezone")},
    # As values, and as what a defaultdict makes.
    **{
        f"builtins.{name}": PassedOver
        for name in ("bool", "int", "float", "str", "list", "tuple", "dict", "frozenset", "range", "slice")
    },
    "collections.defaultdict": _AsDict,
    "collections.deque": _AsList,
}


@contextmanager
def _admitting() -> Iterator[None]:
    """Let torch take what is admitted; what a program has admitted itself stays, but for the same names.

    A program's numpy.dtype and the one here do not go together.
    """
    before: list[Any] = get_safe_globals()
    others = [entry for entry in before if _name_in_files(entry) not in _ADMITTED]
    clear_safe_globals()
    add_safe_globals([*others, *((made, name) for name, made in _ADMITTED.items())])
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _name_in_files(entry: Any) -> str:
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
