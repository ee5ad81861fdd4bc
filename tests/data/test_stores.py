"""Files in object stores and on the web: what is read of them, and what is said where they are not."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import math
import multiprocessing
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner

import dualeval
from dualeval.cli import dualeval as command
from dualeval.data.image_sets import class_folders, hugging_face, manifest, tar_shards
from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.labels import choose_labels
from dualeval.data.language_rows import read_language_data
from dualeval.data.packed import PackedImages
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import is_tar_name, kind_at
from dualeval.data.shards import shards_at
from dualeval.data.squad import read_questions
from dualeval.data.stores import arrow, copies, requests, web
from dualeval.data.stores.path import path_at
from dualeval.data.stores.requests import Patience
from dualeval.data.table import AS_USUAL, open_table, read_rows
from dualeval.errors import EXIT_FAILED, EXIT_USAGE, StoreError, UsageError
from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.models.weights import weights_at
from dualeval.tasks.labels import FolderLabels
from dualeval.tasks.segmentation import Segmentation
from dualeval.urls import check_url, url_of
from tests.engine.test_evaluator import evaluate
from tests.vehicles.masked_pictures import Exact, write_pictures
from tests.vehicles.object_store import CREDENTIALS, Handler, ObjectStore, mark_of, object_store, put_all
from tests.vehicles.packed_pictures import Pictures, as_dataset, as_folder, as_tars, fashion, pack
from tests.vehicles.questions import write_questions

BY_NAME = {"class_map": None, "num_classes": None, "of_weights": None}


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials of the test's own store, and nobody's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which nobody waits for."""
    slept: list[float] = []
    monkeypatch.setattr(requests, "PATIENCE", Patience(sleep=slept.append))
    return slept


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Iterator[ObjectStore]:
    with object_store() as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        arrow._make.cache_clear()
        requests.notes()
        yield running
        arrow._make.cache_clear()
        arrow._opened.cache_clear()
    with warnings.catch_warnings():
        # Connections that failed on purpose, which an error's traceback held, end here and in no other test.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def put_tars(store: ObjectStore, pictures: Pictures, home: Path) -> None:
    as_tars(pictures, home)
    put_all(store, home, "bucket")


def opened(at: str | Path) -> PackedImages:
    label = FolderLabels(order="name", **BY_NAME)
    images = tar_shards.open_images(
        path_at(at), label=label, label_key=None, keep=(), whole_files=False, cache=None
    )
    images.preprocessing = Preprocessing(resize=20, crop=16)
    return images


def address(store: ObjectStore, kind: str, path: str) -> str:
    return f"s3://{path}" if kind == "s3" else f"{store.endpoint}/{path}"


@pytest.mark.parametrize("kind", ["s3", "https"])
def test_shards_in_a_store_are_those_on_a_disk(store: ObjectStore, tmp_path: Path, kind: str) -> None:
    put_tars(store, fashion(20), tmp_path)
    there = opened(address(store, kind, "bucket/shards/val-{0..2}.tar"))
    here = opened(tmp_path / "shards/val-{0..2}.tar")
    assert [there.id(index) for index in range(20)] == [here.id(index) for index in range(20)]
    assert there.fingerprint(20) == here.fingerprint(20)
    for (one, target), (other, same) in zip(
        there.__getitems__(range(20)), here.__getitems__(range(20)), strict=True
    ):
        assert one.equal(other)
        assert target == same
    store.forget()
    there.__getitems__(range(3, 20))
    gets = [each for each in store.requests if each[0] == "GET"]
    assert len(gets) == 1
    assert len(store.requests) - len(gets) == (kind == "s3")
    print(there.path(0))


def test_shards_of_a_pattern_are_looked_for_together(store: ObjectStore) -> None:
    for number in range(8):
        store.put(f"bucket/{number}.tar", bytes(1024))
    store.delay = 0.1
    for kind in ("s3", "https"):
        store.forget()
        assert len(shards_at(path_at(address(store, kind, "bucket/{0..7}.tar")), is_tar_name, "")) == 8
        assert store.most_at_once > 4
        assert len(store.requests) == 8


