"""Steps of speed: from memory and from JPEG files, beside the forward alone; and the profiler's counts."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import median_ratio, spread
from made_pictures import write_pictures

from gpu_steps.ends import result_of
from gpu_steps.trial import FAILED, LONG_S, PASSED, Step, Trial, Verdict

# Of the forward alone, from memory.
AIM = 0.95
_PRECISIONS = ("fp32", "tf32", "amp-bf16")
# The step of JPEG files has so many links to each picture.
_LINKS = 16
# How the host waits for a device, as CUDA and HIP name it.
_WAITS = re.compile(r"(cuda|hip|cu)(Stream|Device|Ctx|Event)Synchronize|(cuda|hip)Memcpy|Memcpy .*Pageable.*")
# The host waits for the columns of the batch two before, and for nothing else.
_EVENTS_A_BATCH = 1


def judged_speed(speeds: Mapping[str, Sequence[float]], peaks: Mapping[str, float | None]) -> Verdict:
    """No speed fails: the page says whether the aim is reached, which is one for GPUs."""
    alone, bare, ours = (speeds[way] for way in ("forward alone", "bare loop", "dualeval"))
    share = median_ratio(ours, alone)
    told = [f"dualeval {statistics.median(ours):,.0f} samples/s"]
    reached = "reached" if share >= AIM else "missed"
    aim = "" if peaks["dualeval"] is None else f"; aim {AIM} {reached}"
    told.append(f"{spread(ours, alone)} of the forward alone ({statistics.median(alone):,.0f}{aim})")
    told.append(f"{spread(ours, bare)} of the bare loop")
    if peaks["dualeval"] is not None:
        told.append(f"peak {peaks['dualeval']:,.0f} MB, of the bare loop {peaks['bare loop']:,.0f}")
    return PASSED, ", ".join(told)


def _from_memory(*models: str) -> Callable[[Trial], None]:
    def run(trial: Trial) -> None:
        def judge(model: str, precision: str) -> Verdict:
            said = trial.ask("speed", model=model, precision=precision, limit_s=LONG_S)
            return judged_speed(said["samples_per_s"], said["peak_mb"])

        for model in models:
            for precision in _PRECISIONS:
                trial.row(
                    f"{model}, {precision}", partial(judge, model, precision), on_cpu=precision == "fp32"
                )

    return run


def _from_files(*models: str) -> Callable[[Trial], None]:
    """JPEG files of 256 by 256: what reading processes decode alone, and what networks get through."""

    def run(trial: Trial) -> None:
        def decoded(folder: str) -> Verdict:
            said = trial.ask("decode", folder=folder, model="resnet50")
            return PASSED, (
                f"{said['pictures_per_s']:,.0f} pictures/s by {said['readers']} reading processes on "
                f"{said['cores']} cores"
            )

        def judge(folder: str, model: str, precision: str) -> Verdict:
            job = ["--model", model, "--weights", "random:0", "--data", folder, "--precision", precision]
            # On a CPU a small form, as from memory.
            job += ["--resize", "36", "--crop", "32"] if trial.device == "cpu" else []
            result = result_of(trial, job, f"{folder}-{model}-{precision}")
            timing, readers = result["timing"], result["job"]["workers"]
            loop_s = timing["evaluate_s"] - timing["ranks"][0]["look"]
            waited = timing["ranks"][0]["data"] / loop_s
            limit = timing["limited_by"]
            return PASSED, (
                f"{result['samples']['evaluated'] / loop_s:,.0f} pictures/s, {readers} reading processes, "
                f"{waited:.0%} of the time waiting for data{'' if limit is None else ': ' + limit['text']}"
            )

        with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as made:
            folder = f"{made}/made"
            linked_pictures(Path(folder), trial.images)
            trial.row("decoding alone", partial(decoded, folder))
            for model in models:
                for precision in _PRECISIONS:
                    of_row = partial(judge, folder, model, precision)
                    on_cpu = precision == "fp32" and model == "resnet18"
                    trial.row(f"{model}, {precision}", of_row, on_cpu=on_cpu)

    return run


def linked_pictures(folder: Path, count: int) -> None:
    """Write pictures in folders of classes: a part of them, and links to them under other names."""
    write_pictures(folder, max(10, count // _LINKS), 256, 10)
    for file in sorted(folder.rglob("*.jpg")):
        for number in range(1, _LINKS):
            os.link(file, file.with_name(f"{file.stem}-{number}.jpg"))


# -- by the profiler -----------------------------------------------------------------------------------


def waits_a_batch(few: Mapping[str, int], many: Mapping[str, int], batches: int) -> dict[str, float]:
    """By kind the host's waits for a batch: what so many more ``batches`` have added."""
    names = sorted(name for name in {**few, **many} if _WAITS.fullmatch(name))
    return {name: (many.get(name, 0) - few.get(name, 0)) / batches for name in names}


