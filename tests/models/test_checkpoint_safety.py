"""Malicious checkpoints of each kind: what could run code is refused with the reason, and does not run."""

from __future__ import annotations

import importlib
import io
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from dualeval.errors import UsageError
from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.models.checkpoints.finding import is_read
from tests.conftest import working_module
from tests.models.test_checkpoint_folders import refused, save_distributed
from tests.models.test_weights import CANARY, Canary, assert_equal, small


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work where code of a checkpoint would leave a file; a test that lets it run removes it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / CANARY
    yield path
    assert not path.exists(), "code of a checkpoint ran"


@pytest.fixture
def folder(tmp_path: Path, state: dict[str, Tensor]) -> Path:
    """A folder of torch.distributed.checkpoint, to be changed."""
    return save_distributed({"model": state, "note": "text"}, tmp_path / "folder")


def change(folder: Path, how: Callable[[Metadata], object]) -> None:
    """Change the metadata, and write it as torch does."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - torch has just written it
    how(metadata)
    path.write_bytes(pickle.dumps(metadata))


def stream(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("content", ["model", "model and more", "canary"])
def test_a_full_pickle_is_read_only_where_it_is_trusted(
    canary: Path, zip_format: bool, content: str, state: dict[str, Tensor]
) -> None:
    saved = {
        "model": small(),
        "model and more": {"epoch": 3, "model": small(), "note": [Canary]},
        "canary": {"model": state, "config": Canary()},
    }[content]
    torch.save(saved, "w.pt", _use_new_zipfile_serialization=zip_format)
    message = refused(Path("w.pt"))
    assert "which could run code" in message
    assert "weights_only" not in message  # torch's advice to switch the protection off
    assert message.endswith("--trust-checkpoint reads it as it is, and runs its code.")
    found = read_state_dict(Path("w.pt"), trust=True)
    assert_equal(found.tensors, state)
    assert found.key == ("" if content == "model" else "model")
    assert canary.exists() == (content == "canary")
    if canary.exists():
        canary.rmdir()


def test_a_class_that_cannot_be_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with working_module(
        tmp_path, "theirs", "from torch import nn\nclass Theirs(nn.Linear): pass", monkeypatch
    ):
        monkeypatch.syspath_prepend(tmp_path)
        torch.save(importlib.import_module("theirs").Theirs(2, 2), "w.pt")
        assert read_state_dict(Path("w.pt"), trust=True).tensors.keys() == {"weight", "bias"}
    (tmp_path / "theirs.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match=r"classes that cannot be imported here: No module named 'theirs'"):
        read_state_dict(Path("w.pt"), trust=True)


@pytest.mark.parametrize("trust", [False, True])
def test_programs_are_no_weights(trust: bool) -> None:
    """TorchScript, and what torch.export writes; a canary in a place that their loaders unpickle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which people still have
        script = torch.jit.trace(small().eval(), torch.ones(3, 4))  # type: ignore[no-untyped-call]
        torch.jit.save(script, "script.pt")
    with zipfile.ZipFile("script.pt", "a") as archive:
        archive.writestr("script/more.pkl", pickle.dumps(Canary()))
    with zipfile.ZipFile("program.pt2", "w") as archive:  # 30 s less than torch.export
        archive.writestr("program/archive_format", "pt2")
        archive.writestr("program/data/sample_inputs/model.pt", stream(Canary()))
    for name, kind in (("script.pt", "a TorchScript archive"), ("program.pt2", "a torch.export program")):
        with pytest.raises(UsageError) as caught:
            read_state_dict(Path(name), trust=trust)
        assert f"{name} is {kind}" in str(caught.value)
        assert f"--model {name} takes it, with --trust-checkpoint and without --weights" in str(caught.value)


# -- torch.distributed.checkpoint --------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "state_dict_metadata"])
def test_what_metadata_would_run_is_passed_over(
    folder: Path, state: dict[str, Tensor], place: str, trust: bool
) -> None:
    """What it names is passed over: the fixture sees that nothing of it has run."""

    def hide(metadata: Metadata) -> None:
        if place == "state_dict_metadata":
            metadata.state_dict_metadata["more"] = Canary()  # type: ignore[assignment]
        else:
            setattr(metadata, place, Canary())

    change(folder, hide)
    if place == "planner_data":  # which says how the names are nested
        assert "found: model.0.weight, " in refused(folder)
    else:
        assert_equal(read_state_dict(folder, trust=trust).tensors, state)


@pytest.mark.parametrize("place", ["whole", "key"])
def test_metadata_that_is_code_is_refused(folder: Path, place: str) -> None:
    if place == "whole":
        (folder / ".metadata").write_bytes(pickle.dumps(Canary()))
    else:
        change(folder, lambda metadata: metadata.storage_data.update({(Canary(),): 1}))
    assert ".metadata is damaged" in refused(folder)


