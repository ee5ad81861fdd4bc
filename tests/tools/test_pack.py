"""Packs: runs from them are those of the data from which they were made; resumed, damaged and refused."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from dualeval.cli import dualeval
from dualeval.data.cache import DataCache
from dualeval.data.pack_file import PackFile, PackWriter, sums_of
from dualeval.errors import DualevalError, UsageError
from dualeval.result import Result, read_result
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.segmentation import Segmentation
from dualeval.tools.pack.packing import pack_task
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate, rows
from tests.vehicles import masked_pictures
from tests.vehicles.packed_pictures import ASSETS, FORMS, JOB, as_folder, fashion

COUNT = 50
PIXELS: dict[str, Any] = {"resize": 28, "crop": 28, "channels": 1, "mean": (0.286,), "std": (0.353,)}


def task(data: Path, **changes: Any) -> ImageClassification:
    model = "tests.vehicles.faulty_models:fashion_cnn"
    weights = str(ASSETS / "fashion_cnn.safetensors")
    return ImageClassification(**{"model": model, "weights": weights, "data": data, **PIXELS, **changes})


def segmentation(data: Path, **changes: Any) -> Segmentation:
    model = masked_pictures.Exact()
    return Segmentation(**{"model": model, "data": data, "preprocessing": "none", **changes})


def packed(of: ImageClassification | Segmentation, out: Path) -> str:
    return pack_task(of, out, 0, DataCache())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with a damaged picture, and their pack."""
    home = tmp_path_factory.mktemp("packs")
    damaged = sorted(as_folder(fashion(COUNT), home).rglob("*.png"))[7]
    damaged.write_bytes(b"no picture")
    assert "1 of them could not be read" in packed(task(home / "val"), home / "val.pack")
    return home


def check_same(one: Result, other: Result) -> None:
    assert one.digests == other.digests
    assert one.failed == other.failed
    assert one.data == other.data
    for name in ("rule", "classes", "left_out"):
        assert one.labels.get(name) == other.labels.get(name)


@pytest.mark.parametrize("batch_size", [4, 64])
@pytest.mark.parametrize("changes", [{}, {"data_fingerprint": "content"}])
def test_a_run_of_a_pack_is_that_of_the_folder(
    home: Path, tmp_path: Path, batch_size: int, changes: dict[str, Any]
) -> None:
    data, options = home / "val.pack", {"batch_size": batch_size, "on_error": "skip"}
    if changes:
        data = tmp_path / "content.pack"
        packed(task(home / "val", **changes), data)
    folder = evaluate(task(home / "val", **changes), tmp_path / "folder", **options)
    result = evaluate(task(data, **changes), tmp_path / "pack", **options)
    assert [each["error"][:8] for each in result.failed] == ["OSError:"]
    check_same(folder, result)
    assert rows(tmp_path / "pack") == rows(tmp_path / "folder")
    assert result.fingerprint != folder.fingerprint


def test_a_class_map_is_of_the_run(home: Path, tmp_path: Path) -> None:
    """It leaves folders out, gives two one class, and no sample is another's."""
    (tmp_path / "map.json").write_text(
        '{"0": 3, "1": 0, "2": null, "3": 1, "4": 2, "5": null, "6": 3, "7": 7, "8": 8, "9": 9}'
    )
    options: dict[str, Any] = {"class_map": tmp_path / "map.json"}
    folder, result = (
        evaluate(task(data, **options), None, batch_size=4, on_error="skip", sample=20)
        for data in (home / "val", home / "val.pack")
    )
    check_same(folder, result)


