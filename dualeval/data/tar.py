"""Tar files: where in them each member lies; their headers alone are read.

Where the standard library's tarfile takes 40 us a member this takes 10, and it refuses what tarfile passes
over: a file that was cut off between two members, or members behind the end mark.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from dualeval.data.contents import what_it_holds
from dualeval.data.image_paths import EXTENSIONS, is_hidden
from dualeval.data.set_names import is_tar_name
from dualeval.data.shards import shards_at
from dualeval.data.stores.path import StorePath
from dualeval.errors import UsageError
from dualeval.urls import command_on

# The parts of a sample that say its class, its text, and more of it.
CLASS, TEXT, JSON = ".cls", ".txt", ".json"
_BLOCK = 512
# Of these it is known whether they are hidden: pictures of a class mostly are in one.
_FOLDERS = 4096
# Read at once: a header, a small member behind it, and the next header.
_AHEAD = 4096
_AHEAD_IN_STORE = 1 << 20
# Read at once of the zeros behind the end mark, mostly less than 10 KiB.
_ZEROS = 2**20
# How a compressed file begins, and what unpacks it, whatever its name.
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz"}
# Types of members: files, and those whose data say more of the next one.
_FILES, _LINKS, _LONG_NAME, _LONG_LINK, _SPARSE = b"0\0007", b"12", b"L", b"K", b"S"
_PAX = b"xXg"
# Devices, folders and pipes: none follow, whatever size they have.
_WITHOUT_DATA = b"3456"
_OF_THE_NEXT = _PAX + _LONG_NAME + _LONG_LINK
_LINKED = "Pack the file itself: tar --dereference --hard-dereference -cf NEW.tar FOLDER"


def _unpack(command: str, path: PurePath) -> str:
    """What makes x.tar of x.tar.gz and of x.tgz; a compressed x.tar is moved away."""
    new = path.with_name(path.name.split(".tar")[0].removesuffix(path.suffix) + ".tar")
    packed, move = (f"{path}.packed", f"mv {path} {path}.packed; ") if new == path else (path, "")
    return f"{move}{command} -c {packed} > {new}"


def tars_at(data: Path) -> list[Path]:
    """The tar files of a value of ``--data``."""
    paths = shards_at(data, is_tar_name, "shards/val-{000..063}.tar")
    plain = {path.name for path in paths if path.suffix == ".tar"}
    # What is told to unpack may stay beside what has come of it.
    paths = [path for path in paths if path.name in plain or not {path.stem, f"{path.stem}.tar"} & plain]
    for path in paths:
        _refuse_compressed(path)
    return paths


def _refuse_compressed(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(_BLOCK)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    for begin, command in _COMPRESSED.items():
        if head.startswith(begin):
            raise UsageError(
                f"{path} is compressed, so that no sample can be read without all before it. Make a .tar of "
                f"it, and give that: {command_on(partial(_unpack, command), path)}"
            )


# A file's name, the offset of its data, and their size.
Member: TypeAlias = tuple[bytes, int, int]


class TarReader:
    """One tar file, whose members are found once and in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closing = ExitStack()
        if isinstance(path, StorePath):
            # Each request takes as long as so many bytes: smaller members are read with the headers.
            self._ahead, self._length = _AHEAD_IN_STORE, path.found.size
            self._pread: Callable[[int, int], bytes] = path.read
            self._closing.callback(path.check)
        else:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._closing.callback(os.close, file)
            if hasattr(os, "posix_fadvise"):
                # Else the kernel reads ahead what lies between two headers, which is nearly all.
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            self._ahead, self._length = _AHEAD, os.fstat(file).st_size
            self._pread = partial(os.pread, file)
        self._start, self._buffer = 0, b""
        # Files that belong to no sample.
        self.passed_over = 0

    def __enter__(self) -> TarReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def read(self, offset: int, count: int) -> bytes:
        """Bytes of the file, fewer at its end."""
        begin = offset - self._start
        if begin < 0 or begin + count > len(self._buffer):
            self._start, begin = offset, 0
            self._buffer = self._pread(max(count, self._ahead), offset)
        return self._buffer[begin : begin + count]

    def members(self) -> Iterator[Member]:
        """Of each file in it the name, without ./ before it, the offset of its data, and their size."""
        length, position, said, everywhere = self._length, 0, dict[bytes, bytes](), dict[bytes, bytes]()
        while True:
            header = self.read(position, _BLOCK)
            if position == 0 and header[257:262] != b"ustar" and (what := what_it_holds(header)):
                raise UsageError(f"{self._path} {what}.")
            if len(header) < _BLOCK:
                raise self._torn(length)
            if header[0] == 0 and not header.strip(b"\0"):
                break
            try:
                kind, data, size = header[156:157], position + _BLOCK, _size(header)
                if said and kind not in _OF_THE_NEXT:
                    size = int(said.get(b"size", size))
                if kind in _WITHOUT_DATA:
                    size = 0
                if size < 0:
                    raise ValueError("a size below 0")
                if data + size > length:
                    raise self._torn(length)
                if kind in _PAX:
                    (everywhere if kind == b"g" else said).update(_records(self.read(data, size)))
            except ValueError as error:
                damage = f"is damaged at byte {position:,}, where the header of a member is expected"
                what = damage if position else "is no tar file"
                raise UsageError(f"{self._path} {what}. Fetch or pack it again.") from error
            position = data + (size + _BLOCK - 1) // _BLOCK * _BLOCK
            if kind == _LONG_NAME:
                said[b"path"] = self.read(data, size).rstrip(b"\0")
            elif kind not in _OF_THE_NEXT:
                said = {**everywhere, **said} if everywhere else said
                name = said.get(b"path") or _name(header)
                if kind == _SPARSE or (said and any(key.startswith(b"GNU.sparse") for key in said)):
                    raise self.refused(name, "is sparse", "Pack it anew, without tar's option --sparse")
                if kind in _LINKS:
                    raise self.refused(name, "is a link", _LINKED)
                if kind in _FILES and not name.endswith(b"/"):
                    yield name.removeprefix(b"./"), data, size
                said = {}
        while position < length and (zeros := self.read(position, _ZEROS)):
            if zeros != bytes(len(zeros)):
                raise UsageError(
                    f"{self._path} has members behind its end mark, as files that were joined with cat have. "
                    "Give the tar files one by one; or unpack it, and pack the files anew: mkdir all; "
                    f"tar --ignore-zeros -xf {self._path} -C all; tar --sort=name -cf all.tar -C all ."
                )
            position += len(zeros)

    def samples(self) -> Iterator[tuple[str, dict[str, Member]]]:
        """Of each sample its key and its parts by suffix, as WebDataset has them: a/b.seg.png is of a/b.

        Files that are hidden or in folders of systems, and those without a suffix, are passed over.
        """
        key, parts = b"", dict[str, Member]()
        for member in self.members():
            name = member[0]
            dot = name.find(b".", base := name.rfind(b"/") + 1)
            if dot <= base or _is_hidden(name[:base]):
                self.passed_over += 1
                continue
            if name[:dot] != key and parts:
                yield os.fsdecode(key), parts
                parts = {}
            key, suffix = name[:dot], os.fsdecode(name[dot:]).lower()
            if suffix in parts:
                raise self.refused(name, "is there twice", "Keep one of them: pack the files anew")
            parts[suffix] = member
        if parts:
            yield os.fsdecode(key), parts

    def pictures(self, key: str, parts: Mapping[str, Member], others: Collection[str] = ()) -> list[str]:
        """The suffixes of a sample's pictures; refuses one with a further dot that was meant as a sample.

        It is beside no other picture, or beside a file of its own name and one of the suffixes ``others``.
        """
        pictures = [suffix for suffix in parts if suffix in EXTENSIONS]
        for suffix in parts:
            if (end := suffix.rfind(".")) <= 0 or suffix[end:] not in EXTENSIONS:
                continue
            stem, form = suffix[:end], suffix[end + 1 :]
            if not pictures or any(stem + each in parts and stem + each != suffix for each in others):
                base = key.rpartition("/")[2]
                raise self.refused(
                    parts[suffix][0],
                    f"is no picture of a sample: it is of the key {key!r}, which ends at the first dot of a "
                    "file's name",
                    "Rename it and what belongs to it before packing, such as "
                    f"{base}{stem.replace('.', '_')}.{form}",
                )
        return pictures

    def text(self, member: Member) -> str:
        """The text of a member, without a byte order mark before it."""
        name, offset, size = member
        try:
            return self.read(offset, size).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.refused(name, "is no text in UTF-8", "Pack it anew") from error

    def object(self, member: Member) -> dict[str, Any]:
        """The object of JSON in a member."""
        name, offset, size = member
        try:
            value = json.loads(self.read(offset, size))
        except (ValueError, RecursionError) as error:
            raise self.refused(name, f"is not JSON: {error}", "Pack it anew") from error
        if not isinstance(value, dict):
            raise self.refused(name, "is no JSON object", 'Expected {"label": 3, ...}')
        return value

    def _torn(self, length: int) -> UsageError:
        return UsageError(
            f"{self._path} is cut off: it ends after {length:,} bytes without tar's end mark. Fetch or pack "
            "it again."
        )

    def one_picture(
        self, sample: str, parts: Mapping[str, Member], pictures: Sequence[str], missing: str
    ) -> Member:
        """The one picture of a sample; ``missing`` names another part that it lacks, "" if it has all."""
        if missing or not pictures:
            raise self.incomplete(sample, parts, missing or f"picture that is read ({' '.join(EXTENSIONS)})")
        if len(pictures) > 1:
            raise self.refused(
                parts[pictures[1]][0], f"is a second picture of {sample!r}", "Keep one of them"
            )
        return parts[pictures[0]]

    def incomplete(self, sample: str, parts: Mapping[str, Member], missing: str) -> UsageError:
        """The error of a sample that lacks a part."""
        return UsageError(
            f"{self._path}: the sample {sample!r} has {' and '.join(parts)} and no {missing}. Add it, or "
            "leave the sample out. The files of a sample lie side by side in a shard, as tar --sort=name "
            "packs them."
        )

    def repeated(self, sample: str) -> UsageError:
        """The error of a key that two samples have."""
        return UsageError(
            f"{self._path} has the key {sample!r}, a file's name up to its first dot, more than once, and "
            "others in between: keep one, so that each sample counts once, or pack the files anew with tar "
            "--sort=name."
        )

    def refused(self, name: bytes, fault: str, mend: str) -> UsageError:
        """The error of a member."""
        return UsageError(f"{self._path}: the member {os.fsdecode(name)!r} {fault}. {mend}.")