def test_a_shard_is_fetched_once_and_its_index_is_kept(store: ObjectStore, tmp_path: Path) -> None:
    put_tars(store, fashion(20), tmp_path)
    opened("s3://bucket/shards/val-{0..2}.tar")
    first = store.sent
    store.forget()
    again = opened("s3://bucket/shards")
    assert len(again) == 20
    assert store.sent < first / 2
    store.put("bucket/shards/val-0.tar", store.objects["bucket/shards/val-0.tar"][0] + bytes(512))
    store.forget()
    opened("s3://bucket/shards")
    assert store.sent > 10_000


def test_what_lies_near_is_read_together_and_what_is_large_in_parts(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8).tobytes()
    store.put("bucket/a", content)
    monkeypatch.setattr(requests, "PART_BYTES", 100_000)
    for kind in ("s3", "https"):
        found = path_at(address(store, kind, "bucket/a")).found  # type: ignore[attr-defined]
        store.forget()
        places = [(700_000, 250_000), (0, 10), (20, 5), (500_000, 1), (950_000, 0)]
        parts = requests.read_all([(found, offset, count) for offset, count in places])
        assert parts == [content[offset : offset + count] for offset, count in places]
        asked = sorted(each[2] for each in store.requests if each[0] == "GET")
        assert len(asked) == 5
        assert store.sent <= 250_000 + 25 + 1 + 2 * 2048 * (kind == "s3") + 10


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_tables_in_a_store_are_those_on_a_disk(store: ObjectStore, tmp_path: Path, form: str) -> None:
    table = pyarrow.table(
        {"text": [f"größe {number}" * 50 for number in range(3000)], "label": [*range(3000)]}
    )
    path = tmp_path / f"dev.{form}"
    if form == "csv":
        pyarrow.csv.write_csv(table, path)
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        pyarrow.parquet.write_table(table, path, row_group_size=1000)
    put_all(store, tmp_path, "bucket")
    example = {"text": "a", "label": 3}
    here = read_rows(path, lambda _: ("text", "label"), example)
    for kind in ("s3", "https"):
        at = address(store, kind, f"bucket/dev.{form}")
        store.forget()
        there = read_rows(Path(at), lambda _: ("text", "label"), example)
        assert len(store.requests) < 20
        assert there.values == here.values
        assert there.fingerprint(3000) == here.fingerprint(3000)
        assert there.source == at
        assert there.where(1).startswith(f"{at}, ")


def test_questions_and_texts_in_a_store_are_those_on_a_disk(store: ObjectStore, tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "a/not.md"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"größer als {name}\r\n")
    write_questions(tmp_path / "dev.json", unanswerable=True)
    put_all(store, tmp_path, "bucket")
    here, there = read_questions(tmp_path / "dev.json"), read_questions(path_at("s3://bucket/dev.json"))
    assert there == here
    texts = [read_language_data(at, None) for at in ("s3://bucket/texts", tmp_path / "texts")]
    assert texts[0].documents == texts[1].documents
    assert texts[0].source == "s3://bucket/texts"


def test_masks_in_a_store_are_read_from_shards_alone(store: ObjectStore, tmp_path: Path) -> None:
    write_pictures(tmp_path)
    members = {
        name: (tmp_path / folder / path.name).read_bytes()
        for path in sorted((tmp_path / "img").iterdir())
        for name, folder in ((path.name, "img"), (f"{path.stem}.mask.png", "masks"))
    }
    pack(tmp_path / "shards/0.tar", members)
    put_all(store, tmp_path, "bucket")
    tasks = [
        Segmentation(model=Exact(), data=at, preprocessing="none")
        for at in (str(tmp_path / "shards"), "s3://bucket/shards")
    ]
    digests = {evaluate(task, tmp_path / f"{id(task)}").samples_digest for task in tasks}
    assert len(digests) == 1
    with pytest.raises(UsageError, match="pictures with masks are read from tar shards there"):
        Segmentation(model=Exact(), data="s3://bucket/img", preprocessing="none").dataset()