@pytest.mark.parametrize("labels", ["{0}", "class {0}"])
def test_a_manifest_keeps_ids_columns_and_the_rule_of_its_labels(
    home: Path, tmp_path: Path, labels: str
) -> None:
    names = [path.relative_to(home / "val") for path in sorted((home / "val").rglob("*.png"))]
    del names[7]
    lines = [f"{name},{labels.format(name.parts[0])},{name.stem[-1]},s{name.stem[-2]}" for name in names]
    path = home / f"of{len(labels)}.csv"
    path.write_text("\n".join(["path,label,number,scanner", *lines]))
    data = tmp_path / "m.pack"
    packed(task(path, image_root=home / "val"), data)
    folder = evaluate(task(path, image_root=home / "val"), tmp_path / "folder", by=("scanner",))
    result = evaluate(task(data), tmp_path / "pack", by=("scanner",))
    check_same(folder, result)
    assert rows(tmp_path / "pack") == rows(tmp_path / "folder")
    assert result.slices == folder.slices
    assert str(task(data).dataset().labels) == str(task(path, image_root=home / "val").dataset().labels)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.long] if form != "tar" else []) for form in FORMS]
)
def test_each_form_can_be_packed(tmp_path: Path, form: str) -> None:
    data = FORMS[form](fashion(30), tmp_path)
    files = task(data).dataset()
    packed(task(data), tmp_path / "val.pack")
    pack, every = task(tmp_path / "val.pack").dataset(), range(30)
    assert [*map(pack.id, every)] == [*map(files.id, every)]
    assert pack.fingerprint(30) == files.fingerprint(30)
    assert pack.content_fingerprint(every) == files.content_fingerprint(every)
    for (image, target), (other, same) in zip(
        files.__getitems__(every), pack.__getitems__(every), strict=True
    ):
        assert torch.equal(image, other) and target == same


