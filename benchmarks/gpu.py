"""What only GPUs can show, in steps of at most five minutes, each of which is run once; and a page of them.

A step's part lies as JSON in a folder. What has passed is not run again, so that the same command goes on
where it was stopped, and the page is joined from all parts. Every row is measured by processes of its own
(``gpu_worker.py``) under a time limit: a GPU that hangs or breaks costs one row. The exit code is 1 if a row
failed, and 2 without a GPU.

    python benchmarks/gpu.py                                     # on a machine with GPUs, or in a Slurm job
    python benchmarks/gpu.py --list                              # the steps, with estimated minutes
    python benchmarks/gpu.py --step speed,ends                   # some of them
    python benchmarks/gpu.py --minutes 14                        # as many as that leaves time for
    python benchmarks/gpu.py --device cpu --images 64 --rounds 2 # all of it in a small form, on CPUs
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from common import RESULTS, ROOT, end_on_sigterm, machine
from gpu_steps import correct, ends, ranks, speed
from gpu_steps.page import write_page
from gpu_steps.trial import FAILED, Trial, is_finished, part_of, read_part, running, source_here

from dualeval.engine.device.accelerator import nvidia_driver

_ALL = (*correct.STEPS, *ends.STEPS, *speed.STEPS, *ranks.STEPS)
# What is wanted most comes first, where the time may not last.
_FIRST = ("speed-small", "ends", "numbers", "speed-bert", "masks", "speed-jpeg", "ranks-torchrun")
STEPS = {
    step.name: step
    for step in sorted(_ALL, key=lambda step: _FIRST.index(step.name) if step.name in _FIRST else len(_FIRST))
}
_PARTS = ROOT / "build/gpu"


def card_here() -> dict[str, Any]:
    """The GPUs, and the versions of what drives them; nothing without one."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "cards": torch.cuda.device_count(),
        "GiB": round(properties.total_memory / 2**30),
        "driver": nvidia_driver() or "not known",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "NCCL": torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None,  # type: ignore[no-untyped-call]
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--step",
        action="append",
        default=[],
        metavar="NAME",
        help="only these, or that begin so, with commas",
    )
    parser.add_argument("--list", action="store_true", help="list the steps, and stop")
    parser.add_argument("--minutes", type=float, help="begin no step for which they do not last")
    parser.add_argument("--again", action="store_true", help="run steps again that have passed")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5, help="of the speeds; at least 2")
    parser.add_argument("--parts", type=Path, default=_PARTS, help="folder of the parts")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    asked = parser.parse_args(arguments)
    words = [word for words in asked.step for word in words.split(",")]
    # All those whose names begin so, as "ranks" and "speed".
    asked.steps = [
        name for name in STEPS if any(f"{name}-".startswith(f"{word}-") for word in words or [name])
    ]
    if unknown := [word for word in words if not any(f"{name}-".startswith(f"{word}-") for name in STEPS)]:
        parser.error(f"--step {','.join(unknown)}: expected some of {','.join(STEPS)}")
    if asked.rounds < 2:
        parser.error(f"--rounds {asked.rounds}: expected at least 2, as shares have a middle half")
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that are left, write the page; gives the exit code."""
    asked = _arguments(arguments)
    settings = {"device": asked.device, "images": asked.images, "rounds": asked.rounds}
    if asked.list:
        for step in STEPS.values():
            done = "passed" if is_finished(asked.parts, step.name, settings) else ""
            print(f"{step.name:<17} {step.minutes:>3g} min  {done:<7} {step.about}")
        return 0
    here = any(STEPS[name].here for name in asked.steps)
    if asked.device == "cuda" and here and not torch.cuda.is_available():
        why = "finds none" if torch.version.cuda else "is built without CUDA"
        hint = " For the nodes of the job: --step ranks." if "SLURM_JOB_ID" in os.environ else ""
        print(f"gpu.py: no GPU here: torch {torch.__version__} {why}.{hint}", file=sys.stderr)
        return 2
    end_on_sigterm()
    began = monotonic()
    try:
        for name in asked.steps:
            left = None if asked.minutes is None else asked.minutes - (monotonic() - began) / 60
            if is_finished(asked.parts, name, settings) and not asked.again:
                print(f"{name}: has passed before ({part_of(asked.parts, name)})", file=sys.stderr)
            elif left is not None and STEPS[name].minutes > left:
                print(f"{name}: takes {STEPS[name].minutes:g} min, {left:.1f} are left", file=sys.stderr)
            else:
                _run(name, asked)
    finally:  # also where it is stopped
        parts = [part for name in STEPS if (part := read_part(asked.parts, name)) is not None]
        parts = [part for part in parts if part["device"] == asked.device]
        if parts:
            write_page(parts, list(STEPS.values()), asked.parts, asked.results)
    return int(any(row["outcome"] == FAILED for part in parts for row in part["rows"]))


def _run(name: str, asked: argparse.Namespace) -> None:
    facts = {
        "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "card": {} if asked.device == "cpu" else card_here(),
        "source": source_here(),
    }
    trial = Trial(
        step=name,
        device=asked.device,
        images=asked.images,
        rounds=asked.rounds,
        folder=asked.parts.absolute(),
        facts=facts,
    )
    trial.folder.mkdir(parents=True, exist_ok=True)
    with running(trial):
        STEPS[name].run(trial)


if __name__ == "__main__":
    sys.exit(main())