def test_a_file_that_is_read_whole_is_fetched_once(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "PART_BYTES", 10_000)
    content = np.random.default_rng(0).integers(0, 256, 345_678, np.uint8).tobytes()
    store.put("bucket/a/model.safetensors", content)
    for kind in ("s3", "https"):
        at = address(store, kind, "bucket/a/model.safetensors")
        copy = weights_at(at)
        assert copy.name == "model.safetensors"
        assert str(copy) == f"{copy}" == at
        assert copy.read_bytes() == content
        store.forget()
        assert weights_at(at) == copy
        assert store.sent < 10
        store.put("bucket/a/model.safetensors", content[::-1])
        newer = weights_at(at)
        assert newer.read_bytes() == content[::-1]
        assert not copy.exists()
        store.put("bucket/a/model.safetensors", content)
    store.put("bucket/empty.pt", b"\x1f\x8b")
    with pytest.raises(UsageError, match=r"weights file s3://bucket/empty.pt is a gzip archive"):
        read_state_dict(weights_at("s3://bucket/empty.pt"), None)
    with pytest.raises(UsageError, match=r"index.json is an index of several files. Copy all to a disk"):
        weights_at("s3://bucket/a/model.safetensors.index.json")
    with pytest.raises(UsageError, match=r"--weights s3://bucket/a is a folder. Give one file of it"):
        weights_at("s3://bucket/a")
    with pytest.raises(UsageError, match=r"--weights s3://bucket/b.pt does not exist"):
        weights_at("s3://bucket/b.pt")


# -- what fails ------------------------------------------------------------------------------------------


def failing(times: float, fail: Callable[[Handler], object]) -> Callable[[Handler], bool]:
    """A fault of the first requests."""
    left = [times]

    def fault(handler: Handler) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fail(handler) is not False

    return fault


