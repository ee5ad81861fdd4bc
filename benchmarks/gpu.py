"""What only a GPU can show, in at most ten minutes. Each row is passed, failed, or not available.

Every row is measured by processes of its own (``gpu_worker.py``) under a time limit, so a GPU that hangs or
breaks costs one row. The exit code is 1 if a row failed, and 2 without a GPU.

    python benchmarks/gpu.py                                             # on a machine with a GPU
    python benchmarks/gpu.py --steps sharding,speed                      # some of it
    python benchmarks/gpu.py --device cpu --images 256 --rounds 2        # what of it runs on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from common import (
    ONE_THREAD,
    RESULTS,
    ROOT,
    end_on_sigterm,
    machine,
    python_or_torchrun,
    run_process,
    spread,
    table,
    torchrun,
    write_results,
)
from made_pictures import write_pictures

PASSED, FAILED, NOT_HERE = "passed", "failed", "not available"
Verdict = tuple[str, str]  # the outcome, and what was found

_WORKER = str(Path(__file__).with_name("gpu_worker.py"))
ANSWER = "answer of a worker: "
_MOST_S = 550.0  # and up to 40 s in which processes that hang are ended
_RUN_S, _LONG_S = 90.0, 150.0
# By worker, what its row says.
_NUMBERS = {
    "copies": "tensors of every kind there and back, behind slow kernels",
    "errors_of_fp32": "fp32 without TF32, and tf32, against float64",
    "on_the_cpu": "loss and top1 as on the CPU",
    "in_training": "a training with and without an evaluation in between",
}
# How the host waits for a device, as CUDA and HIP name it.
_WAITS = re.compile(r"(cuda|hip|cu)(Stream|Device|Ctx|Event)Synchronize|(cuda|hip)Memcpy|Memcpy .*Pageable.*")
# The host waits for the columns of the batch two before, and for nothing else.
_EVENTS_A_BATCH = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the page."""

    step: str
    what: str
    outcome: str
    found: str


@dataclass(kw_only=True)
class Trial:
    """What is asked for, and what has been found so far."""

    device: str
    images: int
    rounds: int
    ends: float
    rows: list[Row] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def row(self, step: str, what: str, judge: Callable[[], Verdict], *, on_cpu: bool = True) -> None:
        """Add a row; an error while it is measured is its outcome."""
        outcome, found = NOT_HERE, "needs a GPU"
        if on_cpu or self.device != "cpu":
            try:
                outcome, found = judge()
            except Exception as error:  # noqa: BLE001 - whatever fails, the other rows are measured
                found = reason(error)
                # A page of an older torch is no page of a broken one.
                outcome = NOT_HERE if " needs torch " in found else FAILED
                self.errors[f"{step}: {what}"] = str(error)[-4000:]
        self.rows.append(Row(step=step, what=what, outcome=outcome, found=found))
        print(f"{step}: {what}: {outcome}: {found}", file=sys.stderr, flush=True)

    def run(
        self,
        command: Sequence[str],
        limit_s: float = _RUN_S,
        variables: Mapping[str, str] | None = None,
        *,
        any_exit_code: bool = False,
    ) -> str:
        """What a command prints."""
        left_s = self.ends - monotonic()
        if left_s < 1:
            raise TimeoutError("not begun: the ten minutes were over")
        environ = {**(ONE_THREAD if self.device == "cpu" else os.environ), "PYTHONPATH": str(ROOT)}
        return run_process(
            command,
            timeout_s=min(limit_s, left_s),
            environ={**environ, **(variables or {})},
            any_exit_code=any_exit_code,
        ).output

    def ask(
        self,
        worker: str,
        *,
        ranks: int = 0,
        limit_s: float = _RUN_S,
        any_exit_code: bool = False,
        **given: Any,
    ) -> Any:
        """What a worker answers; without ``ranks`` it is started by no launcher. It sets ``variables``."""
        given = {"device": self.device, "images": self.images, "rounds": self.rounds, **given}
        own = [_WORKER, worker, json.dumps(given)]
        command = torchrun(ranks, *own) if ranks else python_or_torchrun(1, *own)
        said = self.run(command, limit_s, given.get("variables", {}), any_exit_code=any_exit_code)
        answer = json.loads(said.rpartition(ANSWER)[2])
        self.answers.append({"worker": worker, "ranks": ranks, **given, "answer": answer})
        return answer


# -- what is said of what was found --------------------------------------------------------------------


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


def judged_transport(problems: Mapping[str, str | None], carrier: str, wanted: str) -> Verdict:
    """Whether all operations were right, and the tensors travelled from the memory that was meant."""
    wrong = [f"{name}: {problem}" for name, problem in problems.items() if problem is not None]
    if carrier != wanted:
        wrong.append(f"tensors travelled from the memory of {carrier}, expected {wanted}")
    return (
        (PASSED, ", ".join(problems)) if problems and not wrong else (FAILED, "; ".join(wrong) or "none ran")
    )


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


