"""Tar shards: read like the folder they were packed from, whoever packed them; and what is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dualeval.tasks
from dualeval.data import image_files, tar_index
from dualeval.data.image_files import FileNames
from dualeval.data.image_sets import tar_shards
from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.packed import PackedImages
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import kind_at
from dualeval.data.tar import TarReader, tars_at
from dualeval.errors import EXIT_USAGE, UsageError
from dualeval.tasks.labels import FolderLabels
from tests.vehicles.packed_pictures import pack, refusal

SMALL = Preprocessing(resize=20, crop=16)
BY_NAME = {"class_map": None, "num_classes": None, "of_weights": None}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where indices are kept, instead of the cache of whoever types the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dualeval" / "shards"


def picture(number: int, size: int = 24) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def samples(first: int, count: int, folder: str = "") -> dict[str, bytes]:
    """Pictures of ten classes, in turn."""
    members = {}
    for number in range(first, first + count):
        members[f"{folder}{number:06}.png"] = picture(number)
        members[f"{folder}{number:06}.cls"] = str(number % 10).encode()
    return members


def opened(
    at: Path,
    *,
    label_key: str | None = None,
    order: str | None = None,
    keep: tuple[str, ...] = (),
    whole_files: bool = False,
) -> PackedImages:
    label = FolderLabels(order=order, **BY_NAME)
    images = tar_shards.open_images(
        at, label=label, label_key=label_key, keep=keep, whole_files=whole_files, cache=None
    )
    images.preprocessing = SMALL
    return images


refused = partial(refusal, opened)


def ids(images: PackedImages) -> list[str]:
    return [images.id(index) for index in range(len(images))]


# -- what is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_packed_folder_is_the_folder(tmp_path: Path, form: int) -> None:
    """Ids, classes, tensors and both fingerprints: a job does not change by how its pictures lie."""
    deep = "a" * 90 + "/" + "b" * (40 if form == tarfile.USTAR_FORMAT else 120)
    names = ["ant/x.png", "ant/y.v2.png", f"bee/{deep}.png", "bee/große Äpfel.png", "cow/z.PNG"]
    members = {}
    for number, name in enumerate(names):
        (tmp_path / "val" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "val" / name).write_bytes(picture(number, 24 + 60 * number))
        key, _, _ = name.rpartition("/")[2].partition(".")
        folder = name.rpartition("/")[0]
        members[f"./{name}"] = picture(number, 24 + 60 * number)
        members[f"./{folder}/{key}.cls"] = name.partition("/")[0].encode() + b"\n"
    del members["./ant/y.v2.png"], members["./ant/y.cls"]
    (tmp_path / "val/ant/y.v2.png").unlink()
    half = dict([*members.items()][:4]), dict([*members.items()][4:])
    for number, part in enumerate(half):
        pack(tmp_path / f"shards/val-{number}.tar", part, form)
    data = opened(tmp_path / "shards/val-{0..1}.tar", order="name")
    folder_data = ImageFolder(tmp_path / "val", SMALL)
    assert sorted(ids(data)) == sorted(folder_data.id(index) for index in range(len(folder_data)))
    order = [ids(data).index(folder_data.id(index)) for index in range(len(data))]
    data = data.select(order)
    assert data.targets.tolist() == folder_data.targets.tolist()
    assert data.labels.names == folder_data.labels.names
    count = len(data)
    for (one, target), (other, same) in zip(
        data.__getitems__(range(count)), folder_data.__getitems__(range(count)), strict=True
    ):
        assert one.equal(other)
        assert target == same
    assert data.fingerprint(count) == folder_data.fingerprint(count)
    assert data.content_fingerprint(range(count)) == folder_data.content_fingerprint(range(count))
    whole = opened(tmp_path / "shards", order="name", whole_files=True).select(order)
    of_folder = ImageFolder(tmp_path / "val", SMALL, whole_files=True)
    assert whole.content_fingerprint(range(count)) == of_folder.content_fingerprint(range(count))
    assert data.picture(1).tobytes() == folder_data.picture(1).tobytes()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_the_standard_library(tmp_path: Path, form: int) -> None:
    names = ["a", "b" * 100, "c" * 60 + "/" + "d" * 99, "e" * 155 + "/f", "ü/ß.png"]
    names += [] if form == tarfile.USTAR_FORMAT else ["g" * 600 + ".cls"]
    members = {name: bytes([number]) * (511 + number) for number, name in enumerate(names)}
    path = pack(tmp_path / "x.tar", members, form)
    with tarfile.open(path) as file:
        wanted = [(os.fsencode(each.name), each.offset_data, each.size) for each in file]
    with TarReader(path) as reader:
        assert [*reader.members()] == wanted

    # No data follow a folder, whatever size it has.
    folder = tarfile.TarInfo("h")
    folder.type, folder.size = tarfile.DIRTYPE, 4096
    path.write_bytes(folder.tobuf(tarfile.USTAR_FORMAT) + path.read_bytes())
    with TarReader(path) as reader:
        assert [*reader.members()] == [(name, offset + 512, size) for name, offset, size in wanted]


def test_a_pattern_a_folder_and_a_file_are_the_same_shards(tmp_path: Path) -> None:
    for number in range(12):
        pack(tmp_path / f"s/val-{number:02}.tar", samples(10 * number, 10))
    (tmp_path / "s/index.json").write_text("{}")
    (tmp_path / "s/.hidden.tar").write_text("of a copy that runs")
    for at in ("s", "s/val-{00..11}.tar"):
        assert [path.name for path in tars_at(tmp_path / at)] == [f"val-{each:02}.tar" for each in range(12)]
        assert kind_at(tmp_path / at).module == "tar_shards"
    data = opened(tmp_path / "s")
    assert ids(data) == [f"{number:06}.png" for number in range(120)]
    assert data.targets.tolist() == [number % 10 for number in range(120)]
    assert str(data.labels) == "indices 0 to 9"
    assert [path.name for path in tars_at(tmp_path / "s/val-{11,03}.tar")] == ["val-11.tar", "val-03.tar"]
    assert [path.name for path in tars_at(tmp_path / "s/val-1{1..0}.tar")] == ["val-11.tar", "val-10.tar"]


def test_labels_lie_in_json_too(tmp_path: Path) -> None:
    rows = [{"label": 2, "wnid": "n2"}, {"label": 0, "wnid": "n0"}, {"label": 1, "wnid": "n1"}]
    members = {}
    for number, row in enumerate(rows):
        members[f"{number}.json"] = json.dumps(row).encode()
        members[f"{number}.webp"] = picture(number)
    path = pack(tmp_path / "x.tar", members)
    assert opened(path).targets.tolist() == [2, 0, 1]
    named = opened(path, label_key="wnid")
    assert named.targets.tolist() == [2, 0, 1]
    assert named.labels.names == {0: "n0", 1: "n1", 2: "n2"}
    assert refused(path, label_key="class").startswith(
        f"--label-key class: {path}: 0.json has the columns label"
    )
    pack(path, {**members, "2.json": b'{"label": [1]}'})
    assert refused(path) == (f"{path}: the member '2.json' 'label' is [1]. Expected a class's index or name.")
    without = pack(tmp_path / "y.tar", samples(0, 1))
    assert refused(without, label_key="x") == (
        f"{without}: the sample '000000' is .png .cls; expected 000000.json, whose 'x' is its class, right "
        "behind or before it in the shard. Or leave --label-key out: its class is in the .cls."
    )
    pack(path, {**members, "1.json": b"{"})
    assert "the member '1.json' is not JSON" in refused(path)


def test_keys_of_json_are_columns_where_they_are_asked_for(tmp_path: Path, cache_folder: Path) -> None:
    """Also where the labels are in a .cls; read once, and then from the index."""
    members: dict[str, bytes] = {}
    for number in range(tar_index._WORTH_KEEPING):
        rest = {"scanner": f"s{number % 3}", "age": number} if number != 5 else {"age": number}
        members |= {f"{number}.jpg": b"", f"{number}.cls": b"1", f"{number}.json": json.dumps(rest).encode()}
    pack(tmp_path / "a.tar", members)
    for _ in range(2):
        columns = opened(tmp_path / "a.tar", keep=("scanner", "age")).columns([4, 5, 6])
        assert columns["scanner"] == ["s1", "", "s0"]
        assert columns["age"].tolist() == [4, 5, 6]
    assert len([*cache_folder.glob("*.index")]) == 1
    assert opened(tmp_path / "a.tar").columns([0]) == {}


def test_json_of_something_else_beside_a_cls_is_not_read(tmp_path: Path) -> None:
    """As of boxes: a list, which has no keys."""
    pack(tmp_path / "a.tar", {"a.jpg": b"", "a.cls": b"0", "a.json": b"[[1, 2, 3, 4]]"})
    assert opened(tmp_path / "a.tar").targets.tolist() == [0]
    assert "is no JSON object" in refused(tmp_path / "a.tar", keep=("scanner",))


def test_names_that_shards_share_have_the_shard_before_them(tmp_path: Path) -> None:
    for number in range(2):
        one = {name: picture(9 + number) if name.endswith("png") else b"1" for name in samples(0, 3)}
        pack(tmp_path / f"s/{number}.tar", one)
    data = opened(tmp_path / "s")
    assert ids(data) == [f"{shard}.tar/{number:06}.png" for shard in range(2) for number in range(3)]
    assert "shards share names, such as 000000.png: ids begin with the shard's name" in data.notes()
    shutil.copy(tmp_path / "s/0.tar", tmp_path / "s/2.tar")
    assert f"{tmp_path}/s/0.tar and {tmp_path}/s/2.tar are the same shard" in refused(tmp_path / "s")
    for folder in "ab":
        pack(tmp_path / f"{folder}/0.tar", samples(0, 3 if folder == "a" else 2))
    said = "'0.tar/000000.png' is the id of two pictures, of shards of one name in different folders, such as"
    assert refused(tmp_path / "{a,b}/0.tar") == f"{said} {tmp_path}/b/0.tar: rename one of them."


def test_shards_of_equal_ends_are_the_same_where_all_of_them_is(tmp_path: Path) -> None:
    for number in range(3):
        middle = bytes([number]) * 20_000
        pack(
            tmp_path / f"{number}.tar",
            {
                "0.png": bytes(9000),
                "0.cls": b"1",
                "1.png": middle,
                "1.cls": b"1",
                "2.png": bytes(20_000),
                "2.cls": b"1",
            },
        )
    assert len(opened(tmp_path)) == 9
    shutil.copy(tmp_path / "1.tar", tmp_path / "3.tar")
    assert f"{tmp_path}/1.tar and {tmp_path}/3.tar are the same shard: leave one out" in refused(tmp_path)


def test_a_key_that_comes_again_is_named(tmp_path: Path) -> None:
    """Also with a picture of another format: both counted."""
    members = {"a.png": b"", "a.cls": b"1", "b.png": b"", "b.cls": b"1"}
    path = pack(tmp_path / "x.tar", {**members, "a.jpg": b"", "./a.cls": b"1"})
    assert f"{path} has the key 'a', a file's name up to its first dot, more than once" in refused(path)


@pytest.mark.parametrize(
    ("members", "name", "renamed"),
    [
        ({"p/a.left.jpg": b"", "p/a.right.jpg": b"", "p/a.cls": b"1"}, "p/a.left.jpg", "a_left.jpg"),
        (
            {"p/a.jpg": b"", "p/a.cls": b"1", "p/a.v2.0.jpg": b"", "p/a.v2.0.cls": b"1"},
            "p/a.v2.0.jpg",
            "a_v2_0.jpg",
        ),
        ({"b.jpg": b"", "b.cls": b"1", "p/a.v2.jpg": b"", "p/a.v2.cls": b"1"}, "p/a.v2.jpg", "a_v2.jpg"),
    ],
)
def test_a_picture_with_a_further_dot_that_would_be_left_out_is_named(
    tmp_path: Path, members: dict[str, bytes], name: str, renamed: str
) -> None:
    """The key is what stands before the first dot: these samples were missing, at most with a note."""
    said = refused(pack(tmp_path / "x.tar", members))
    assert f"the member {name!r} is no picture of a sample: it is of the key" in said
    assert said.endswith(f"before packing, such as {renamed}.")


def test_further_pictures_of_a_sample_are_not_read(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", {"a.jpg": b"", "a.cls": b"1", "a.seg.png": b"", "a.depth.png": b""})
    assert ids(opened(path)) == ["a.jpg"]


def test_folders_of_systems_are_passed_over(tmp_path: Path) -> None:
    """As in class folders: previews counted as samples."""
    copies = samples(0, 1, "x/@eaDir/") | samples(0, 1, ".thumbs/") | samples(0, 1, "__MACOSX/")
    path = pack(tmp_path / "x.tar", {**copies, **samples(0, 1, "../x/")})
    assert ids(opened(path)) == ["../x/000000.png"]
    assert opened(path).notes() == ["passed over: 6 files of the shards, which are of no sample"]


def test_other_members_are_passed_over_with_a_note(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", {"README": b"", "._0.png": b"x", "notes.txt": b"y", **samples(0, 2)})
    with tarfile.open(path, "a") as file:
        folder = tarfile.TarInfo("folder.png")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
    assert opened(path).notes() == ["passed over: 3 files of the shards, which are of no sample"]


def test_an_index_is_kept_and_made_again_after_a_change(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_index, "_WORTH_KEEPING", 1)
    path = pack(tmp_path / "x.tar", samples(0, 20))
    first = opened(path)
    (kept,) = cache_folder.iterdir()
    with monkeypatch.context() as other:
        other.setattr(TarReader, "members", lambda reader: iter(()) if kept.exists() else None)
        other.setattr(tar_shards, "_keys", lambda path, asked, has_columns: (None, []))
        again = opened(path)
    assert (ids(again), again.targets.tolist()) == (ids(first), first.targets.tolist())
    assert again.fingerprint(20) == first.fingerprint(20)
    content = kept.read_bytes()
    # One bit of it, wherever it is: in the sums, in names and labels, in arrays.
    flipped = [
        content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        for at in (*range(0, len(content), 29), len(content) - 1)
    ]
    relabelled = content.replace(b'"values": [["0", "1"', b'"values": [["1", "0"')
    assert relabelled != content
    for damaged in (*flipped, relabelled, content[:-1], content[:50], b"", b"\0" * 99):
        kept.write_bytes(damaged)
        again = opened(path)
        assert (ids(again), again.targets.tolist()) == (ids(first), first.targets.tolist())
        assert kept.read_bytes() == content
    # Of the same size, too: its time of change, or its ends, say so.
    time = path.stat().st_mtime_ns
    pack(path, samples(20, 20))
    os.utime(path, ns=(time, time))
    assert ids(opened(path))[0] == "000020.png"
    assert len([*cache_folder.iterdir()]) == 1
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    assert ids(opened(path))[0] == "000020.png"


def test_a_shard_that_changes_is_an_error_of_its_samples(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", samples(0, 3))
    data = opened(path)
    data.fingerprint(3)
    os.utime(path, (1, 1))
    with pytest.raises(OSError, match=r"x\.tar has changed since the run started: .* 1970-01-01"):
        data.__getitems__([0])


def test_no_more_than_60_bytes_a_sample(tmp_path: Path) -> None:
    """With names of 37 letters, as ImageNet's in folders have."""
    data = opened(pack(tmp_path / "x.tar", samples(0, 10)))
    pieces: Any = data._pieces
    arrays = (pieces.places, pieces.lengths, data.targets, data._paths._ends)
    assert sum(array.itemsize for array in arrays) + len("n01440764/ILSVRC2012_val_00000293.jpg") <= 60


