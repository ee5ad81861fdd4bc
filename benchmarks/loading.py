"""Peak memory of a rank while it loads weights, as a factor of the model's size, by form of checkpoint.

Each rank is a new process (of a torchrun of its own) that builds the model through ``classifiers.build``.
Counted is the most that the process has held (VmHWM, private and resident file pages) over what it held
before, by the bytes of the model's tensors. Of several ranks the largest counts. Beside it, what torch's and
safetensors' own reading into a model takes.

    python benchmarks/loading.py                  # 400 MB on 1 and 4 ranks: a table, and a page in results/
    python benchmarks/loading.py --megabytes 40   # a trial
    python benchmarks/loading.py --json           # {"safetensors": {"1": 1.02, "4": 1.02, "library": 2}, ...}
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import ONE_THREAD, machine, python_or_torchrun, run_process, table, write_results
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dualeval.models import classifiers
from dualeval.tools.bench.measuring import peak_of_process

SIZES = (1, 4)
MEGABYTES = 400
WANTED = 1.2
_WIDTH = 1024
_SHARDS = 4
_TIMEOUT_S = 300
_VARIABLE = "DUALEVAL_BENCHMARK_LAYERS"

State = dict[str, Tensor]


def stack() -> nn.Module:
    """The model that is loaded: linear layers of 4 MB each, as many as the environment says."""
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(int(os.environ[_VARIABLE]))))


# -- writing ---------------------------------------------------------------------------------------------


def _momenta(state: State) -> dict[str, Any]:
    """What AdamW keeps: twice the model."""
    return {"state": {name: {"exp_avg": value, "exp_avg_sq": value * 2} for name, value in state.items()}}


def _several_files(state: State, path: Path) -> None:
    names = list(state)
    files = {
        name: f"model-{place % _SHARDS + 1:05}-of-{_SHARDS:05}.safetensors"
        for place, name in enumerate(names)
    }
    path.mkdir()
    for file in sorted(set(files.values())):
        save_file({name: state[name] for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _distributed(content: dict[str, Any], path: Path) -> None:
    # Here, not in the ranks: they would hold the library before they load.
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no process group is there
        save(content, checkpoint_id=path, no_dist=True)


FORMS: dict[str, Callable[[State, Path], object]] = {
    "torch.save": torch.save,
    "torch.save, with an optimizer": lambda state, path: torch.save(
        {"model": {**state}, "optimizer": _momenta(state)}, path
    ),
    "torch.save, in float16": lambda state, path: torch.save(
        {name: value.half() for name, value in state.items()}, path
    ),
    "safetensors": lambda state, path: save_file(state, path),
    "safetensors in 4 files": _several_files,
    "DCP": lambda state, path: _distributed({"model": state}, path),
    "DCP, with an optimizer": lambda state, path: _distributed(
        {"model": state, "optimizer": _momenta(state)}, path
    ),
    "torch.save, format before 1.6": lambda state, path: torch.save(
        state, path, _use_new_zipfile_serialization=False
    ),
}
# Held as torch loads it, beside the model: docs/checkpoints.md says so.
WHOLE = ("torch.save, format before 1.6",)


# -- as the libraries read ----------------------------------------------------------------------------------


def _mapped(model: nn.Module, path: Path) -> None:
    content = torch.load(path, weights_only=True, mmap=True)
    model.load_state_dict(content.get("model", content))


def _unmapped(model: nn.Module, path: Path) -> None:
    model.load_state_dict(torch.load(path, weights_only=True))


def _by_name(model: nn.Module, path: Path) -> None:
    own = model.state_dict()
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with safe_open(file, "pt") as opened, torch.no_grad():
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                own[name].copy_(opened.get_slice(name)[:])


def _gathered(model: nn.Module, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no process group is there
        load({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)


def as_library(form: str, path: Path) -> nn.Module:
    """The model with its weights, read by torch.load(mmap=True), safe_open or dcp.load."""
    model = stack()
    if form.startswith("safetensors"):
        _by_name(model, path)
    elif form.startswith("DCP"):
        _gathered(model, path)
    else:
        (_unmapped if form in WHOLE else _mapped)(model, path)
    return model


# -- measuring -------------------------------------------------------------------------------------------


def be_rank(weights: Path, form: str | None) -> None:
    """Load, and write what it took to WEIGHTS.RANK, beside the checkpoint; of a form as its library does."""
    # What the first use of these costs is no part of loading.
    importlib.import_module("loading")
    if form is not None and form.startswith("DCP"):
        importlib.import_module("torch.distributed.checkpoint.state_dict_loader")
    nn.Linear(_WIDTH, _WIDTH)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here
    before = peak_of_process()
    model = (
        classifiers.build("loading:stack", str(weights), None) if form is None else as_library(form, weights)
    )
    peak = peak_of_process() - before
    size = sum(value.nbytes for value in model.state_dict().values())
    rank = os.environ.get("RANK", "0")
    weights.with_name(f"{weights.name}.{rank}").write_text(json.dumps([peak, size]))


def measure(weights: Path, size: int, form: str | None = None) -> float:
    """The largest factor of so many new processes; of a form as its library reads it."""
    for path in weights.parent.glob(f"{weights.name}.[0-9]*"):
        path.unlink()
    arguments = [str(Path(__file__).resolve()), "--rank-of", str(weights)]
    arguments += [] if form is None else ["--as-library", form]
    command = python_or_torchrun(size, *arguments)
    run_process(command, timeout_s=_TIMEOUT_S, environ={**os.environ, **ONE_THREAD})
    found = [json.loads(path.read_text()) for path in weights.parent.glob(f"{weights.name}.[0-9]*")]
    assert len(found) == size, f"{len(found)} of {size} ranks wrote their peak"
    return max(float(peak / whole) for peak, whole in found)


def measure_all() -> dict[str, dict[str, float]]:
    """Factors by form and number of ranks; each form is written, measured and removed."""
    torch.manual_seed(0)
    state = stack().state_dict()
    factors: dict[str, dict[str, float]] = {}
    for form, write in FORMS.items():
        with tempfile.TemporaryDirectory(prefix="dualeval-loading-") as folder:
            weights = Path(folder) / ("weights.safetensors" if form == "safetensors" else "weights")
            write(state, weights)
            factors[form] = {str(size): round(measure(weights, size), 3) for size in SIZES}
            factors[form]["library"] = round(measure(weights, 1, form), 3)
    return factors


def main() -> None:
    """Measure every form; print JSON, or print a table and write it to the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print factors and write nothing")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="size of the model")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--as-library", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        be_rank(arguments.rank_of, arguments.as_library)
        return
    os.environ[_VARIABLE] = str(max(1, arguments.megabytes * 1_000_000 // (_WIDTH * _WIDTH * 4)))
    host = machine()
    factors = measure_all()
    if arguments.json:
        print(json.dumps(factors))
        return
    columns = [*map(str, SIZES), "library"]
    rows = [[form, *(f"{found[column]:.2f}" for column in columns)] for form, found in factors.items()]
    worst = max(found[str(size)] for form, found in factors.items() if form not in WHOLE for size in SIZES)
    head = ["form", *(f"{size} rank{'s' * (size > 1)}" for size in SIZES), "by the library, 1 rank"]
    body = (
        f"Wanted: at most {WANTED} for all forms but the format before torch 1.6; the largest is "
        f"{worst:.2f}. Peak "
        "memory of a rank while it loads, less what it held before, by the size of the model "
        f"({arguments.megabytes} "
        f"MB; linear layers of 4 MB). Private and resident file pages count (VmHWM).\n\n{table(head, rows)}"
    )
    write_results("loading", "Memory while loading weights", body, {"factors": factors}, host)


if __name__ == "__main__":
    main()
