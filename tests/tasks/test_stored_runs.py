"""Runs over data in an object store: those of the folder, to the digest; a store of moto's among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualeval.data.cache import DataCache
from dualeval.data.stores import arrow
from dualeval.errors import StoreError
from dualeval.result import Result, read_result
from dualeval.tools.pack.packing import pack_task
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate
from tests.tasks.test_packed_runs import COUNT, run, task_of
from tests.vehicles.faults import ended_run
from tests.vehicles.moto_store import moto_store
from tests.vehicles.object_store import CREDENTIALS, Handler, ObjectStore, object_store, put_all
from tests.vehicles.packed_pictures import JOB, as_folder, as_parquet, as_tars, fashion

SHARDS = "bucket/shards/val-{0..2}.tar"
PARQUET = "bucket/parquet/test-{00000..00001}-of-00002.parquet"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("stored")
    for pack in (as_folder, as_tars, as_parquet):
        pack(fashion(COUNT), home)
    rows = [f"{name},{name[:1]}" for name, _ in fashion(COUNT)]
    (home / "val/val.csv").write_text("\n".join(["path,label", *rows]))
    return home


@pytest.fixture(scope="module")
def of_folder(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(home / "val", tmp_path_factory.mktemp("run") / "out")


@pytest.fixture(scope="module")
def store(home: Path) -> Iterator[ObjectStore]:
    with object_store() as running:
        put_all(running, home, "bucket")
        yield running


@pytest.fixture
def variables(store: ObjectStore, tmp_path: Path) -> dict[str, str]:
    return {**CREDENTIALS, "AWS_ENDPOINT_URL": store.endpoint, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def check(result: Result, of_folder: Result) -> None:
    assert result.samples["evaluated"] == COUNT
    assert result.metrics_digest == of_folder.metrics_digest
    assert result.samples_digest == of_folder.samples_digest


@pytest.mark.parametrize(
    "form",
    [
        f"s3://{SHARDS}",
        f"HTTP/{SHARDS}",
        "s3://bucket/val",
        "s3://bucket/val/val.csv",
        "s3://bucket/parquet",
        f"HTTP/{PARQUET}",
    ],
)
def test_each_form_has_the_digests_of_the_folder(
    store: ObjectStore,
    variables: dict[str, str],
    of_folder: Result,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arrow._make.cache_clear()
    data = form.replace("HTTP", store.endpoint)
    result = run(Path(data), out)
    check(result, of_folder)
    text = (out / "result.json").read_text()
    assert f'"data": "{data}"' in text
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in text


def expired_after(count: int, store: ObjectStore) -> Callable[[Handler], bool]:
    """A fault of a store: its credentials expire after so many requests from now on."""
    store.forget()

    def expired(handler: Handler) -> bool:
        if len(store.requests) < count:
            return False
        handler.refuse(403, "ExpiredToken")
        return True

    return expired


def test_a_store_that_refuses_ends_the_run_where_samples_may_be_skipped(
    store: ObjectStore, variables: dict[str, str], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arrow._make.cache_clear()
    images = task_of(Path(f"s3://{SHARDS}"))

    # In the midst of the loop.
    monkeypatch.setattr(store, "fault", expired_after(40, store))
    with pytest.raises(StoreError, match="credentials have expired"):
        evaluate(images, out, batch_size=4, on_error="skip")


def test_a_store_that_refuses_ends_a_packing_which_goes_on(
    store: ObjectStore, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a pack would have failed samples, for good."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arrow._make.cache_clear()
    monkeypatch.setattr(store, "fault", expired_after(60, store))
    with pytest.raises(StoreError, match="credentials have expired"):
        pack_task(task_of(Path("s3://bucket/val")), tmp_path / "a.pack", 0, DataCache())
    monkeypatch.setattr(store, "fault", None)
    said = pack_task(task_of(Path("s3://bucket/val")), tmp_path / "a.pack", 0, DataCache())
    assert f"{COUNT} samples" in said
    assert "access denied" not in said


@pytest.mark.long
def test_two_ranks_that_are_killed_go_on_to_the_digest(
    launch: Launch, variables: dict[str, str], of_folder: Result, tmp_path: Path
) -> None:
    command = ["dualeval", "run", *JOB, "--data", f"s3://{SHARDS}", "--workers", "1", "--out", "out"]
    command += ["--nproc", "2"]
    fault = "slow:0.1 all 0;kill 1 7"
    killed = ended_run(launch, command, 2, tmp_path, fault=fault, flush_s=0.1, variables=variables)
    assert killed.launchers[0].returncode != 0, killed.said()
    done = ended_run(launch, command, 2, tmp_path, variables=variables)
    assert done.launchers[0].returncode == 0, done.said()
    result = read_result(tmp_path / "out" / "result.json")
    assert result.chunks["resumed"] > 0
    check(result, of_folder)


@pytest.mark.needs("moto")
def test_a_store_of_moto_has_the_digests_of_the_folder(
    home: Path, of_folder: Result, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto_store(home) as endpoint:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        arrow._make.cache_clear()
        for number, data in enumerate((f"s3://{SHARDS}", "s3://bucket/shards")):
            check(run(Path(data), out / str(number)), of_folder)