@lru_cache(_FOLDERS)
def _is_hidden(folders: bytes) -> bool:
    return any(each.strip(".") and is_hidden(each) for each in os.fsdecode(folders).split("/"))


def _size(header: bytes) -> int:
    """The size in a header; ValueError where its check sum is another one."""
    # The sum of all bytes, where those of the sum itself count as eight blanks. Adler's low half is one more,
    # modulo 65,521; Python's sum would take as long as all else here.
    stored, field = header[148:156], header[124:136]
    total = int(stored.strip(b" \0") or b"0", 8) + sum(stored) - 8 * ord(" ")
    if ((zlib.adler32(header) & 0xFFFF) - 1 - total) % 65521:
        raise ValueError("another sum")
    return int.from_bytes(field[1:], "big") if field[0] & 0x80 else int(field.strip(b" \0") or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    # GNU's own headers have times where those of POSIX have the folder.
    folder = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return folder + b"/" + name if folder else name


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a header of POSIX: each "LENGTH KEY=VALUE" and a line's end."""
    while b" " in data:
        length = int(data[: data.index(b" ")])
        if length <= 0:
            raise ValueError("a record without a length")
        key, _, value = data[data.index(b" ") + 1 : length - 1].partition(b"=")
        yield key, value
        data = data[length:]