def test_reading_gives_one_batch_and_no_copy_of_it(home: Path) -> None:
    images = task(home / "val.pack").dataset()
    some = images.__getitems__(range(10, 20))
    batch = task(home / "val.pack").collate(some)
    assert batch["images"].data_ptr() == some[0][0].data_ptr()
    assert torch.equal(batch["targets"], torch.as_tensor(images.targets[10:20]))
    apart = images.__getitems__([19, 10])
    assert torch.equal(apart[0][0], batch["images"][9])
    assert images.picture(10).size == (28, 28)
    with pytest.raises(DualevalError, match=r"^OSError: the file is not a picture"):
        images.__getitems__(range(5, 10))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"resize": 32},
        "other preprocessing .resize.. It holds: .*resize 28, crop 28.* This run wants: .*resize 32, crop",
    ),
    ({"interpolation": "bicubic"}, "interpolation bilinear.*interpolation bicubic"),
    ({"channels": None}, "channels 1.*channels 3"),
    ({"data_fingerprint": "content"}, "data_fingerprint ends. This run wants: .*data_fingerprint content"),
    ({"label_column": "label"}, "--label-column does not apply"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_what_is_refused(home: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        task(home / "val.pack", **changes)


def test_another_mean_is_of_the_model(home: Path) -> None:
    task(home / "val.pack", mean=(0.5,), std=(0.5,))


def test_another_pack_is_not_written_over(home: Path) -> None:
    before = (home / "val.pack").read_bytes()
    said = packed(task(home / "val"), home / "val.pack")
    assert "is complete: 50 samples\n1 of them could not be read, and are failed" in said
    with pytest.raises(
        UsageError, match=r"something else: preprocessing.resize: 28 there, 32 now. Remove it"
    ):
        packed(task(home / "val", resize=32), home / "val.pack")
    assert (home / "val.pack").read_bytes() == before


def mean_of(picture: Any) -> torch.Tensor:
    return torch.tensor([[[float(np.asarray(picture).mean())]]])


def test_what_is_not_packed(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mean_of returns floats"):
        floats = task(home / "val", preprocessing=mean_of, **dict.fromkeys(PIXELS))
        packed(floats, tmp_path / "no.pack")
    with pytest.raises(UsageError, match="lie in memory already"):
        packed(ImageClassification(), tmp_path / "no.pack")
    with pytest.raises(UsageError, match="pictures have several sizes"):
        Image.new("L", (20, 20)).save(home / "val/9/zz.png")
        try:
            packed(task(home / "val", preprocessing="none", **dict.fromkeys(PIXELS)), tmp_path / "no.pack")
        finally:
            (home / "val/9/zz.png").unlink()
    for words, text in (
        (["--task", "detection", "--model", "x", "--data", "y"], "--task detection: only pictures and masks"),
        ([*JOB[:2], "--data", str(home / "val"), "--out", "val"], "a pack's name ends with .pack"),
    ):
        done = CliRunner().invoke(dualeval, ["pack", "--out", str(tmp_path / "a.pack"), *words])
        assert text in str(done.exception)


def damaged(home: Path, folder: Path, place: float) -> Path:
    """The pack with another byte."""
    content = bytearray((home / "val.pack").read_bytes())
    content[int(place * len(content)) if place < 1 else int(place)] ^= 1
    (folder / "val.pack").write_bytes(content)
    return folder / "val.pack"


def test_damaged_bytes_name_the_sample(home: Path, tmp_path: Path) -> None:
    data = damaged(home, tmp_path, 4096 + 784 * 20)
    pack = PackFile(data)
    first = int(np.searchsorted(pack.rows["end"], 4096 + 784 * 20, side="right"))
    name = task(data).dataset().id(first)
    with pytest.raises(DualevalError, match=f"{name}.*is damaged: it has other bytes than were packed"):
        evaluate(task(data, class_map=_without_failed(tmp_path)), None)


def _without_failed(folder: Path) -> Path:
    (folder / "map.json").write_text(
        '{"0": 0, "1": null, "2": 2, "3": 3, "4": 4, "5": 5, "6": 6, "7": 7, "8": 8, "9": 9}'
    )
    return folder / "map.json"


def test_a_damaged_or_torn_pack_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the list of its samples is damaged"):
        PackFile(damaged(home, tmp_path, 0.99))
    os.truncate(tmp_path / "val.pack", 20_000)
    with pytest.raises(UsageError, match=r"it is cut off, or no pack. 'dualeval pack' makes one"):
        task(tmp_path / "val.pack")
    with pytest.raises(UsageError, match="a pack: it does not exist"):
        task(tmp_path / "none.pack")


def test_a_checksum_sees_each_changed_or_moved_word() -> None:
    draw = np.random.default_rng(0)
    sample = draw.integers(0, 256, (1, 8 * 300), np.uint8)
    [first] = sums_of(sample)
    for place in draw.integers(0, sample.size, 100):
        other = sample.copy()
        other[0, place] ^= 1 << draw.integers(8)
        assert sums_of(other)[0] != first
    assert sums_of(np.roll(sample, 8))[0] != first


# -- resuming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 0.5])
def test_a_pack_that_changes_is_no_longer_read(home: Path, tmp_path: Path, size: float) -> None:
    """Sums and samples would be those of the new file; of a shorter one the system would end the process."""
    path = damaged(home, tmp_path, 5000)
    pack, content = PackFile(path), (home / "val.pack").read_bytes()
    path.write_bytes(content[: int(size * len(content))])
    os.utime(path, ns=(0, 0))
    with pytest.raises(OSError, match=r"val.pack has changed since it was opened"):
        pack.read(np.array([30]))


def _pack_and_die(folder: Path, after: int) -> None:
    add = PackWriter.add

    def add_or_die(self: PackWriter, *arguments: Any) -> None:
        add(self, *arguments)
        if self.count >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    vars_of: Any = PackWriter  # in this process alone
    vars_of.add = add_or_die
    packed(task(folder / "val"), folder / "again.pack")


def test_a_killed_packing_goes_on(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "val", tmp_path / "val")
    child = multiprocessing.get_context("fork").Process(target=_pack_and_die, args=(tmp_path, 30))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / "again.pack").exists()
    # A row whose samples did not reach the disk, and half a row.
    os.truncate(tmp_path / "again.pack.partial", (tmp_path / "again.pack.partial").stat().st_size - 5)
    with (tmp_path / "again.pack.partial.rows").open("ab") as file:
        file.write(b"\1" * 100)
    assert "50 samples, 31 of them before" in packed(task(tmp_path / "val"), tmp_path / "again.pack")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.pack", "val"]
    assert (tmp_path / "again.pack").read_bytes() == (home / "val.pack").read_bytes()


def test_another_job_begins_anew_and_two_at_once_are_refused(home: Path, tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "a.pack", 1, {"job": 1})
    part = PackFile(home / "val.pack")
    rows, samples = part.rows[:1].copy(), part.read(np.array([0]))[0]
    rows["end"] = len(samples)
    writer.add(samples, rows)
    with pytest.raises(UsageError, match="another process is packing it"):
        PackWriter(tmp_path / "a.pack", 1, {"job": 1})
    writer.close()
    for job, count in ((1, 1), (2, 0)):
        with closing(PackWriter(tmp_path / "a.pack", 1, {"job": job})) as writer:
            assert writer.count == count


def test_who_waits_for_the_lock_leaves_a_finished_pack_alone(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = PackWriter(tmp_path / "a.pack", 1, {})
    part, lock = PackFile(home / "val.pack"), fcntl.flock
    rows, samples = part.rows[:1].copy(), part.read(np.array([0]))[0]
    rows["end"] = len(samples)
    first.add(samples, rows)

    def finished_meanwhile(*arguments: Any) -> None:
        first.finish({}, {})
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", finished_meanwhile)
    with pytest.raises(UsageError, match="another process has just packed it"):
        PackWriter(tmp_path / "a.pack", 1, {})
    assert len(PackFile(tmp_path / "a.pack").rows) == 1


# -- masks -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with masks, of which one of each is damaged, and their pack."""
    home = tmp_path_factory.mktemp("masks")
    masked_pictures.write_pictures(home)
    (home / "img/003.png").write_bytes(b"no picture")
    (home / "masks/005.png").write_bytes(b"no mask")
    assert "2 of them could not be read" in packed(
        segmentation(home / "img", masks=home / "masks"), home / "a.pack"
    )
    return home


@pytest.mark.parametrize("batch_size", [3, 64])
def test_masks_of_a_pack_are_those_of_their_files(masked: Path, tmp_path: Path, batch_size: int) -> None:
    options = {"batch_size": batch_size, "on_error": "skip"}
    folder = evaluate(segmentation(masked / "img", masks=masked / "masks"), tmp_path / "folder", **options)
    result = evaluate(segmentation(masked / "a.pack"), tmp_path / "pack", **options)
    assert len(result.failed) == 2
    check_same(folder, result)
    assert rows(tmp_path / "pack") == rows(tmp_path / "folder")
    whole = {"data_fingerprint": "content"}
    packed(segmentation(masked / "img", masks=masked / "masks", **whole), tmp_path / "whole.pack")
    of_bytes, of_files = (
        made.dataset().content_fingerprint(range(13))
        for made in (
            segmentation(tmp_path / "whole.pack", **whole),
            segmentation(masked / "img", masks=masked / "masks", **whole),
        )
    )
    assert of_bytes == of_files != result.data["contents"]
    drawn = [
        evaluate(made, None, on_error="skip", sample=7).digests
        for made in (segmentation(masked / "img", masks=masked / "masks"), segmentation(masked / "a.pack"))
    ]
    assert drawn[0] == drawn[1]


def test_masks_by_another_rule_are_refused(masked: Path) -> None:
    for changes, text in (
        (
            {"ignore_index": (0,)},
            r"other classes .ignore_index.. It holds: .*ignore_index \[255\].* wants: .*ignore_index \[0\]",
        ),
        ({"model": masked_pictures.Exact(6)}, "num_classes 5.*num_classes 6"),
        ({"resize": 32}, "other preprocessing .resize.. It holds: .*resize None.*resize 32"),
        ({"masks": masked / "masks"}, "--masks, .* do not apply"),
    ):
        with pytest.raises(UsageError, match=text):
            segmentation(masked / "a.pack", **changes).build_model(torch.device("cpu"))
    with pytest.raises(UsageError, match=r"task segmentation, .* This run wants: task image-classification"):
        task(masked / "a.pack")


def test_a_pack_shows_its_pictures(masked: Path) -> None:
    pack = segmentation(masked / "a.pack")
    pack.build_model(torch.device("cpu"))
    files = segmentation(masked / "img", masks=masked / "masks")
    files.build_model(torch.device("cpu"))
    one, other = (each.dataset().picture(0) for each in (pack, files))
    assert one[0].tobytes() == other[0].tobytes() and (one[1] == other[1]).all()


# -- processes -------------------------------------------------------------------------------------------


def test_two_ranks_with_readers_have_the_digest(home: Path, launch: Launch, tmp_path: Path) -> None:
    """Packed by reading processes, and evaluated by two ranks with one each."""
    command = ["dualeval", "pack", *JOB[:2], *JOB[5:], "--data", str(home / "val"), "--out", "two.pack"]
    command = [word for word in command if word != "--no-progress"]
    done = launch([*command, "--workers", "2"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "two.pack").read_bytes() == (home / "val.pack").read_bytes()
    run = [
        "dualeval",
        "run",
        *JOB,
        "--data",
        "two.pack",
        "--on-error",
        "skip",
        "--workers",
        "1",
        "--out",
        "out",
    ]
    done = launch([*run, "--nproc", "2"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = evaluate(task(home / "val"), None, batch_size=4, on_error="skip")
    assert read_result(tmp_path / "out" / "result.json").digests == folder.digests