def test_the_metadata_of_an_older_torch_is_read(folder: Path, state: dict[str, Tensor]) -> None:
    """Up to 2.2 two classes were in another module."""
    path = folder / ".metadata"
    content = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)  # noqa: S301 - torch has just written it
    older = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    for now, then in ((b"TensorProperties", b"TensorProperties"), (b"_MEM_FORMAT_E", b"MEM_FORMAT_E")):
        assert b"ctorch.distributed.checkpoint.metadata\n" + now in content
        content = content.replace(b"ctorch.distributed.checkpoint.metadata\n" + now, older + then)
    path.write_bytes(content)
    assert_equal(read_state_dict(folder).tensors, state)


def test_entries_that_are_pickles_are_never_read(folder: Path, state: dict[str, Tensor]) -> None:
    """torch's own reader loads them without its protection."""
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()

    def place(metadata: Metadata) -> None:
        # As long as nothing but admitted classes names it.
        info = metadata.storage_data[MetadataIndex("note")]
        data.write_bytes(whole + stream(Canary()))
        info.offset, info.length = len(whole), len(stream(Canary()))

    change(folder, place)
    assert_equal(read_state_dict(folder).tensors, state)
    assert "found: an object" in refused(folder, "note")


def test_a_pickle_in_the_place_of_a_tensor_is_refused(folder: Path) -> None:
    """The metadata says that a parameter is one; it is not taken, and nothing is left at random."""

    def hide(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.0.weight"] = BytesStorageMetadata()

    change(folder, hide)
    message = refused(folder, "model")
    assert "holds no state_dict under the key model" in message
    assert "no tensor is 0.weight" in message


def test_the_extra_state_of_a_module_is_not_read(tmp_path: Path, state: dict[str, Tensor]) -> None:
    save_distributed({**state, "_extra_state": {"a": 1}}, tmp_path / "with")
    found = read_state_dict(tmp_path / "with")
    assert not is_read(found.tensors["_extra_state"])


@pytest.mark.parametrize("content", ["canary", "canary in a dict", "list", "another shape", "another dtype"])
def test_a_part_that_is_no_plain_tensor_is_refused(folder: Path, content: str) -> None:
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    saved = {
        "canary": Canary(),
        "canary in a dict": {"0.weight": Canary()},
        "list": [torch.ones(3, 4)],
        "another shape": torch.ones(4, 3),
        "another dtype": torch.ones(3, 4).double(),
    }[content]

    def place(metadata: Metadata) -> None:
        info = metadata.storage_data[MetadataIndex("model.0.weight", torch.Size([0, 0]))]
        data.write_bytes(whole + stream(saved))
        info.offset, info.length = len(whole), len(stream(saved))

    change(folder, place)
    assert "holds more than plain tensors: model.0.weight cannot be read" in refused(folder)


def forged(**fields: Any) -> Metadata:
    """The metadata of one tensor of two values."""
    chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([2]))
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([2]), [chunk])
    given: dict[str, Any] = {
        "state_dict_metadata": {"w": tensor},
        "planner_data": {"w": ("w",)},
        "storage_data": {MetadataIndex("w", torch.Size([0]), 0): _StorageInfo("__0_0.distcp", 0, 10)},
    }
    return Metadata(**{**given, **fields})


def of_parts(*parts: tuple[list[int], list[int]]) -> Metadata:
    """A tensor of two values, which has other parts: what none of them has would be left at random."""
    chunks = [ChunkStorageMetadata(torch.Size(begins), torch.Size(sizes)) for begins, sizes in parts]
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([2]), chunks)
    info = _StorageInfo("__0_0.distcp", 0, 10)
    stored = {MetadataIndex("w", chunk.offsets, number): info for number, chunk in enumerate(chunks)}
    return forged(state_dict_metadata={"w": tensor}, storage_data=stored)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (of_parts(([0], [1])), "the parts of w are not the whole tensor"),
        (of_parts(([0], [2]), ([1], [1])), "the parts of w are not the whole tensor"),
        (of_parts(([1], [2])), "the parts of w are not the whole tensor"),
        (forged(storage_data={}), "does not say where w lies"),
        (forged(storage_data=3), "is damaged"),
        (forged(planner_data={"w": ([],)}), "is damaged"),
        (forged(storage_data={MetadataIndex("w"): _StorageInfo("__0_0.distcp", -1, 10)}), "cannot be read"),
        (forged(storage_data={MetadataIndex("w"): _StorageInfo("__0_0.distcp", 0, 2**62)}), "is cut short"),
        (
            forged(storage_data={MetadataIndex("w"): _StorageInfo("__0_0.distcp", 0, 4, ["zstd"])}),
            "compressed",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_forged_metadata_is_refused(folder: Path, metadata: Metadata, said: str) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert said in refused(folder)


def test_torch_itself_runs_what_is_refused_here(folder: Path, canary: Path) -> None:
    """The canary sings: the tests above would see it."""
    change(folder, lambda metadata: setattr(metadata, "planner_data", Canary()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no process group is there
        load({"model": small().state_dict()}, checkpoint_id=folder, no_dist=True)
    assert canary.exists()
    canary.rmdir()