def judged_waits(waits: Mapping[str, float], lines: Sequence[str]) -> Verdict:
    """The host may wait for events alone."""
    said = ", ".join(f"{count:.2f} {name}" for name, count in waits.items() if count) or "none"
    events = sum(count for name, count in waits.items() if "EventSynchronize" in name)
    others = max((count for name, count in waits.items() if "EventSynchronize" not in name), default=0.0)
    if others > 0.05 or abs(events - _EVENTS_A_BATCH) > 0.05:
        return FAILED, f"{said} a batch, expected {_EVENTS_A_BATCH} of an event alone: {'; '.join(lines)}"
    return PASSED, f"{said} a batch"


def profiled(answer: Mapping[str, Any]) -> str:
    """Kernels, copies and waits a batch, by way."""
    kinds = {"kernels": "kernel", "copies": "gpu_memcpy", "waits": "cuda_runtime cudaEventSynchronize"}
    found = []
    for way, of in answer.items():
        batch = of["a batch"]
        sums = {
            word: [
                sum(value for name, value in batch.items() if name.startswith(kind) and name.endswith(unit))
                for unit in (": count", ": us")
            ]
            for word, kind in kinds.items()
        }
        # Each kernel has a line of its own, too.
        sums["kernels"][1] = batch.get("kernel: us", 0)
        found.append(f"{way} " + ", ".join(f"{n:.1f} {word} {us:,.0f} us" for word, (n, us) in sums.items()))
    return "; ".join(found)


def profile(trial: Trial) -> None:
    """The host's waits, and kernels and copies a batch beside the bare loop's; the JSON has all of it."""

    def waited() -> Verdict:
        said = trial.ask("waits")
        found = waits_a_batch(said["few"], said["many"], said["batches"])
        if trial.device == "cpu":
            return PASSED, "on a CPU there is nothing to wait for"
        return judged_waits(found, said["lines"])

    def judge(model: str, precision: str) -> Verdict:
        return PASSED, profiled(trial.ask("profile", model=model, precision=precision, limit_s=LONG_S))

    trial.row("waits of the host, in the loop", waited)
    trial.row("small-cnn, fp32", partial(judge, "small-cnn", "fp32"))
    for model, precision in (*(("resnet18", one) for one in _PRECISIONS), ("bert-base", "amp-bf16")):
        trial.row(f"{model}, {precision}", partial(judge, model, precision), on_cpu=False)


_FROM_MEMORY = "over the forward alone, in fp32, tf32 and amp-bf16, from memory"
STEPS = (
    Step(
        name="speed-small",
        run=_from_memory("small-cnn", "resnet18"),
        minutes=3,
        about=f"a small network and ResNet-18 {_FROM_MEMORY}",
    ),
    Step(
        name="speed-large",
        run=_from_memory("resnet50", "vit_b_16"),
        minutes=4,
        about=f"ResNet-50 and ViT-B {_FROM_MEMORY}",
    ),
    Step(name="speed-bert", run=_from_memory("bert-base"), minutes=2, about=f"a BERT {_FROM_MEMORY}"),
    Step(
        name="speed-jpeg",
        run=_from_files("resnet18", "resnet50", "vit_b_16"),
        minutes=4,
        about="JPEG files: decoding alone, ResNet-18 and -50 and ViT-B",
    ),
    Step(name="profile", run=profile, minutes=2, about="the host's waits, kernels and copies a batch"),
)