def judged_problems(problems: Sequence[str], found: str) -> Verdict:
    """Whether a worker has found no problem."""
    return (FAILED, "; ".join(problems)) if problems else (PASSED, found)


def judged_speed(speeds: Mapping[str, Sequence[float]], peaks: Mapping[str, float | None]) -> Verdict:
    """No speed fails: it is not known yet what is right."""
    told = []
    for way, of in speeds.items():
        told.append(f"{way} {statistics.median(of):,.0f} images/s")
        told += [] if way == "bare" else [f"{spread(of, speeds['bare'])} of bare"]
        told += [] if peaks[way] is None else [f"peak {peaks[way]:,.0f} MB"]
    return PASSED, ", ".join(told)


def reason(error: BaseException) -> str:
    """In one line why a row could not be measured."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"took longer than {error.timeout:.0f} s"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # The first one: torchrun says more behind it.
    said = next((line for line in lines if "rror: " in line), lines[-1])
    return f"{type(error).__name__}: {said[:300]}"


def exit_code(rows: Sequence[Row]) -> int:
    """1 if a row failed, as one whose digest differs."""
    return int(any(row.outcome == FAILED for row in rows))


def page(rows: Sequence[Row], card: Mapping[str, Any]) -> str:
    """The body of the page; without a card it was a CPU."""
    count = Counter(row.outcome for row in rows)
    found = ", ".join(f"{count[outcome]} {outcome}" for outcome in (PASSED, FAILED, NOT_HERE))
    cells = [[row.step, row.what, row.outcome, row.found.replace("|", "/")] for row in rows]
    about = (
        f"{', '.join(f'{name} {value}' for name, value in card.items())}. One card: this page says nothing "
        "about NCCL between several GPUs, nor about Horovod with NCCL."
        if card
        else "**On a CPU: this page says that the script works, and nothing about GPUs.**"
    )
    return (
        f"{about}\n\n{found}.\n\nEqual digests mean equal bits. Peaks are `max_memory_allocated`. The bare "
        "loop counts where argmax is the target: contiguous, with dualeval's numeric settings (no TF32, "
        "deterministic kernels), its images in pinned memory. The share of its images/s is a median over the "
        f"rounds, the middle half in brackets.\n\n{table(['step', 'what', 'outcome', 'found'], cells)}"
    )


# -- the steps -----------------------------------------------------------------------------------------


def repeats(trial: Trial) -> None:
    """One job again and again: its digest must not depend on process, readers or ranks."""
    _compare(
        trial,
        "repeats",
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


def _compare(trial: Trial, step: str, models: list[str], ways: Mapping[str, dict[str, Any]]) -> None:
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
        trial.row(step, what, partial(judge, given, place == 0), on_cpu=on_cpu)


def precisions(trial: Trial) -> None:
    """Each precision twice, in two processes."""
    for precision in ("amp-bf16", "bf16", "amp-fp16", "fp16"):
        given = {"options": {"precision": precision}}
        _compare(
            trial, "precisions", ["resnet18, float images"], {precision: given, f"{precision}, again": given}
        )


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
    _compare(trial, "sharding", ["transformer"], ways)


def optimized(trial: Trial) -> None:
    """What changes the model's operations, twice each, in two processes."""
    for optimize in ("fold", "compile"):
        given = {"options": {"optimize": optimize}, "limit_s": _LONG_S}
        ways = {optimize: given, f"{optimize}, again": given}
        _compare(trial, "optimized", ["resnet18, float images"], ways)


def numbers(trial: Trial) -> None:
    """Copies of every kind of tensor, the bits of fp32 and tf32, and an evaluation within a training."""
    for worker, what in _NUMBERS.items():

        def judge(worker: str = worker) -> Verdict:
            said = trial.ask(worker)
            return judged_problems(said["problems"], said["found"])

        trial.row("numbers", what, judge, on_cpu=worker in ("on_the_cpu", "in_training"))


def transports(trial: Trial) -> None:
    """A backend's operations over gloo and over NCCL, on one rank."""

    def operations(kind: str) -> Verdict:
        said = trial.ask("transport", ranks=1)
        problems = {name: of for name, of in said["problems"].items() if (" on " in name) == (kind != "cpu")}
        outcome, found = judged_transport(problems, said["carriers"][kind], kind)
        numbers = ", ".join(f"{name} {number:.3g}" for name, number in said["speed"].get(kind, {}).items())
        return outcome, f"{found}; all_reduce: {numbers}"

    def contract() -> Verdict:
        with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as folder:
            worker = ["-m", "tests.backends.worker", "--backend", "torch", "--device", trial.device]
            trial.run(torchrun(1, *worker, "--folder", folder))
            lines = (Path(folder) / "rank-0.jsonl").read_text("utf-8").splitlines()
        checks = [json.loads(line) for line in lines]
        wrong = [f"{check['check']}: {check['problems'][0]}" for check in checks if check["problems"]]
        return (FAILED, "; ".join(wrong)) if wrong else (PASSED, f"{len(checks)} checks")

    trial.row("transports", "host tensors, gloo", partial(operations, "cpu"))
    trial.row("transports", "CUDA tensors, NCCL", partial(operations, "cuda"), on_cpu=False)
    trial.row("transports", "tests of the backend, tensors of the device", contract)