def test_more_names_than_four_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "_LARGEST_END", 20)
    wanted = [f"{number:04}" for number in range(20)]
    names, others = FileNames(wanted[:4]), FileNames(wanted[4:])
    stored, ends = others.stored_all()
    assert others._ends.itemsize == 2 * names._ends.itemsize == 8
    names.extend(stored, ends)
    assert [*names] == wanted
    assert [*names.select([19, 0, 7, 8, 9, 10])] == [wanted[place] for place in (19, 0, 7, 8, 9, 10)]


# -- what is refused -------------------------------------------------------------------------------------


def test_a_sample_without_a_part_is_named(tmp_path: Path) -> None:
    members = samples(0, 3)
    path = pack(tmp_path / "x.tar", {name: each for name, each in members.items() if name != "000001.cls"})
    said = f"{path}: the sample '000001' has .png and no label (.cls). Add it, or leave the sample out."
    assert refused(path).startswith(said)
    pack(path, {name: each for name, each in members.items() if name != "000001.png"})
    assert "the sample '000001' has .cls and no picture that is read (.jpg .jpeg .png" in refused(path)
    pack(path, {"0.png": b"", "0.cls": b"1", "1.cls": b"0", "1.gif": b""})
    assert "the sample '1' has .cls and .gif and no picture that is read (.jpg" in refused(path)
    pack(path, {**members, "000002.jpg": b"x"})
    assert "the member '000002.jpg' is a second picture of '000002'. Keep one of them" in refused(path)
    pack(path, {"a/1.jpg": b"x", "b/1.jpg": b"x"})
    assert f"mkdir val; tar -xf {path} -C val" in refused(path)
    pack(path, {"a.txt": b"x"})
    assert f"{path} holds no picture that is read: found .txt; expected files such as a.jpg" in refused(path)
    pack(path, {**members, "000002.cls": b"\xff"})
    assert "the member '000002.cls' is no text" in refused(path)
    pack(path, {**members, "000002.cls": b" "})
    assert refused(path).startswith(f"{path}, 000002.png: the label (column '.cls') is empty")


