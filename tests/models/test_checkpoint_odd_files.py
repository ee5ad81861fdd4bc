"""Checkpoints in odd but legal forms: read right, or refused with the reason; nothing stays at random."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.models.checkpoints import read_state_dict
from dualeval.models.transformers_folder import refuse_foreign_kernels
from dualeval.models.weights import load_into, load_state_dict
from tests.models.test_checkpoint_folders import save_distributed
from tests.models.test_weights import assert_equal


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
def test_a_compressed_file_and_one_of_the_other_byte_order(
    tmp_path: Path, compression: int, foreign: bool
) -> None:
    path = tmp_path / "a.pt"
    torch.save(values(), path)
    packed_again(path, compression, foreign)
    model = nn.Linear(4, 3)
    load_state_dict(model, read_state_dict(path), source="a.pt")
    assert_equal(model.state_dict(), values())


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


def test_a_flipped_bit_of_what_torch_reads_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(nn.Linear(4, 3), path)
    flip_a_bit(path, "data/0")
    with pytest.raises(UsageError, match=r"its record a/data/0 does not fit its CRC32"):
        read_state_dict(path, trust=True)


def test_a_flipped_bit_in_a_distributed_part(tmp_path: Path) -> None:
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
    model = nn.Linear(4, 3)
    load_state_dict(model, read_state_dict(tmp_path / "a.pt"), source="a.pt")
    assert_equal(model.state_dict(), values())


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
def test_configuration_that_names_code_of_a_repository(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Remove .*attn_implementation from the file"):
        refuse_foreign_kernels(config, tmp_path)
    refuse_foreign_kernels({"_attn_implementation": "sdpa", "name": "a/b"}, tmp_path)
