"""A large model for small pictures whose ranks write down their peak memory, for tests and a benchmark.

A rank's memory is counted from the moment at which it begins to build the model, until the process ends.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from dualeval.tools.bench.measuring import peak_of_process

# The folder for the peaks of the ranks.
PEAKS = "DUALEVAL_TEST_PEAKS"
CLASSES = 10
_ROOT = Path(__file__).resolve().parents[2]
_SIDE = 28
_PATCH = 7
_HEAD = 64
_EVERY_S = 0.001
# They are imported beforehand: what that costs is no memory of the model. A rank's file says how much it was.
_LIBRARIES = (
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"),
    *("safetensors.torch", "pyarrow.parquet", "pandas", "torch._dynamo"),
)


class Block(nn.Module):
    """A layer of a vision transformer, in 12 * width**2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length, width) to the same shape."""
        batch, length, width = tokens.shape
        qkv = self.qkv(self.norm1(tokens)).view(batch, length, 3, width // _HEAD, _HEAD)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value)
        tokens = tokens + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        mixed: Tensor = tokens + self.down(functional.gelu(self.up(self.norm2(tokens))))
        return mixed


class Transformer(nn.Module):
    """A vision transformer for grey pictures of 28x28 pixels, in patches of 7x7."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, _PATCH, stride=_PATCH)
        self.positions = nn.Parameter(torch.zeros(1, (_SIDE // _PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (batch, 1, 28, 28) to logits (batch, 10)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


def transformer(layers: int, width: int) -> nn.Module:
    """The model; where the environment names a folder, this rank's memory is watched from here on."""
    if PEAKS in os.environ:
        _watch(Path(os.environ[PEAKS]))
    return Transformer(layers, width)


def arguments(megabytes: int) -> dict[str, int]:
    """The arguments that give a model of about this size in float32."""
    width = 384 if megabytes < 500 else 1024
    return {"layers": max(1, round(megabytes * 1_000_000 / (4 * 12 * width**2))), "width": width}


def job(megabytes: int, weights: Path, out: Path, *, samples: int, batch: int) -> list[str]:
    """What comes behind "dualeval": evaluate this checkpoint of the model on the first embedded pictures."""
    given = [f"{name}={value}" for name, value in arguments(megabytes).items()]
    return [
        *("run", "--model", "tests.vehicles.large_model:transformer"),
        *(word for value in given for word in ("--model-arg", value)),
        *("--weights", str(weights), "--data", str(_ROOT / "dualeval/assets"), "--limit", str(samples)),
        *("--batch-size", str(batch), "--no-progress", "--out", str(out)),
    ]


def write(folder: Path, megabytes: int, forms: Sequence[str]) -> dict[str, Path]:
    """Write one random model in several forms of checkpoint; gives their paths by form."""
    torch.manual_seed(0)
    state = Transformer(**arguments(megabytes)).state_dict()
    paths = {form: folder / f"weights-{place}" for place, form in enumerate(forms)}
    for form, path in paths.items():
        _WRITERS[form](state, path)
    return paths


def _write_parts(state: Mapping[str, Tensor], path: Path, parts: int = 4) -> None:
    names = list(state)
    files = {
        name: f"model-{place % parts + 1:05}-of-{parts:05}.safetensors" for place, name in enumerate(names)
    }
    path.mkdir()
    for file in sorted({*files.values()}):
        save_file({name: state[name] for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _write_distributed(state: Mapping[str, Tensor], path: Path) -> None:
    import warnings

    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no process group is there
        save({"model": dict(state)}, checkpoint_id=path, no_dist=True)


TORCH, PARTS, DCP = "torch.save", "safetensors in 4 files", "DCP"
_WRITERS: dict[str, Callable[[dict[str, Tensor], Path], object]] = {
    TORCH: torch.save,
    PARTS: _write_parts,
    DCP: _write_distributed,
}


# -- watching ----------------------------------------------------------------------------------------------


def _memory(*kinds: str) -> list[int]:
    """Bytes of this process by the names of /proc/self/status."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in kinds:
            found[name] = int(value.split()[0]) * 1024
    return [found[kind] for kind in kinds]


def _watch(folder: Path) -> None:
    """Write to FOLDER/RANK.json, at the end of this process, what it has held from now on."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
    [before_libraries] = _memory("VmRSS")
    for library in _LIBRARIES:
        importlib.import_module(library)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    kinds = ("RssAnon", "RssFile", "RssShmem")
    [resident, *before] = _memory("VmRSS", *kinds)
    most = [0, 0, 0]

    def look() -> None:
        for place, (now, first) in enumerate(zip(_memory(*kinds), before, strict=True)):
            most[place] = max(most[place], now - first)

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            look()

    thread = threading.Thread(target=watch, name="memory", daemon=True)

    def write_down() -> None:
        ended.set()
        thread.join()
        peaks = dict(zip(("anonymous", "file", "shared"), most, strict=True))
        peaks |= {"whole": peak_of_process() - resident, "libraries": resident - before_libraries}
        (folder / f"{rank}.json").write_text(json.dumps(peaks))

    atexit.register(write_down)
    thread.start()


def read_peaks(folder: Path) -> list[dict[str, int]]:
    """What the ranks have written: bytes by kind, the rank 0 first."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]
