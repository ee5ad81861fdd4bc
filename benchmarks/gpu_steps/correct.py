"""Steps that compare bits and numbers: processes, readers, precisions, preparations, sharding, masks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gpu_steps.trial import FAILED, LONG_S, PASSED, Step, Trial, Verdict, judged_problems

# By worker, what its row says, and whether a CPU shows it, too.
_NUMBERS = {
    "copies": ("tensors of every kind there and back, behind slow kernels", False),
    "errors_of_fp32": ("fp32 without TF32, and tf32, against float64", False),
    "on_the_cpu": ("loss and top1 as on the CPU", True),
    "float64_columns": ("columns and metrics in float64", True),
    "outer_autocast": ("an evaluation inside of a caller's autocast", True),
    "in_training": ("a training with and without an evaluation in between", True),
}


def judged_digests(first: Mapping[str, Any], other: Mapping[str, Any]) -> Verdict:
    """Whether two runs have equal digests, model by model."""
    differ = [name for name in first if first[name]["digest"] != other[name]["digest"]]
    told = [f"{name} {other[name]['digest']}, expected {first[name]['digest']}" for name in differ]
    return (FAILED, "; ".join(told)) if told else (PASSED, described(other))


def described(answer: Mapping[str, Any]) -> str:
    """Digest, speed and memory of a run, by model."""
    return "; ".join(
        f"{name} {of['digest'][:8]}, {of['images_per_s']:,.0f} images/s"
        + ("" if of["peak_mb"] is None else f", peak {of['peak_mb']:,.0f} MB")
        for name, of in answer.items()
    )


def judged_offload(whole: Mapping[str, Any], other: Mapping[str, Any]) -> Verdict:
    """As ``judged_digests``; and the GPU must hold less than with the whole model."""
    outcome, found = judged_digests(whole, other)
    if outcome == PASSED and any(other[name]["peak_mb"] >= whole[name]["peak_mb"] for name in whole):
        return FAILED, f"{found}: no less memory than {described(whole)}"
    return outcome, found


def _compare(trial: Trial, models: list[str], ways: Mapping[str, dict[str, Any]]) -> None:
    """A row for each way to run the same models; each must have the first one's digests."""
    first: dict[str, Any] = {}

    def judge(given: dict[str, Any], is_first: bool) -> Verdict:
        if not first and not is_first:
            return FAILED, "there is no first run to compare with"
        found = trial.ask("evaluate", models=models, **given)
        if is_first:
            first.update(found)
        return (judged_offload if "offload" in given.get("options", {}) else judged_digests)(first, found)

    for place, (what, given) in enumerate(ways.items()):
        options = given.get("options", {})
        on_cpu = (
            "offload" not in options
            and "fp16" not in options.get("precision", "")
            and "compile" not in options.values()
        )
        trial.row(what, partial(judge, given, place == 0), on_cpu=on_cpu)


def repeats(trial: Trial) -> None:
    """One job again and again: its digest must not depend on process, readers or ranks."""
    _compare(
        trial,
        ["fashion-cnn", "resnet18"],
        {
            "first run": {},
            "again": {},
            "2 reading processes": {"workers": 2},
            "4 reading processes": {"workers": 4},
            "torchrun, one rank": {"ranks": 1},
            "torchrun, two ranks that share the device": {"ranks": 2},
            # What a race between streams, or memory handed on too early, would change.
            "each kernel awaited": {"variables": {"CUDA_LAUNCH_BLOCKING": "1"}},
            "no memory kept": {"variables": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}},
        },
    )


def precisions(trial: Trial) -> None:
    """Each precision twice, in two processes."""
    for precision in ("amp-bf16", "bf16", "amp-fp16", "fp16"):
        given = {"options": {"precision": precision}}
        _compare(trial, ["resnet18, float images"], {precision: given, f"{precision}, again": given})


def sharding(trial: Trial) -> None:
    """A model whole, divided over one rank, and in host memory."""
    sharded = {"shard": "fsdp"}
    ways: dict[str, dict[str, Any]] = {
        "the whole model": {},
        "sharded by a script that has begun NCCL": {"ranks": 1, "in_training": True},
        "--shard fsdp": {"options": sharded},
        "--shard fsdp, torchrun": {"options": sharded, "ranks": 1},
        "--shard fsdp --offload": {"options": {**sharded, "offload": True}},
    }
    _compare(trial, ["transformer"], ways)


def optimized(trial: Trial) -> None:
    """What changes the model's operations, twice each, in two processes."""
    for optimize in ("fold", "compile"):
        given = {"options": {"optimize": optimize}, "limit_s": LONG_S}
        _compare(trial, ["resnet18, float images"], {optimize: given, f"{optimize}, again": given})


def _ask_of_problems(trial: Trial, worker: str) -> Verdict:
    said = trial.ask(worker)
    return judged_problems(said["problems"], said["found"])


def numbers(trial: Trial) -> None:
    """Copies of every kind of tensor, bits of three precisions, and a caller's autocast and training."""
    for worker, (what, on_cpu) in _NUMBERS.items():
        trial.row(what, partial(_ask_of_problems, trial, worker), on_cpu=on_cpu)


def masks(trial: Trial) -> None:
    """Segmentation: the digest twice, with reading processes, and the values of the CPU."""
    trial.row("pictures with masks, twice and on the CPU", partial(_ask_of_problems, trial, "masks"))


STEPS = (
    Step(name="repeats", run=repeats, minutes=2, about="one digest, whatever processes, readers and ranks"),
    Step(name="numbers", run=numbers, minutes=1.5, about="copies, fp32, tf32, float64, autocast, training"),
    Step(name="precisions", run=precisions, minutes=1.5, about="each precision twice"),
    Step(name="masks", run=masks, minutes=0.5, about="segmentation"),
    Step(name="sharding", run=sharding, minutes=1.5, about="--shard fsdp and --offload at one rank"),
    Step(name="optimized", run=optimized, minutes=3, about="--optimize fold and compile, twice each"),
)
