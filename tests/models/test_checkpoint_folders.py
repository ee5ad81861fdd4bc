"""Checkpoints in folders, of training libraries, and in odd but legal forms: read right, or refused."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # here, not with the first optimizer: the import sets an environment variable
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

from dualeval.errors import UsageError
from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.models.loading import load_into, load_state_dict
from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.models.transformers_folder import refuse_foreign_kernels
from dualeval.models.weights import LoadedWeights
from tests.conftest import ROOT, Launch
from tests.models.test_weights import assert_equal, small
from tests.vehicles.checkpoint_writers import tied
from tests.vehicles.launchers import start


def refused(path: Path, key: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        read_state_dict(path, key)
    message = str(caught.value)
    assert "\n" not in message
    return message


def save_distributed(content: dict[str, Any], folder: Path) -> Path:
    """Save as one process does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no process group is there
        save(content, checkpoint_id=folder, no_dist=True)
    return folder


def sharded(state: dict[str, Tensor], folder: Path, *, safe: bool = True, size: int = 60) -> Path:
    """Save in several files, as transformers does; returns the index."""
    folder.mkdir(exist_ok=True)
    save_torch_state_dict(state, folder, max_shard_size=size, safe_serialization=safe)
    return folder / ("model.safetensors.index.json" if safe else "pytorch_model.bin.index.json")