@pytest.mark.parametrize(
    "label",
    ["[0. 1. 0.]", "[3]", "tensor(3)", "np.int64(3)", "array([1, 0])", "(3,)", '{"label": 3}', '"3"', "b'3'"]
    + ["0 1 0", "1,0", "3\n4", "3\x00\x00", "cat\tdog"],
)
def test_a_label_that_a_program_printed_is_no_name(tmp_path: Path, label: str) -> None:
    """As names in the order of their text these were other classes, without a word."""
    path = pack(tmp_path / "x.tar", {**samples(0, 2), "000001.cls": label.encode()})
    said = f"{path}, 000001.png: the label (column '.cls') is {label!r}, expected a whole number from 0 or a"
    assert refused(path) == (
        f"{said} class's name. Write one number or one name for each sample: str(int(label)), or of an array "
        "with a 1 at the class str(int(label.argmax())). If the labels are names, give --class-order name or "
        "--class-map FILE."
    )
    assert len(opened(path, order="name")) == 2


def test_names_are_no_printed_labels_and_have_no_byte_order_mark(tmp_path: Path) -> None:
    names = ["crane (bird)", "crane_(machine)", "tiger shark, Galeocerdo", "'s-Hertogenbosch", "7-11"]
    members = {f"{number}.{part}": b"" for number in range(len(names)) for part in ("jpg", "cls")}
    path = pack(
        tmp_path / "x.tar", {**members, **{f"{n}.cls": f"\ufeff{names[n]}\n".encode() for n in range(5)}}
    )
    assert {*opened(path).labels.classes} == {*names}