def waits(trial: Trial) -> None:
    """How often the host waits for the GPU in the loop over batches."""

    def judge() -> Verdict:
        said = trial.ask("waits")
        return judged_waits(waits_a_batch(said["few"], said["many"], said["batches"]), said["lines"])

    trial.row("waits", "of the host, in the loop", judge, on_cpu=False)


def speed(trial: Trial) -> None:
    """Images/s and peak memory beside a bare loop."""

    def judge(model: str, precision: str = "fp32") -> Verdict:
        said = trial.ask("speed", model=model, precision=precision, limit_s=_LONG_S)
        return judged_speed(said["images_per_s"], said["peak_mb"])

    for model in ("small-cnn", "resnet18"):
        trial.row("speed", model, partial(judge, model))
    for precision in ("tf32", "amp-bf16"):
        trial.row("speed", f"resnet18, {precision}", partial(judge, "resnet18", precision), on_cpu=False)


def profile(trial: Trial) -> None:
    """Kernels, copies and waits a batch beside the bare loop's; the JSON has all of it."""

    def judge(model: str, precision: str) -> Verdict:
        said = trial.ask("profile", model=model, precision=precision, limit_s=_LONG_S)
        found = []
        for way, of in said.items():
            batch = of["a batch"]
            kinds = ("kernel", "gpu_memcpy", "cuda_runtime cudaEventSynchronize")
            sums = {
                kind: [
                    sum(
                        value
                        for name, value in batch.items()
                        if name.startswith(kind) and name.endswith(unit)
                    )
                    for unit in (": count", ": us")
                ]
                for kind in kinds
            }
            sums["kernel"][1] = batch.get("kernel: us", 0)
            words = zip(("kernels", "copies", "waits"), sums.values(), strict=True)
            found.append(
                f"{way} " + ", ".join(f"{count:.1f} {word} {us:,.0f} us" for word, (count, us) in words)
            )
        return PASSED, "; ".join(found)

    for model, precision in (
        ("small-cnn", "fp32"),
        *(("resnet18", one) for one in ("fp32", "tf32", "amp-bf16")),
    ):
        trial.row("profile", f"{model}, {precision}", partial(judge, model, precision), on_cpu=False)


def pictures(trial: Trial) -> None:
    """JPEG files of 256 by 256 through ResNet-50: what the reading processes let through."""

    def judge(folder: str, precision: str) -> Verdict:
        job = ["--model", "resnet50", "--weights", "random:0", "--data", folder, "--precision", precision]
        result = _run(trial, job, f"{folder}-{precision}")
        where = ", ".join(f"{what} {s:.2f}" for what, s in result["timing"]["ranks"][0].items() if s >= 0.01)
        return PASSED, f"{result['samples_per_s']:,.0f} images/s; seconds: {where}"

    with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as folder:
        write_pictures(Path(folder, "made"), trial.images // 4, 256, 10)
        for precision in ("fp32", "amp-bf16"):
            trial.row("pictures", f"resnet50, {precision}", partial(judge, f"{folder}/made", precision))


def ends(trial: Trial) -> None:
    """A run that is killed and typed again, and one whose device has no memory left."""
    data = str(ROOT / "dualeval/assets")
    job = [
        "--model",
        "tests.vehicles.faulty_models:fashion_cnn",
        "--weights",
        f"{data}/fashion_cnn.safetensors",
    ]
    job += ["--data", data, "--batch-size", "20", "--limit", "4000"]

    def killed() -> Verdict:
        with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as folder:
            whole = _run(trial, job, f"{folder}/whole")["metrics_digest"]
            hurt = {"DUALEVAL_TEST_FAULT": "kill 0 100", "DUALEVAL_TEST_FLUSH_S": "0"}
            trial.run(_command(trial, job, f"{folder}/killed"), _RUN_S, hurt, any_exit_code=True)
            again = _run(trial, job, f"{folder}/killed")
        found = f"{again['metrics_digest'][:8]}, {again['chunks']['resumed']} chunks were there"
        if again["metrics_digest"] != whole or not again["chunks"]["resumed"]:
            return FAILED, f"{found}, expected {whole[:8]} and more than none"
        return PASSED, found

    def no_memory() -> Verdict:
        said = trial.ask("no_memory")
        right = said["first"] == said["then"] and "out of memory on cuda:0 with --batch-size" in said["error"]
        return PASSED if right else FAILED, f"{said['error']} Digests: {said['first']}, then {said['then']}"

    def asserts() -> Verdict:
        # Torch aborts a process whose device has failed at its very end, as it frees tensors there.
        said = trial.ask("asserts", any_exit_code=True)
        return PASSED if "device-side assert" in said else FAILED, said

    trial.row("ends", "SIGKILL, and the same command again", killed)
    trial.row("ends", "no memory, and then enough", no_memory, on_cpu=False)
    trial.row("ends", "an assertion on the device", asserts, on_cpu=False)


def _command(trial: Trial, job: Sequence[str], out: str) -> list[str]:
    own = ["--device", trial.device, "--no-progress", "--out", out]
    return [sys.executable, "-m", "dualeval", "run", *job, *own]


def _run(trial: Trial, job: Sequence[str], out: str) -> Any:
    """The result of a job that is typed."""
    trial.run(_command(trial, job, out))
    return json.loads(Path(out, "result.json").read_text("utf-8"))


def conformance(trial: Trial) -> None:
    """``dualeval conformance`` on one rank, with the launchers that are here."""

    def judge() -> Verdict:
        with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as folder:
            given = ["--ranks", "1", "--device", trial.device, "--out", folder]
            trial.run([sys.executable, "-m", "dualeval", "conformance", *given], _LONG_S)
            said = json.loads(Path(folder, "conformance.json").read_text("utf-8"))
        outcomes = Counter(run["outcome"] for run in said["runs"])
        return PASSED, ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())

    trial.row("conformance", "dualeval conformance --ranks 1", judge)