def assert_loads(model: nn.Module, path: Path, wanted: dict[str, Tensor]) -> LoadedWeights:
    """The model has these values when it is loaded, and none of its own."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = load_state_dict(model, read_state_dict(path), source="w")
    assert_equal(model.state_dict(), wanted)
    return loaded


# -- several files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_several_files_with_their_index_are_one_checkpoint(
    tmp_path: Path, state: dict[str, Tensor], safe: bool
) -> None:
    index = sharded(state, tmp_path, safe=safe)
    files = [path for path in tmp_path.iterdir() if path != index]
    assert len(files) > 1
    for path in (tmp_path, index):
        found = read_state_dict(path)
        assert (found.path, found.key) == (path, "")
        assert_equal(dict(sorted(found.tensors.items())), dict(sorted(state.items())))
    assert_loads(small(), tmp_path, state)
    assert f"Give the whole: --weights {tmp_path}" in refused(files[0])


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, state: dict[str, Tensor]) -> None:
    index = sharded(state, tmp_path)
    content = json.loads(index.read_text())
    name = content["weight_map"]["0.weight"]
    first, second = sorted({*content["weight_map"].values()})[:2]
    for change, said in (
        ({"0.weight": second}, "not belong to model.safetensors.index.json: only one of them has 0.weight"),
        ({"other.weight": first}, "only one of them has other.weight"),
        ({"0.weight": "no.safetensors"}, "names the file no.safetensors, which is not beside it"),
    ):
        index.write_text(json.dumps({"weight_map": {**content["weight_map"], **change}}))
        assert said in refused(tmp_path), name
    index.write_text(json.dumps({"metadata": {}}))
    assert "has no weight_map" in refused(tmp_path)
    index.write_text("{")
    assert "is not readable JSON" in refused(tmp_path)
    index.unlink()
    assert "or an index with its files" in refused(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_with_one_file_of_weights_is_read(
    tmp_path: Path, state: dict[str, Tensor], name: str
) -> None:
    """As transformers and accelerate save, with an optimizer beside it."""
    if name.endswith("bin"):
        torch.save(state, tmp_path / name)
    else:
        save_file(state, tmp_path / name)
    torch.save({"state": {}}, tmp_path / "optimizer.bin")
    (tmp_path / "config.json").write_text("{}")
    assert read_state_dict(tmp_path).tensors.keys() == state.keys()


def test_of_two_in_a_folder_none_is_taken(tmp_path: Path, state: dict[str, Tensor]) -> None:
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "pytorch_model.bin")
    message = refused(tmp_path)
    assert "holds 2 checkpoints" in message
    assert message.endswith(f"Say which is meant, such as --weights {tmp_path / 'model.safetensors'}")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, state: dict[str, Tensor]) -> None:
    assert "holds no checkpoint (found: nothing)" in refused(tmp_path)
    torch.save({}, tmp_path / "optimizer.pt")
    torch.save(state, tmp_path / "model-00001-of-00002.pt")
    assert "holds no checkpoint (found: model-00001-of-00002.pt, optimizer.pt)" in refused(tmp_path)


def test_the_one_file_of_weights_of_a_training_script_is_read(
    tmp_path: Path, state: dict[str, Tensor]
) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, tmp_path / name)
    torch.save({"model": state}, tmp_path / "model.pt")
    found = read_state_dict(tmp_path)
    assert found.key == "model" and found.tensors.keys() == state.keys()
    torch.save(state, tmp_path / "ema.pt")
    assert f"holds 2 checkpoints: {tmp_path / 'ema.pt'}, {tmp_path / 'model.pt'}. They" in refused(tmp_path)


# -- torch.distributed.checkpoint --------------------------------------------------------------------------


def test_all_dtypes_and_layouts_are_read(tmp_path: Path) -> None:
    state = {
        "half": torch.rand(3).half(),
        "brain": torch.rand(3, 2).bfloat16(),
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "turned": torch.rand(4, 3).T,
        "last": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "flags": torch.tensor([True, False]),
        "complex": torch.rand(3, dtype=torch.complex64),
    }
    save_distributed(state, tmp_path / "folder")
    torch.save(state, tmp_path / "w.pt")
    for path in (tmp_path / "folder", tmp_path / "w.pt"):
        found = read_state_dict(path)
        assert_equal(found.tensors, state)
        for name, tensor in found.tensors.items():
            target = torch.zeros_like(
                state[name], dtype=torch.complex128 if name == "complex" else torch.float64
            )
            assert torch.equal(target.copy_(tensor), state[name].to(target.dtype))


def test_parts_of_a_tensor_are_put_together(tmp_path: Path, launch: Launch) -> None:
    """FSDP on two ranks has saved it."""
    script = ROOT / "tests/vehicles/workers/checkpoint_worker.py"
    worker: list[str | Path] = [sys.executable, script, "model", tmp_path]
    launch([*start("torchrun", 2), *worker], variables={"OMP_NUM_THREADS": "1"}).ok()
    assert len(list((tmp_path / "folder").glob("*.distcp"))) == 2
    wanted = torch.load(tmp_path / "whole.pt", weights_only=True)
    found = read_state_dict(tmp_path / "folder")
    assert found.key == "model"
    assert_equal(dict(sorted(found.tensors.items())), dict(sorted(wanted.items())))
    parts = [tensor.source.parts for tensor in found.tensors.values() if tensor.dim()]
    assert max(map(len, parts)) == 2


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, state: dict[str, Tensor]) -> None:
    save_distributed({"model": state}, tmp_path)
    data = tmp_path / "__0_0.distcp"
    assert f"Give the whole: --weights {tmp_path}" in refused(data)
    assert f"Give the whole: --weights {tmp_path}" in refused(tmp_path / ".metadata")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    assert "is cut short" in refused(tmp_path)
    data.write_bytes(b"\0" * len(whole))
    assert "is damaged, or holds more than plain tensors" in refused(tmp_path)
    data.unlink()
    assert "is missing, which .metadata names" in refused(tmp_path)
    metadata = (tmp_path / ".metadata").read_bytes()
    for length in range(0, len(metadata), len(metadata) // 30):
        (tmp_path / ".metadata").write_bytes(metadata[:length])
        assert ".metadata is damaged" in refused(tmp_path)
    (tmp_path / ".metadata").unlink()
    data.write_bytes(whole)
    assert "holds no checkpoint (found: __0_0.distcp)" in refused(tmp_path)


# -- DeepSpeed ---------------------------------------------------------------------------------------------


def save_deepspeed(module: dict[str, Tensor], folder: Path) -> Path:
    """The files of DeepSpeed's save_checkpoint with ZeRO-1 or -2, with what its engine puts into them."""
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    content = {
        "module": module,
        "optimizer": None,
        "param_shapes": [OrderedDict((name, tensor.shape) for name, tensor in module.items())],
        "shared_params": {},
        "sparse_tensor_module_names": set[str](),
        "ds_config": {"train_batch_size": 8, "zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
    }
    torch.save(content, step / "mp_rank_00_model_states.pt")
    for rank in range(2):
        momenta = {"optimizer_state_dict": {"zero_stage": 2, "state": torch.rand(30)}}
        torch.save(momenta, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return step


def test_a_checkpoint_of_deepspeed_is_read(tmp_path: Path, state: dict[str, Tensor]) -> None:
    halves = {name: t.half() if t.is_floating_point() else t for name, t in state.items()}
    step = save_deepspeed(halves, tmp_path)
    for path in (tmp_path, step, step / "mp_rank_00_model_states.pt"):
        found = read_state_dict(path)
        assert found.key == "module"
        assert_equal(found.tensors, halves)
    model = small()
    load_state_dict(model, read_state_dict(tmp_path), source="w")
    assert torch.equal(model.state_dict()["0.weight"], halves["0.weight"].float())


def test_partitioned_parameters_are_refused_with_the_command_for_them(
    tmp_path: Path, state: dict[str, Tensor]
) -> None:
    step = save_deepspeed(state, tmp_path)
    (step / "mp_rank_00_model_states.pt").rename(step / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    wanted = f"python {tmp_path}/zero_to_fp32.py {tmp_path} OUT --tag global_step7; then give --weights OUT"
    assert refused(tmp_path).endswith(wanted)
    assert refused(step).endswith(wanted)


def test_other_parts_of_deepspeed_are_refused(tmp_path: Path, state: dict[str, Tensor]) -> None:
    step = save_deepspeed(state, tmp_path)
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt")
    assert "was saved by a pipeline or by model-parallel ranks" in refused(tmp_path)
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "layer_00-model_00-model_states.pt")
    assert "was saved by a pipeline or by model-parallel ranks" in refused(tmp_path)
    for path in step.iterdir():
        path.unlink()
    assert "has no mp_rank_00_model_states.pt" in refused(tmp_path)
    (tmp_path / "latest").write_text("global_step9\n")
    assert "names the folder global_step9, which is not there" in refused(tmp_path)


# -- Lightning and timm ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """Those of tests/vehicles/checkpoint_writers.py; the libraries are imported in another process."""
    folder = tmp_path_factory.mktemp("written")
    launch([sys.executable, "-m", "tests.vehicles.checkpoint_writers", folder], cwd=ROOT).ok()
    return folder


def test_a_checkpoint_of_lightning_is_read(written: Path) -> None:
    wanted = torch.load(written / "a.wanted", weights_only=True)
    kept = next((written / "kept").glob("*.ckpt"))
    for path in (written / "a.ckpt", kept):
        loaded = assert_loads(small(), path, wanted)
        assert (loaded.key, loaded.prefix) == ("state_dict", "model.")


def test_of_two_state_dicts_of_timm_one_is_chosen_by_its_key(written: Path) -> None:
    path = written / "model_best.pth.tar"
    assert "holds 2 state_dicts: state_dict (9 tensors), state_dict_ema (9 tensors)" in refused(path)
    for key, name in (("state_dict", "model"), ("state_dict_ema", "average")):
        wanted = torch.load(written / f"{name}.wanted", weights_only=True)
        assert_equal(read_state_dict(path, key).tensors, wanted)


# -- tied weights ------------------------------------------------------------------------------------------


def test_a_tied_name_may_be_left_out_of_the_file(tmp_path: Path) -> None:
    model = tied()
    save_model(model, str(tmp_path / "w.safetensors"))
    found = read_state_dict(tmp_path / "w.safetensors")
    assert len(found.tensors) == len(model.state_dict()) - 1
    assert_loads(tied(), tmp_path / "w.safetensors", model.state_dict())
    with pytest.raises(UsageError, match=r"1 missing in the file: [01]\.weight"):
        load_state_dict(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), found, source="w")


@pytest.mark.parametrize("form", ["one storage", "two", "folder"])
def test_tied_names_with_equal_values_are_read(tmp_path: Path, form: str) -> None:
    model = tied()
    state = model.state_dict()
    if form != "one storage":
        state = {name: tensor.clone() for name, tensor in state.items()}
    path = tmp_path / "w.pt"
    if form == "folder":
        path = save_distributed(state, tmp_path)
    else:
        torch.save(state, path)
    assert_loads(tied(), path, model.state_dict())


def test_tied_names_with_different_values_are_refused() -> None:
    model = tied()
    state = {**model.state_dict(), "1.weight": torch.ones(3, 3)}
    with pytest.raises(UsageError, match=r"different values for 0\.weight and 1\.weight"):
        load_into(model, state, "the weights w.pt")


# -- all ranks ---------------------------------------------------------------------------------------------


def test_ranks_with_different_files_under_one_path_do_not_start(tmp_path: Path, launch: Launch) -> None:
    for rank in range(2):
        home = tmp_path / str(rank)
        home.mkdir()
        torch.manual_seed(rank)
        torch.save(FashionCNN().state_dict(), home / "w.pt")
    words = "-m dualeval run --model fashion-cnn --weights w.pt --limit 200 --no-progress"
    command = f"cd {tmp_path}/$RANK && exec {sys.executable} {words} --data {ROOT}/dualeval/assets"
    torchrun = [*start("torchrun", 2), "bash", "-c", f"{command} --out {tmp_path}/out"]
    done = launch(torchrun, variables={"OMP_NUM_THREADS": "1"})
    assert done.returncode != 0
    assert "rank 1 on" in done.stderr, done.stderr
    assert "the file of --weights is not the same for all ranks. Compare it on " in done.stderr
    assert not (tmp_path / "out/result.json").exists()


# -- odd but legal forms: read right, or refused with the reason; nothing stays at random ----------------


def packed_again(path: Path, compression: int, foreign: bool) -> None:
    """Write a file of torch.save anew: compressed, or as on a machine with the other byte order."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    if foreign:
        other = "big" if sys.byteorder == "little" else "little"
        for name, record in records.items():
            if name.endswith("byteorder"):
                records[name] = other.encode()
            elif "/data/" in name:
                width = 8 if len(record) == 8 else 4  # one counter is int64, the rest float32
                records[name] = b"".join(
                    record[place : place + width][::-1] for place in range(0, len(record), width)
                )
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, record in records.items():
            archive.writestr(name, record)


def values() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {"weight": torch.randn(3, 4), "bias": torch.zeros(3)}


@pytest.mark.parametrize(
    ("compression", "foreign"), [(zipfile.ZIP_DEFLATED, False), (zipfile.ZIP_STORED, True)]
)
def test_compressed_files_and_those_of_other_byte_order_are_read(
    tmp_path: Path, compression: int, foreign: bool
) -> None:
    path = tmp_path / "a.pt"
    torch.save(values(), path)
    packed_again(path, compression, foreign)
    assert_loads(nn.Linear(4, 3), path, values())


def flip_a_bit(path: Path, record: str) -> None:
    """Flip one bit in the middle of a record of a zip file, which lies in this file."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        [values] = [archive.read(name) for name in archive.namelist() if name.endswith(record)]
    content[content.index(values) + len(values) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("record", ["data/0", "data/2", "data/3", "data.pkl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_flipped_bit_is_named(tmp_path: Path, record: str, dtype: torch.dtype) -> None:
    path = tmp_path / "a.pt"
    torch.manual_seed(3)
    saved = {
        "plain": torch.randn(3, 4),
        "scalar": torch.tensor(2),
        "large": torch.randn(700, 900),
        "channels_last": torch.randn(2, 3, 300, 301).to(memory_format=torch.channels_last),
    }
    torch.save(saved, path)
    into = {name: torch.empty_like(value, dtype=dtype) for name, value in saved.items()}
    for name, value in read_state_dict(path).tensors.items():
        into[name].copy_(value)
        assert torch.equal(into[name], saved[name].to(dtype))
    flip_a_bit(path, record)
    with pytest.raises(UsageError, match=rf"a\.pt is .*: its record a/{record} does not fit its CRC32"):
        for name, value in read_state_dict(path).tensors.items():
            into[name].copy_(value)


def test_a_flipped_bit_of_what_torch_reads_itself_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(nn.Linear(4, 3), path)
    flip_a_bit(path, "data/0")
    with pytest.raises(UsageError, match=r"its record a/data/0 does not fit its CRC32"):
        read_state_dict(path, trust=True)


def test_a_flipped_bit_in_a_distributed_part_is_named(tmp_path: Path) -> None:
    save_distributed(values(), tmp_path / "a")
    [file] = (tmp_path / "a").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(values()["weight"].numpy().tobytes()) + 9] ^= 1
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"distcp is damaged: its record archive/data/0 does not fit"):
        load_state_dict(nn.Linear(4, 3), read_state_dict(tmp_path / "a"), source="a")


def test_a_file_without_crc32_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(values(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_loads(nn.Linear(4, 3), tmp_path / "a.pt", values())


class _Forgiving(nn.Linear):
    """Loads what it finds, and says so."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = False, assign: bool = False
    ) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class _Silent(nn.Linear):
    """Loads what it finds, and says nothing."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: object) -> None:
        self.weight.data.copy_(state_dict[f"{prefix}weight"])


@pytest.mark.parametrize("kind", [_Forgiving, _Silent])
def test_a_model_that_forgives_is_not_left_at_random(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(kind(4, 3)) if kind is _Silent else kind(4, 3)
    prefix = "0." if kind is _Silent else ""
    with pytest.raises(UsageError, match=r"1 missing in the file: .*bias"):
        load_into(model, {f"{prefix}weight": values()["weight"]}, "the weights")


def test_a_model_that_forgives_takes_no_other_tensors() -> None:
    with pytest.raises(UsageError, match="1 not in the model: more"):
        load_into(_Forgiving(4, 3), {**values(), "more": torch.zeros(1)}, "the weights")


class _SharesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.other.weight = nn.Parameter(self.one.weight.data)


def test_parameters_in_the_same_memory_are_tied(tmp_path: Path) -> None:
    saved = _SharesMemory()
    save_model(saved, str(tmp_path / "a.safetensors"))
    model = _SharesMemory()
    load_state_dict(model, read_state_dict(tmp_path / "a.safetensors"), source="a")
    assert torch.equal(model.other.weight, saved.one.weight)
    with pytest.raises(UsageError, match="different values for"):
        load_into(model, {"one.weight": torch.ones(4, 4), "other.weight": torch.zeros(4, 4)}, "a")


@pytest.mark.parametrize(
    "config",
    [
        {"_attn_implementation": "kernels-community/flash-attn"},
        {"vision_config": {"attn_implementation": "a/b"}},
        {"attn_implementation": {"text_config": "a/b"}},
    ],
)
def test_a_configuration_that_names_foreign_code_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Remove .*attn_implementation from the file"):
        refuse_foreign_kernels(config, tmp_path)
    refuse_foreign_kernels({"_attn_implementation": "sdpa", "name": "a/b"}, tmp_path)