def cut(handler: Handler) -> None:
    """Half of the answer, and then nothing."""
    content, _ = handler.server.objects[handler.path.lstrip("/")]
    first, last = (int(number) for number in re.findall(r"\d+", handler.headers["Range"]))
    part = content[first : last + 1]
    mark = mark_of(content)
    headers = {"ETag": mark, "Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"}
    handler.send(206, part, headers, only=len(part) // 2)


def late(handler: Handler) -> bool:
    time.sleep(1.5)
    return False


def refusing(status: int, code: str) -> Callable[[Handler], None]:
    return lambda handler: handler.refuse(status, code)


def said_of(at: str | Path, *, exit_code: int) -> str:
    with pytest.raises(StoreError) as caught:
        opened(at)
    assert caught.value.exit_code == exit_code
    return str(caught.value)


PASSING = {
    "error 500": refusing(500, "InternalError"),
    "throttled": refusing(503, "SlowDown"),
    "cut": cut,
    "slow": late,
}


@pytest.mark.parametrize("kind", ["s3", "https"])
@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_asked_again_and_said(
    store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pauses: list[float],
    kind: str,
    fault: str,
) -> None:
    monkeypatch.setattr(web, "_TIMEOUT_S", 1)
    monkeypatch.setattr(arrow, "_SILENT_S", 1.0)
    put_tars(store, fashion(20), tmp_path)
    images = opened(address(store, kind, "bucket/shards/val-{0..2}.tar"))
    fine = [pixels for pixels, _ in images.__getitems__(range(20))]
    assert images.reading_notes() == []
    store.fault = failing(2, PASSING[fault])
    assert all(one.equal(other) for one, (other, _) in zip(fine, images.__getitems__(range(20)), strict=True))
    assert 1 <= len(pauses) <= 2
    [note, *_] = images.reading_notes()
    assert "requests failed and were sent again" in note
    assert images.reading_notes() == []


@pytest.mark.parametrize("kind", ["s3", "https"])
def test_a_store_that_stays_away_ends_the_run_and_no_sample_is_left_out(
    store: ObjectStore, tmp_path: Path, pauses: list[float], kind: str
) -> None:
    put_tars(store, fashion(20), tmp_path)
    images = opened(address(store, kind, "bucket/shards/val-{0..2}.tar"))
    store.fault = failing(math.inf, refusing(503, "SlowDown"))
    with pytest.raises(StoreError, match=r"7 attempts in .* (SLOW_DOWN|SERVICE_UNAV|HTTP 503)") as caught:
        images.__getitems__([4, 5])
    assert caught.value.exit_code == EXIT_FAILED
    assert pauses == sorted(pauses)
    assert len(pauses) == 6
    assert 15 < sum(pauses) < 60


@pytest.mark.parametrize("kind", ["s3", "https"])
def test_a_file_that_is_replaced_meanwhile_is_an_error(store: ObjectStore, tmp_path: Path, kind: str) -> None:
    put_tars(store, fashion(20), tmp_path)
    images = opened(address(store, kind, "bucket/shards/val-{0..2}.tar"))
    images.__getitems__([4])
    content = store.objects["bucket/shards/val-2.tar"][0]
    store.put("bucket/shards/val-2.tar", content[:-600] + b"x" + content[-599:])
    with pytest.raises(OSError, match="has changed since the run started"):
        images.__getitems__([4])
    images.__getitems__([0, 1, 2])
    del store.objects["bucket/shards/val-2.tar"]
    with pytest.raises(OSError, match=r"No such|has changed"):
        images.__getitems__([5])


REFUSALS = {
    (403, "ExpiredToken"): "the credentials have expired",
    (403, "AccessDenied"): "access denied .* AWS_ACCESS_KEY_ID may read it",
    (403, "InvalidAccessKeyId"): "does not know the access key",
    (403, "SignatureDoesNotMatch"): "the secret key is wrong",
    (403, "RequestTimeTooSkewed"): "clock is wrong",
    (301, "PermanentRedirect"): "another region.* Set AWS_REGION",
    (404, "NoSuchBucket"): "there is no such bucket",
}


@pytest.mark.parametrize("status, code", REFUSALS)
def test_refusals_of_s3_say_what_to_do(store: ObjectStore, tmp_path: Path, status: int, code: str) -> None:
    put_tars(store, fashion(4), tmp_path)
    images = opened("s3://bucket/shards")
    store.fault = failing(math.inf, refusing(status, code))
    assert re.search(REFUSALS[status, code], said_of("s3://bucket/shards/val-0.tar", exit_code=EXIT_USAGE))
    if code != "NoSuchBucket":
        with pytest.raises(StoreError, match=REFUSALS[status, code]):
            images.__getitems__([0])


def test_without_credentials_it_is_said_which_there_are(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    store.fault = failing(math.inf, refusing(403, "AccessDenied"))
    said = said_of("s3://bucket/val.tar", exit_code=EXIT_USAGE)
    assert "None of AWS_ACCESS_KEY_ID" in said
    assert "AWS_NO_SIGN_REQUEST=YES" in said


def test_who_sends_no_credentials_is_told_so(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "YES")
    store.fault = failing(math.inf, refusing(403, "AccessDenied"))
    said = said_of("s3://bucket/val.tar", exit_code=EXIT_USAGE)
    assert "No credentials are sent, as AWS_NO_SIGN_REQUEST is set: unset it" in said
    assert "AWS_ACCESS_KEY_ID" not in said


def test_shards_are_read_without_the_right_to_list(store: ObjectStore, tmp_path: Path) -> None:
    """Then all that is not there is denied."""
    put_tars(store, fashion(20), tmp_path)

    def fault(handler: Handler) -> bool:
        if "list-type" in handler.path or unquote(handler.path).lstrip("/") not in store.objects:
            handler.refuse(403, "AccessDenied")
            return True
        return False

    store.fault = fault
    for kind in ("s3", "https"):
        at = address(store, kind, "bucket/shards/val-{0..2}.tar")
        assert len(opened(at)) == 20
        assert kind_at(path_at(at)).module == "tar_shards"
    said = said_of("s3://bucket/shards/val-{2..3}.tar", exit_code=EXIT_USAGE)
    assert re.search("val-3.tar: access denied .* stores deny what is not there, too", said)


def test_commands_on_files_in_stores_begin_with_a_download(store: ObjectStore) -> None:
    store.put("bucket/a.csv", "text,label\ngr\xfcn,1".encode("latin-1"))
    store.put("bucket/b.csv", gzip.compress(b"text,label"))
    store.put("bucket/c.tar.gz", gzip.compress(bytes(1024)))
    example = {"text": "a", "label": 3}
    with pytest.raises(UsageError, match=r"download it, type iconv .* a.csv > new.csv .*, and upload what"):
        read_rows("s3://bucket/a.csv", lambda _: ("text", "label"), example)
    with pytest.raises(UsageError, match=r"b.csv is a gzip archive. Unpack it first"):
        open_table(path_at("s3://bucket/b.csv"), lambda _: ("text", "label"), example, options=AS_USUAL)
    with pytest.raises(UsageError, match=r"download it, type gunzip -c c.tar.gz > c.tar, and upload what"):
        opened("s3://bucket/c.tar.gz")


def test_a_form_that_is_read_from_a_disk_alone_is_named(store: ObjectStore) -> None:
    store.put("bucket/a.pack", b"x")
    with pytest.raises(
        UsageError, match=r"--data s3://bucket/a.pack is a file that is read from a disk alone"
    ):
        kind_at(path_at("s3://bucket/a.pack"))


def test_a_parquet_file_that_changes_is_no_longer_read(store: ObjectStore, tmp_path: Path) -> None:
    """Of row groups that are read anew, in whichever process."""
    for name in ("one", "other"):
        table = as_dataset(fashion(20)[:: 1 if name == "one" else -1]).data.table
        pyarrow.parquet.write_table(table, tmp_path / name, row_group_size=5)
    store.put("bucket/a.parquet", (tmp_path / "one").read_bytes())
    options: dict[str, Any] = {"path_column": None, "label_column": None, "keep": (), "cache": None}
    label = FolderLabels(order=None, **BY_NAME)
    at = path_at("s3://bucket/a.parquet")
    images = hugging_face.open_images(at, label=label, whole_files=False, **options)
    pictures = fashion(20)
    assert images.targets.tolist() == [int(name[0]) for name, _ in pictures]
    with images.opened(7) as file:
        assert file.read() == pictures[7][1]
    store.put("bucket/a.parquet", (tmp_path / "other").read_bytes())
    hugging_face._row_group.cache_clear()
    for forgets in (False, True):
        if forgets:  # as a process that has not read any yet
            hugging_face._in_state.cache_clear()
        with pytest.raises(OSError, match="has changed since the run started"), images.opened(7):
            pass


def test_a_parquet_table_that_changes_while_it_is_read_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    """Of equal size and columns: its pages are then those of the other one."""
    for name, labels in ("one", [1, 2]), ("other", [2, 1]):
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": labels}), tmp_path / name)
    store.put("bucket/a.parquet", (tmp_path / "one").read_bytes())
    path, example = path_at("s3://bucket/a.parquet"), {"text": "a", "label": 1}
    table = open_table(path, lambda _: ("text", "label"), example, options=AS_USUAL)
    store.put("bucket/a.parquet", (tmp_path / "other").read_bytes())
    with pytest.raises(UsageError, match=r"after row \d, cannot be read: s3://bucket/a.parquet has changed"):
        list(table.rows)


def test_what_is_not_there_is_said(store: ObjectStore, tmp_path: Path) -> None:
    put_tars(store, fashion(4), tmp_path)
    for at in ("s3://bucket/no.tar", f"{store.endpoint}/bucket/no.tar"):
        with pytest.raises(UsageError, match=rf"--data {at} does not exist"):
            opened(at)
    with pytest.raises(UsageError, match=r"1 of 4 shards are missing: s3://bucket/shards/val-3.tar"):
        opened("s3://bucket/shards/val-{0..3}.tar")
    assert "no such bucket" in said_of("s3://other/a.tar", exit_code=EXIT_USAGE)


def test_servers_without_ranges_or_marks_are_refused(store: ObjectStore, tmp_path: Path) -> None:
    put_tars(store, fashion(4), tmp_path)
    at = f"{store.endpoint}/bucket/shards/val-0.tar"
    store.has_marks = False
    assert "neither ETag nor Last-Modified" in said_of(at, exit_code=EXIT_USAGE)
    store.has_ranges, store.has_marks = False, True
    assert "ignores ranges" in said_of(at, exit_code=EXIT_USAGE)
    assert "ignores ranges" in said_of("s3://bucket/shards/val-0.tar", exit_code=EXIT_FAILED)


def test_hosts_certificates_and_proxies_that_are_wrong(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the host is not known" in said_of("https://nowhere.invalid/a.tar", exit_code=EXIT_USAGE)
    port = store.server_address[1]
    assert "no secure connection" in said_of(f"https://127.0.0.1:{port}/a.tar", exit_code=EXIT_USAGE)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{port}")
    arrow._make.cache_clear()
    assert "no secure connection" in said_of("s3://bucket/a.tar", exit_code=EXIT_USAGE)
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", "/none.pem")
    arrow._make.cache_clear()
    for at in ("s3://bucket/a.tar", f"https://127.0.0.1:{port}/a.tar"):
        said = said_of(at, exit_code=EXIT_USAGE)
        assert "SSL_CERT_FILE is '/none.pem', expected a file of certificates" in said
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://nowhere.invalid")
    arrow._make.cache_clear()
    assert "the host is not known" in said_of("s3://bucket/a.tar", exit_code=EXIT_USAGE)
    monkeypatch.setenv("HTTPS_PROXY", store.endpoint)
    assert "proxy of HTTPS_PROXY refuses" in said_of("https://nowhere.invalid/a.tar", exit_code=EXIT_USAGE)


@pytest.mark.parametrize("name", ["a b", "größe", "a%zz", "a#1", "a+b&c;d=e,f", "[1]"])
def test_names_are_quoted_once_for_the_web(store: ObjectStore, tmp_path: Path, name: str) -> None:
    put_tars(store, fashion(4), tmp_path)
    content = store.objects["bucket/shards/val-0.tar"][0]
    store.put(f"bucket/{name}.tar", content)
    assert len(opened(f"{store.endpoint}/bucket/{name}.tar")) == 1
    store.put("bucket/a b.tar", content)
    assert len(opened(f"{store.endpoint}/bucket/a%20b.tar")) == 1


def test_what_cannot_be_sent_is_not_sent_again(store: ObjectStore, pauses: list[float]) -> None:
    store.put("bucket/empty.tar", b"")
    for at, said in (
        (f"{store.endpoint}/bucket/empty.tar", r"bucket/empty.tar is empty \(0 bytes\)"),
        ("https://127.0.0.1:abc/a.tar", "its host or port cannot be read .*Expected https://HOST/PATH"),
        ("https://a b/a.tar", "its host or port cannot be read"),
    ):
        assert re.search(said, said_of(at, exit_code=EXIT_USAGE))
    store.has_ranges = False
    assert "is empty (0 bytes)" in said_of(f"{store.endpoint}/bucket/empty.tar", exit_code=EXIT_USAGE)
    assert pauses == []


def test_a_mark_that_is_another_with_each_answer_is_named(store: ObjectStore, tmp_path: Path) -> None:
    put_tars(store, fashion(4), tmp_path)
    numbers = itertools.count()

    def fault(handler: Handler) -> bool:
        content, _ = store.objects["bucket/shards/val-0.tar"]
        first, last = (int(number) for number in re.findall(r"\d+", handler.headers["Range"]))
        there = {"ETag": f'"{next(numbers)}"', "Content-Range": f"bytes {first}-{last}/{len(content)}"}
        handler.send(206, content[first : last + 1], there)
        return True

    store.fault = fault
    said = said_of(f"{store.endpoint}/bucket/shards/val-0.tar", exit_code=EXIT_USAGE)
    assert 'the server says another ETag with each answer ("0", "1", "2")' in said


def test_redirects_are_followed_to_safe_addresses_alone(store: ObjectStore, tmp_path: Path) -> None:
    put_tars(store, fashion(20), tmp_path)

    def lead(handler: Handler) -> bool:
        name = handler.path.rpartition("/")[2]
        if handler.path.startswith("/led/"):
            handler.send(302, b"", {"Location": f"{to}/{name}?Signature=hidden"})
        return handler.path.startswith("/led/")

    to, store.fault = f"{store.endpoint}/bucket/shards", lead
    assert len(opened(f"{store.endpoint}/led/val-{{0..2}}.tar").__getitems__(range(20))) == 20
    to = "http://elsewhere.invalid"
    said = said_of(f"{store.endpoint}/led/val-0.tar", exit_code=EXIT_USAGE)
    assert "leads to http://elsewhere.invalid/val-0.tar, expected" in said
    assert "hidden" not in said


def test_a_fork_opens_its_own(store: ObjectStore, tmp_path: Path) -> None:
    put_tars(store, fashion(20), tmp_path)
    images = opened("s3://bucket/shards")
    here = [pixels for pixels, _ in images.__getitems__(range(20))]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        there = pool.starmap_async(_read, [(images, part) for part in ([*range(10)], [*range(10, 20)])]).get(
            60
        )
    assert [each.tolist() for each in here] == [each for part in there for each in part]


def _read(images: PackedImages, part: list[int]) -> list[object]:
    return [pixels.tolist() for pixels, _ in images.__getitems__(part)]


# -- addresses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, said",
    [
        ("s3://me:hidden@bucket/a.tar", "s3://bucket/a.tar has a user or password"),
        ("https://host/a.tar?X-Amz-Signature=hidden", "https://host/a.tar has a query"),
        ("az://c/a.tar?sig=hidden", "az://c/a.tar has a query"),
        ("http://host/a.tar", "http://host/a.tar: over http:// anyone"),
        ("s3://bucket", "s3://bucket names no file. Expected s3://BUCKET/PATH"),
        (
            "s3://bucket/a//b.tar",
            "s3://bucket/a//b.tar has an empty part, . or .. in it, .* Give s3://bucket/a/b.tar",
        ),
        ("s3://bucket//b.tar", "Give s3://bucket/b.tar"),
        ("az://c/./b.tar", "Give az://c/b.tar"),
        ("https://host/a/../b.tar", "Give https://host/b.tar"),
        ("https://[::1/a", "https://\\[::1/a is no address: Invalid IPv6 URL"),
        ("s3://bucket/a//", "Give s3://bucket/a,"),
        ("ftp://me:hidden@host/a?hidden", "ftp://host/a is a URL, expected a path"),
    ],
)
def test_addresses_that_are_not_read_are_refused_without_their_secrets(url: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_url("--data", url)
    assert re.search(said, str(caught.value))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("at", ["s3://bucket//val", "s3://bucket/{.,a}/0.tar"])
def test_paths_are_not_made_of_addresses_that_they_would_change(store: ObjectStore, at: str) -> None:
    """Also in Python, and where a pattern makes such an address."""
    store.put("bucket/val/0/1.png", b"x")
    store.put("bucket/0.tar", b"x")
    with pytest.raises(UsageError, match=r"has an empty part, \. or \.\."):
        Segmentation(model=Exact(), data=at, preprocessing="none").dataset()


@pytest.mark.parametrize(
    "url",
    [
        *("s3://b/a{0..3}.tar", "gs://b/x y", "az://b/.a/..b"),
        *("https://h:1/a", "http://localhost/a", "http://[::1]:8000/a{0..3}.tar"),
    ],
)
def test_addresses_survive_paths(url: str) -> None:
    check_url("--data", url)
    assert url_of(Path(url)) == url_of(url) == url
    path = path_at(Path(url))
    assert str(path) == f"{path}" == url
    assert str(path / "b") == f"{url}/b"
    assert path.absolute() == path == pickle.loads(pickle.dumps(path))  # noqa: S301 - of this test


def test_names_that_begin_like_this_machine_are_others() -> None:
    for host in ("[::1].evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80"):
        with pytest.raises(UsageError, match="anyone on the way can change"):
            check_url("--data", f"http://{host}/a.tar")


def test_out_in_a_store_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"--out s3://bucket/run is a URL, and results"):
        dualeval.evaluate(model=torch.nn.Identity(), data=[(torch.ones(2), 1)], out="s3://bucket/run")
    done = CliRunner().invoke(command, ["run", "--out", "s3://bucket/run?sig=hidden"])
    assert str(done.exception).endswith(
        "--out s3://bucket/run is a URL, and results are written to a disk. Give a path there, and copy "
        "it to the store when all is done."
    )
    assert isinstance(done.exception, UsageError)


# -- pictures that are an object each --------------------------------------------------------------------


def folder_of(at: str | Path) -> ImageFolder:
    label = partial(choose_labels, order="name")
    return class_folders.open_images(path_at(at), label=label)


def test_class_folders_in_a_store_are_those_on_a_disk(store: ObjectStore, tmp_path: Path) -> None:
    as_folder(fashion(20), tmp_path)
    for name in (
        "notes.txt",
        "0/list.csv",
        ".cache/a/b.png",
        "@eadir/x.png",
        "only texts/a.txt",
        "loose.png",
    ):
        path = tmp_path / "val" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    put_all(store, tmp_path, "bucket")
    here, there = folder_of(tmp_path / "val"), folder_of("s3://bucket/val")
    assert there.classes == here.classes
    assert [there.id(index) for index in range(20)] == [here.id(index) for index in range(20)]
    assert there.fingerprint(20) == here.fingerprint(20)
    assert there.passed_over.files == here.passed_over.files
    assert there.path(0) == f"s3://bucket/val/{there.id(0)}"
    store.forget()
    first = there.content_fingerprint(range(20))
    assert store.requests == []
    store.delay = 0.05
    for (one, target), (other, same) in zip(
        there.__getitems__(range(20)), here.__getitems__(range(20)), strict=True
    ):
        assert one.equal(other)
        assert target == same
    assert sorted({each[0] for each in store.requests}) == ["GET", "HEAD"]
    assert len(store.requests) == 40
    assert store.most_at_once > 4
    store.delay = 0.0
    store.put(f"bucket/val/{there.id(3)}", store.objects[f"bucket/val/{there.id(4)}"][0])
    with pytest.raises(OSError, match="has changed since the run started"):
        there.__getitems__([3])
    del store.objects[f"bucket/val/{there.id(5)}"]
    with pytest.raises(FileNotFoundError):
        there.__getitems__([5])
    assert folder_of("s3://bucket/val").content_fingerprint(range(19)) != first


def test_folders_of_parts_and_without_pictures_are_refused(store: ObjectStore) -> None:
    for name in ("sets/train/a/1.png", "sets/val/a/1.png", "flat/1.png", "flat/2.png"):
        store.put(f"bucket/{name}", b"x")
    with pytest.raises(
        UsageError, match=r"parts of a data set.* Give one of them: --data s3://bucket/sets/val"
    ):
        folder_of("s3://bucket/sets")
    with pytest.raises(UsageError, match=r"0 class folders without images and 2 images beside them"):
        folder_of("s3://bucket/flat")
    store.put("bucket/odd/a//1.png", b"x")
    with pytest.raises(
        UsageError, match=r"s3://bucket/odd holds an object a//1.png, whose key has an empty part"
    ):
        folder_of("s3://bucket/odd")


def test_manifests_name_pictures_in_stores(store: ObjectStore, tmp_path: Path) -> None:
    as_folder(fashion(20), tmp_path)
    names = [name for name, _ in fashion(20)]
    rows = "\n".join(["path,label", *(f"{name},{name[:1]}" for name in names), "9/none.png,9"])
    (tmp_path / "val/val.csv").write_text(rows)
    put_all(store, tmp_path, "bucket")
    options: dict[str, Any] = {"keep": (), "quoting": None, "path_column": None, "label_column": None}
    label = FolderLabels(order=None, **BY_NAME)
    for at, root in (
        (path_at("s3://bucket/val/val.csv"), None),
        (tmp_path / "val/val.csv", "s3://bucket/val"),
    ):
        images = manifest.open_images(at, image_root=root, label=label, **options)
        assert [images.id(index) for index in range(20)] == names
        assert images.path(0) == f"s3://bucket/val/{names[0]}"
        images.preprocessing = Preprocessing(resize=20, crop=16)
        assert len(images.__getitems__(range(20))) == 20
        with pytest.raises(FileNotFoundError):
            images.__getitems__([20])
    with pytest.raises(UsageError, match="its rows name 21 files, and none exists"):
        manifest.open_images(tmp_path / "val/val.csv", image_root="s3://bucket/val/9", label=label, **options)
    (tmp_path / "val/val.csv").write_text(rows.replace(names[3], f"./{names[3]}"))
    with pytest.raises(UsageError, match=rf"the path './{names[3]}' has an empty part, . or .. in it"):
        manifest.open_images(tmp_path / "val/val.csv", image_root="s3://bucket/val", label=label, **options)
    with pytest.raises(UsageError, match="not over https://"):
        manifest.open_images(
            path_at(f"{store.endpoint}/bucket/val/val.csv"), image_root=None, label=label, **options
        )