def tools(trial: Trial) -> None:
    """``dualeval doctor``, and a cell of ``dualeval bench`` with and without ``--train``."""
    command = [sys.executable, "-m", "dualeval"]

    def doctor() -> Verdict:
        said = trial.run([*command, "doctor", "--device", trial.device])
        return PASSED, " / ".join(line.strip() for line in said.splitlines() if trial.device in line)

    def bench(*own: str) -> Verdict:
        with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as folder:
            given = ["--processes", "1", "--mode", "single", "--rounds", "1", "--device", trial.device]
            trial.run([*command, "bench", *given, *own, "--no-plots", "--out", f"{folder}/out"])
            page = Path(folder, "out", "bench.md").read_text("utf-8")
        return PASSED, " / ".join(line.strip("| ") for line in page.splitlines() if "| single" in line)

    trial.row("tools", "dualeval doctor", doctor)
    trial.row("tools", "dualeval bench", bench)
    trial.row("tools", "dualeval bench --train", partial(bench, "--train"))


STEPS: dict[str, Callable[[Trial], None]] = {
    step.__name__: step
    for step in (
        *(repeats, numbers, transports, waits, ends, sharding, speed, pictures, precisions, optimized),
        *(tools, conformance, profile),
    )
}


def card_here() -> dict[str, Any]:
    """The GPU, and the versions of what drives it."""
    properties = torch.cuda.get_device_properties(0)
    driver = "not known"
    with suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split()[
            0
        ]
    return {
        "name": properties.name,
        "GiB": round(properties.total_memory / 2**30),
        "driver": driver,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "NCCL": torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None,  # type: ignore[no-untyped-call]
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the page; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", default=",".join(STEPS), help="some of the default ones, with commas")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5, help="of the speeds; at least 2")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    asked = parser.parse_args(arguments)
    steps = asked.steps.split(",")
    if unknown := [step for step in steps if step not in STEPS]:
        parser.error(f"--steps {','.join(unknown)}: expected some of {','.join(STEPS)}")
    if asked.device == "cuda" and not torch.cuda.is_available():
        why = "finds none" if torch.version.cuda else "is built without CUDA"
        print(f"gpu.py: no GPU here: torch {torch.__version__} {why}.", file=sys.stderr)
        return 2
    end_on_sigterm()
    host, card = machine(), {} if asked.device == "cpu" else card_here()
    ends = monotonic() + _MOST_S
    trial = Trial(device=asked.device, images=asked.images, rounds=asked.rounds, ends=ends)
    try:
        for step in steps:
            STEPS[step](trial)
    finally:  # also where it is stopped
        rows = [asdict(row) for row in trial.rows]
        figures = {"card": card, "rows": rows, "errors": trial.errors, "answers": trial.answers}
        title = f"On one GPU: {card['name']}" if card else "make gpu, tried on a CPU"
        write_results("gpu", title, page(trial.rows, card), figures, host, asked.results)
    return exit_code(trial.rows)


if __name__ == "__main__":
    sys.exit(main())