def test_a_torn_shard_is_named(tmp_path: Path) -> None:
    """Also where it ends between two members: what follows would be missing without a word."""
    path = pack(tmp_path / "x.tar", samples(0, 3))
    content = path.read_bytes()
    with TarReader(path) as reader:
        members = [*reader.members()]
    ends = [offset + -(-size // 512) * 512 for _, offset, size in members]
    for length in (ends[-1], ends[-1] - 1, ends[1], ends[1] + 100, ends[1] + 600, 300):
        path.write_bytes(content[:length])
        said = f"{path} is cut off: it ends after {length:,} bytes without tar's end mark. Fetch or pack"
        assert refused(path) == f"{said} it again."
    path.write_bytes(content[: ends[2]] + b"\x07" * 512 + content[ends[2] + 512 :])
    assert f"{path} is damaged at byte {ends[2]:,}, where the header" in refused(path)
    info = tarfile.TarInfo("a.png")
    # With a size below 0 the next header would be looked for before this one, for ever.
    for records in (b"0 path=b\n", b"x path=b\n", b"10 size=x\n", b"14 size=-1536\n"):
        info.size, info.type = len(records), tarfile.XHDTYPE
        header = info.tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0")
        path.write_bytes(content[: ends[1]] + header + content[ends[1] :])
        assert f"{path} is damaged at byte {ends[1]:,}" in refused(path) or b"size" in records
        assert f"{path} is damaged at byte" in refused(path)
    for zeros in (0, 1 << 17, 5 << 20):  # tar fills records up as --blocking-factor says
        path.write_bytes(content + bytes(zeros) + content)
        assert "has members behind its end mark" in refused(path)
    path.write_bytes(content + bytes(3 << 20))
    assert len(opened(path)) == 3
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert f"{path} is no tar file. Fetch or pack it again" in refused(path)
    for content, said in (
        (b"<!DOCTYPE html><title>404</title>" + bytes(600), "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        (b"", "is empty (0 bytes)"),
    ):
        path.write_bytes(content)
        assert refused(path).startswith(f"{path} {said}")


def test_compressed_sparse_and_linked_ones_are_named(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", samples(0, 3))
    for name in ("x.tar.gz", "x.tgz", "y.tar"):
        other = tmp_path / "z" / name
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(gzip.compress(path.read_bytes()))
        assert kind_at(other).module == "tar_shards"
        said, _, command = refused(other).partition("Make a .tar of it, and give that: ")
        assert "is compressed" in said
        subprocess.run(command, shell=True, check=True, timeout=60)  # noqa: S602 - as it is typed
        assert (tmp_path / "z" / f"{name[0]}.tar").read_bytes() == path.read_bytes()
    assert [each.name for each in tars_at(tmp_path / "z")] == ["x.tar", "y.tar"]
    for kind, fault in ((tarfile.GNUTYPE_SPARSE, "is sparse"), (tarfile.LNKTYPE, "is a link")):
        info = tarfile.TarInfo("s.png")
        info.type, info.linkname = kind, "other"
        path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
        assert f"{path}: the member 's.png' {fault}" in refused(path)
    info = tarfile.TarInfo("s.png")
    info.pax_headers = {"GNU.sparse.major": "1"}
    path.write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    assert "'s.png' is sparse" in refused(path)


def test_a_list_of_shards_is_named() -> None:
    """It was a TypeError of pathlib, or of the model's forward."""
    shards = ["a.tar", Path("b.tar")]
    for make in (
        lambda: dualeval.tasks.ImageClassification(model="resnet18", data=shards),  # type: ignore[arg-type]
        lambda: dualeval.tasks.Segmentation(model="fcn_resnet50", data=shards),  # type: ignore[arg-type]
        lambda: dualeval.evaluate(model=torch.nn.Identity(), data=shards),
    ):
        with pytest.raises(UsageError, match="data is a list, expected one path: a file, a folder of shards"):
            make()


def test_shards_that_are_not_there_are_named(tmp_path: Path) -> None:
    pack(tmp_path / "val-000.tar", samples(0, 3))
    said = refused(tmp_path / "val-{000..002}.tar")
    assert "2 of 3 shards are missing: " in said
    assert f"{tmp_path}/val-001.tar, {tmp_path}/val-002.tar" in said
    said = refused(tmp_path / "test-{000..002}.tar")
    assert f"names 3 files, and none exists; the first was looked for at {tmp_path}/test-000.tar" in said
    assert f"--data {tmp_path}/test.tar does not exist" in refused(tmp_path / "test.tar")


def test_a_folder_of_training_shards_beside_others_is_refused(tmp_path: Path) -> None:
    """Evaluated together they gave one number, too high."""
    for name in ("net1k-train-000", "net1k-train-001", "net1k-val-000", "net1k-val-001", "extra"):
        pack(tmp_path / f"{name}.tar", samples(0, 1))
    said = refused(tmp_path)
    assert f"{tmp_path} holds shards of several parts of a data set: 2 of train and 2 of val" in said
    assert said.endswith(f"Give those of one: --data '{tmp_path}/net1k-val-{{000..001}}.tar'")


@pytest.mark.parametrize(
    ("one", "other"),
    [("trainval-0", "test-0"), ("train0", "dev0"), ("x_test_0", "x_test-dev_0"), ("TrainVal", "val")],
)
def test_shards_of_two_parts_are_not_evaluated_together(tmp_path: Path, one: str, other: str) -> None:
    for name in (one, other):
        pack(tmp_path / f"{name}.tar", samples(0, 1))
    assert "holds shards of several parts of a data set: 1 of " in refused(tmp_path)


def test_a_packed_tree_of_two_parts_is_not_evaluated_as_one(tmp_path: Path) -> None:
    members = {
        f"set/{part}/{name}": data for part in ("train", "val") for name, data in samples(0, 2).items()
    }
    pack(tmp_path / "all.tar", members)
    assert "train and val are parts of a data set. Pack the one" in refused(tmp_path / "all.tar")


def test_class_folders_beside_tars_are_class_folders(tmp_path: Path) -> None:
    """ImageNet's archive lies beside the folders that came out of it, and perhaps nobody may move it."""
    pack(tmp_path / "ILSVRC2012_img_val.tar", samples(0, 3))
    (tmp_path / "n01440764").mkdir()
    assert kind_at(tmp_path).module == "class_folders"
    with pytest.raises(
        UsageError, match=r"holds no sample.* The tar files in it are read by --data"
    ) as caught:
        ImageFolder(tmp_path, SMALL)
    assert caught.value.exit_code == EXIT_USAGE
