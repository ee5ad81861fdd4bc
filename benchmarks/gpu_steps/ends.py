"""Steps of how runs end, and of the tools around them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, missing, torchrun

from gpu_steps.trial import FAILED, MOST_S, PASSED, Step, Trial, Verdict


def ends(trial: Trial) -> None:
    """A run that is killed and typed again; a device that has no memory left, and one that fails."""
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
            whole = result_of(trial, job, f"{folder}/whole")["metrics_digest"]
            hurt = {**trial.environ, "DUALEVAL_TEST_FAULT": "kill 0 100", "DUALEVAL_TEST_FLUSH_S": "0"}
            trial.run(_command(trial, job, f"{folder}/killed"), environ=hurt, any_exit_code=True)
            again = result_of(trial, job, f"{folder}/killed")
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

    trial.row("SIGKILL, and the same command again", killed)
    trial.row("no memory, and then enough", no_memory, on_cpu=False)
    trial.row("an assertion on the device", asserts, on_cpu=False)


def _command(trial: Trial, job: Sequence[str], out: str) -> list[str]:
    own = ["--device", trial.device, "--no-progress", "--out", out]
    return [sys.executable, "-m", "dualeval", "run", *job, *own]


def result_of(trial: Trial, job: Sequence[str], out: str) -> Any:
    """The result of a job that is typed."""
    trial.run(_command(trial, job, out))
    return json.loads(Path(out, "result.json").read_text("utf-8"))


def conformance(trial: Trial) -> None:
    """``dualeval conformance`` on one rank, by what the steps of several ranks do not start."""

    def judge() -> Verdict:
        with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as folder:
            launchers = ["nproc", *(["mpirun"] if missing("torch", over_mpi=True) is None else [])]
            given = ["--ranks", "1", "--launchers", ",".join(launchers), "--device", trial.device]
            given += ["--out", folder]
            trial.run_dualeval("conformance", *given, limit_s=MOST_S)
            said = json.loads(Path(folder, "conformance.json").read_text("utf-8"))
        outcomes = Counter(run["outcome"] for run in said["runs"])
        return PASSED, ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())

    trial.row("dualeval conformance --ranks 1", judge)


def tools(trial: Trial) -> None:
    """``dualeval doctor``, and a cell of ``dualeval bench`` with and without ``--train``."""

    def doctor() -> Verdict:
        said = trial.run_dualeval("doctor", "--device", trial.device)
        return PASSED, " / ".join(line.strip() for line in said.splitlines() if trial.device in line)

    def bench(*own: str) -> Verdict:
        with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as folder:
            given = ["--processes", "1", "--mode", "single", "--rounds", "1", "--device", trial.device]
            trial.run_dualeval("bench", *given, *own, "--no-plots", "--out", f"{folder}/out")
            page = Path(folder, "out", "bench.md").read_text("utf-8")
        return PASSED, " / ".join(line.strip("| ") for line in page.splitlines() if "| single" in line)

    trial.row("dualeval doctor", doctor)
    trial.row("dualeval bench", bench)
    trial.row("dualeval bench --train", partial(bench, "--train"))


def judged_transport(problems: dict[str, str | None], carrier: str, wanted: str) -> Verdict:
    """Whether all operations were right, and the tensors travelled from the memory that was meant."""
    wrong = [f"{name}: {problem}" for name, problem in problems.items() if problem is not None]
    if carrier != wanted:
        wrong.append(f"tensors travelled from the memory of {carrier}, expected {wanted}")
    return (
        (PASSED, ", ".join(problems)) if problems and not wrong else (FAILED, "; ".join(wrong) or "none ran")
    )


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

    trial.row("host tensors, gloo", partial(operations, "cpu"))
    trial.row("CUDA tensors, NCCL", partial(operations, "cuda"), on_cpu=False)
    trial.row("tests of the backend, tensors of the device", contract)


STEPS = (
    Step(name="ends", run=ends, minutes=1.5, about="SIGKILL, no memory, an assertion on the device"),
    Step(name="transports", run=transports, minutes=1, about="gloo and NCCL at one rank"),
    Step(name="conformance", run=conformance, minutes=1.5, about="dualeval conformance --ranks 1"),
    Step(name="tools", run=tools, minutes=1, about="dualeval doctor and bench"),
)
