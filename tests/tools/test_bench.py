"""``dualeval bench``: cells and their order, figures and tables, refusals, and real measurements."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from dualeval import Session, UsageError
from dualeval.cli import dualeval
from dualeval.options.job import Job
from dualeval.tools.bench.cell import (
    STAGES,
    Cell,
    CellStart,
    cores_of_processes,
    order_of_round,
    own_part,
    plan_cells,
)
from dualeval.tools.bench.measuring import measure_evaluation, measure_training, split_batches
from dualeval.tools.bench.page import MEASURED, draw, page, with_figures
from dualeval.tools.starts import FAILED, NOT_HERE, Interrupted
from tests.conftest import BIN, Launch
from tests.engine.end.test_endings import await_that
from tests.vehicles.tiny import TinyTask

BENCH: list[str | Path] = [BIN / "dualeval", "bench"]
PNG = b"\x89PNG\r\n\x1a\n"


# -- cells ---------------------------------------------------------------------------------------------


def test_cells_come_mode_by_mode_with_reasons_for_those_left_out() -> None:
    def why(cell: Cell) -> str | None:
        return "no bf16" if cell.precision == "amp-bf16" else None

    cells = plan_cells(["horovod", "single", "dataparallel"], [1, 2], ["fp32", "amp-bf16"], [64], why)
    assert [(cell.mode, cell.processes, cell.precision, cell.reason) for cell in cells] == [
        ("single", 1, "fp32", None),
        ("dataparallel", 2, "fp32", None),
        ("horovod", 1, "fp32", None),
        ("horovod", 2, "fp32", None),
        ("single", 1, "amp-bf16", "no bf16"),
        ("dataparallel", 2, "amp-bf16", "no bf16"),
        ("horovod", 1, "amp-bf16", "no bf16"),
        ("horovod", 2, "amp-bf16", "no bf16"),
    ]
    assert cells[1].label == "dataparallel, 2 GPUs, fp32, batch size 64"
    assert cells[2].label == "horovod, 1 process, fp32, batch size 64"


def test_each_round_measures_each_cell_once_in_another_order() -> None:
    orders = [order_of_round(4, number) for number in range(8)]
    assert orders[:3] == [[0, 1, 2, 3], [0, 3, 2, 1], [2, 3, 0, 1]]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    # No cell is always behind the same one.
    before = {(order[place - 1], order[place]) for order in orders for place in (1, 2, 3)}
    assert all(len({first for first, cell in before if cell == own}) > 1 for own in range(4))


def test_every_process_has_as_many_cores_in_all_cells() -> None:
    assert cores_of_processes([1, 2], 2) == 1
    assert cores_of_processes([1, 2, 4], 64) == 16
    # What does not fit takes no part in it.
    assert cores_of_processes([1, 2, 8], 6) == 3
    assert cores_of_processes([8], 6) == 6
    assert [own_part([3, 4, 5, 7, 9], 2, rank) for rank in (0, 1)] == [[3, 4], [5, 7]]


# -- figures -------------------------------------------------------------------------------------------


def measurement(
    number: int, seconds: float, ranks: Sequence[Mapping[str, Any]], **more: Any
) -> dict[str, Any]:
    return {
        "round": number, "seconds": seconds, "samples": 1200, "batches": 12, "startup_s": 2.0 + number,
        "ranks": list(ranks), "metrics_digest": "ab" * 32, **more,
    }  # fmt: skip


def rank(peak: int = 100 << 20, **more: Any) -> dict[str, Any]:
    return {"evaluate": 2.0, "data": 0.5, "peak_bytes": peak, "peak_gpu_bytes": None, **more}


def made_cell(mode: str, processes: int, measurements: Sequence[Any], **more: Any) -> dict[str, Any]:
    return {
        "mode": mode, "processes": processes, "precision": "fp32", "batch_size": 100, "reason": None,
        "label": f"{mode} x {processes}", "outcome": MEASURED, "measurements": list(measurements), **more,
    }  # fmt: skip


ALONE = made_cell("single", 1, [measurement(number, 10.0 * (number + 1), [rank()]) for number in range(3)])
# In each round twice as fast, or a little less, whatever the machine did in that round.
TWO = made_cell(
    "torch",
    2,
    [
        measurement(number, seconds, [rank(), rank(120 << 20)])
        for number, seconds in enumerate([5.0, 12.5, 15.0])
    ],
)
ABSENT = made_cell("horovod", 2, [], outcome=NOT_HERE, reason="Horovod is not installed")


def report(*cells: dict[str, Any], train: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "when": "2026-11-22 12:00 UTC",
        "command": "dualeval bench",
        "settings": {
            "train": train, "rounds": 3, "min_seconds": 3.0, "warmup": 2, "cores": 1, "device": "cpu",
        },
        "job": {"model": "fashion-cnn", "description": {"model": "fashion-cnn", "data": "10,000 images"}},
        "machine": {
            "cpu": "Xeon", "cpu_capability": "AVX512", "cores": 2, "gpus": [], "memory_gib": 8.0,
            "system": "Debian", "load_average": [0.1, 0.2, 0.3],
        },
        "versions": {"torch": "2.13.0", "Horovod": None},
        "cells": with_figures(cells),
        "interrupted": False,
        **more,
    }  # fmt: skip


def test_speed_up_is_the_median_of_the_rounds() -> None:
    alone, two, absent = with_figures([ALONE, TWO, ABSENT])
    assert alone["figures"]["speed_up"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert two["figures"]["speed_up"] == {"median": 2.0, "low": 1.6, "high": 2.0}
    assert two["figures"]["efficiency"] == 1.0
    assert two["figures"]["images_per_s"] == {"median": 96.0, "low": 80.0, "high": 240.0}
    # 12 batches of two processes in 12.5 s: each had 6 of them.
    assert two["figures"]["seconds_per_batch"]["median"] == 12.5 * 2 / 12
    assert two["figures"]["peak_bytes"] == 120 << 20
    assert two["figures"]["startup_s"]["median"] == 3.0
    assert two["figures"]["waits_for_data"] == 0.25
    assert absent["figures"] is None


def test_without_one_process_there_is_no_speed_up() -> None:
    [two] = with_figures([TWO])
    assert (two["figures"]["speed_up"], two["figures"]["efficiency"]) == (None, None)
    assert "| torch | 2 | 96.0 (80.0 to 240.0) |" in page(report(TWO))
    # Of the same mode it is as good; of another batch size it is not.
    same = made_cell("torch", 1, ALONE["measurements"])
    other = made_cell("single", 1, ALONE["measurements"], batch_size=64)
    assert with_figures([TWO, same, other])[0]["figures"]["speed_up"]["median"] == 2.0
    assert with_figures([TWO, other])[0]["figures"]["speed_up"] is None


def test_the_page_has_the_figures_of_each_cell_and_what_is_missing() -> None:
    text = page(report(ALONE, TWO, ABSENT), ["speedup.png"])
    assert "# dualeval bench: evaluation of fashion-cnn" in text
    assert "Xeon (AVX512), 2 cores, 8.0 GiB, Debian" in text
    assert "torch 2.13.0." in text
    assert (
        "| torch | 2 | 96.0 (80.0 to 240.0) | 2,083.3 (833.3 to 2,500.0) | 2.00 (1.60 to 2.00) | 100% "
        in text
    )
    assert "| 120 MiB | 3.0 s | 25.0% |" in text
    assert "| horovod | 2 | fp32 | 100 | not here | Horovod is not installed |" in text
    assert "All of them computed the same bits: metrics_digest abababababababab." in text
    assert "![speedup.png](speedup.png)" in text
    assert "Interrupted" not in text and "busy" not in text
    found = report(ALONE)
    found["machine"]["load_average"] = [8.03, 4.0, 2.0]
    assert "**The machine was busy** before the first start: load average 8.03 on 2 cores." in page(found)
    assert "**Interrupted**" in page(report(ALONE, interrupted=True))


def test_the_page_names_cells_with_other_bits_and_too_little_data() -> None:
    other = made_cell("dataparallel", 2, [measurement(0, 1.0, [rank()], metrics_digest="cd" * 32)])
    text = page(report(ALONE, other))
    assert "Not all of them computed the same bits:" in text
    assert "- cdcdcdcdcdcdcdcd: dataparallel x 2" in text
    assert "Measured for less than 3 s in some start, as the data set is small: dataparallel x 2." in text


def test_stages_of_training_are_fractions_and_plots_are_drawn(tmp_path: Path) -> None:
    times = {"forward": 2.0, "backward": 5.0, "all_reduce": 2.0, "optimiser": 1.0}
    slower = {**times, "forward": 6.0, "backward": 1.0}
    trained = made_cell("torch", 2, [measurement(0, 10.0, [{**rank(), **times}, {**rank(), **slower}])])
    alone = made_cell("single", 1, [measurement(0, 18.0, [{**rank(), **times, "all_reduce": 0.0}])])
    found = report(alone, trained, ABSENT, train=True)
    assert found["cells"][1]["figures"]["stages"] == dict(zip(STAGES, (0.4, 0.3, 0.2, 0.1), strict=True))
    assert "| 40.0% | 30.0% | 20.0% | 10.0% |" in page(found)
    assert draw(found, tmp_path) == ["speedup.png"]
    assert (tmp_path / "speedup.png").read_bytes().startswith(PNG)
    assert draw(report(ABSENT), tmp_path / "nowhere") == []


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--mode", "single,both"], "--mode 'both': expected one of single, dataparallel, torch, horovod"),
        (["--precision", "fp8"], "--precision 'fp8': expected one of fp32, tf32, amp-fp16, amp-bf16"),
        (
            ["--train", "--task", "tests.vehicles.tiny:TinyTask", "-T", "count=9"],
            "--train times --task image-cl",
        ),
        (["--train", "--metric", "top1", "--on-error", "skip"], "--metric, --on-error: not for --tr"),
        (["--device", "tpu", "--mode", "single"], "--device 'tpu' is not a device"),
        (["--model", "resnet"], "resnet"),
        (["--no-plots", "--mode", "dataparallel", "--processes", "1"], "there is nothing to measure"),
        (["--processes", "2"], "this folder is not empty"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(words: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = [] if "empty" not in expected else ["--out", str(tmp_path)]
    done = CliRunner().invoke(dualeval, ["bench", *words, *out], obj=[])
    assert isinstance(done.exception, UsageError)
    assert expected in str(done.exception)


def test_a_signal_before_the_first_start_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*parts: object) -> None:
        raise Interrupted("SIGINT")

    # By its name it is the command, and not its module.
    monkeypatch.setattr(sys.modules["dualeval.tools.bench.command"], "prepare", interrupted)
    words = ["bench", "--no-plots", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(dualeval, words, obj=words)
    assert done.exit_code == 75
    assert "interrupted by SIGINT; nothing was measured" in done.output


def test_without_matplotlib_the_plots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualeval.tools.bench.page.find_spec", lambda name: None)
    done = CliRunner().invoke(dualeval, ["bench"], obj=[])
    assert "pip install 'dualeval[plots]'; or give --no-plots" in str(done.exception)


# -- measuring -----------------------------------------------------------------------------------------


def cell_start(mode: str = "single", **more: Any) -> CellStart:
    values = {
        "mode": mode, "processes": 1, "precision": "fp32", "batch_size": 16, "cores": 1, "min_seconds": 1e-9,
        "warmup": 1, "train": False, "begun": monotonic(), "to": "",
    }  # fmt: skip
    return CellStart(**{**values, **more})


def test_a_pass_measures_the_evaluation_with_its_digest() -> None:
    """What is measured is the evaluation itself: the digest is that of ``evaluate``."""
    with Session() as session:
        found = measure_evaluation(session, lambda: TinyTask(100), {"batch_size": 16}, cell_start())
        again = measure_evaluation(
            session, lambda: TinyTask(100), {"batch_size": 16, "sample": 40}, cell_start(min_seconds=60.0)
        )
        result = session.evaluate(TinyTask(100), batch_size=16)
    assert found["metrics_digest"] == result.metrics_digest
    assert (len(found["passes"]), found["samples"], found["batches"]) == (1, 100, 7)
    assert found["ranks"][0]["peak_bytes"] > 1 << 20
    # A small data set is not repeated for a minute.
    assert (len(again["passes"]), again["samples"]) == (20, 800)
    assert again["seconds"] == sum(again["passes"])


def test_training_steps_measure_each_stage_of_whole_batches() -> None:
    job = Job.of(limit=64)
    threads = torch.get_num_threads()
    with Session() as session:
        found = measure_training(session, job.make_task(), {"limit": 64}, cell_start(train=True))
        with pytest.raises(UsageError, match="64 samples make 0 whole batches of 65, and each of 1"):
            measure_training(session, job.make_task(), {"limit": 64}, cell_start(batch_size=65))
    assert (found["samples"], found["batches"]) == (48, 3)
    own = found["ranks"][0]
    assert all(own[stage] > 0 for stage in ("forward", "backward", "optimiser"))
    # A training is not restricted to one thread.
    assert own["threads"] == torch.get_num_threads() == threads


def test_splitting_batches_leaves_the_rest_of_the_task() -> None:
    task, plain = TinyTask(10), TinyTask(10)
    split_batches(task, 2)
    model = task.build_model(torch.device("cpu"))
    seen: list[type[nn.Module]] = []
    own = TinyTask.forward

    class Seen(TinyTask):
        def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.append(type(model))
            return own(self, model, batch)

    other = Seen(10)
    split_batches(other, 2)
    batch = task.collate(task.dataset().__getitems__(range(4)))
    assert torch.equal(task.forward(model, batch), plain.forward(model, batch))
    assert torch.equal(other.forward(model, batch), plain.forward(model, batch))
    assert [issubclass(kind, nn.DataParallel) for kind in seen] == [True]


def test_what_was_measured_until_ctrl_c_is_kept(launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [
        *("--mode", "single", "--limit", "128", "--rounds", "50", "--min-seconds", "1e-6"),
        *("--out", str(out)),
    ]
    with launch.started([*BENCH, *words], cwd=tmp_path) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    assert first.startswith("round 1/50  single, 1 process, fp32, batch size 64  "), errors
    assert process.returncode == 75, errors
    assert "interrupted by SIGINT; what was measured until then is reported" in errors
    found = json.loads((out / "bench.json").read_text())
    assert found["interrupted"]
    [cell] = found["cells"]
    assert cell["outcome"] == MEASURED
    # On the core that the process was given.
    first_one = cell["measurements"][0]
    assert first_one["samples"] == 128 * len(first_one["passes"])
    assert first_one["ranks"][0]["cores"] == found["settings"]["cores"]
    assert "the first 128 of 10,000 samples" in (out / "bench.md").read_text()
    assert "**Interrupted**" in rest
    assert {file.name for file in out.iterdir()} >= {"bench.md", "speedup.png"}


@pytest.mark.long
def test_a_killed_bench_leaves_no_cell_running(launch: Launch, tmp_path: Path) -> None:
    words = ["--mode", "single", "--cores-per-process", "1", "--min-seconds", "600", "--no-plots"]
    with launch.started([*BENCH, *words, "--out", str(tmp_path / "out")], cwd=tmp_path) as process:
        cells: list[psutil.Process] = []

        def is_bound() -> bool:
            with suppress(psutil.NoSuchProcess):  # others come before it
                for each in psutil.Process(process.pid).children():
                    if "--cell" in each.cmdline() and len(each.cpu_affinity()) == 1:
                        cells[:] = [each]
            return bool(cells)

        await_that(is_bound, process)
        process.kill()
        _, alive = psutil.wait_procs(cells, timeout=30)
        assert not alive


@pytest.mark.long
@pytest.mark.needs("horovod")
@pytest.mark.parametrize("train", [False, True])
def test_every_mode_is_measured_on_1_and_2_processes(launch: Launch, tmp_path: Path, train: bool) -> None:
    words = ["--limit", "256", "--rounds", "1", "--min-seconds", "1e-6", "--processes", "1,2,1000"]
    precision = "amp-bf16" if train else "fp32"
    words += ["--precision", f"{precision},tf32", "--cores-per-process", "1", "--device", "cpu"]
    words += ["--out", str(tmp_path / "out"), *(["--train"] if train else [])]
    launch([*BENCH, *words], timeout=280, cwd=tmp_path).ok()
    found = json.loads((tmp_path / "out/bench.json").read_text())
    cells = {(cell["mode"], cell["processes"], cell["precision"]): cell for cell in found["cells"]}
    for mode, processes in [("single", 1), *itertools.product(("torch", "horovod"), (1, 2))]:
        cell = cells[mode, processes, precision]
        assert cell["outcome"] == MEASURED, cell["reason"]
        [one] = cell["measurements"]
        assert [own["cores"] for own in one["ranks"]] == [1] * processes
        if train:
            assert all(own["all_reduce"] > 0 for own in one["ranks"])
        else:
            assert one["samples"] == 256 * len(one["passes"])
            [alone] = cells["single", 1, precision]["measurements"]
            assert one["metrics_digest"] == alone["metrics_digest"]
    assert "GPUs" in cells["dataparallel", 2, precision]["reason"]
    assert "1000 processes" in cells["torch", 1000, precision]["reason"]
    assert "TF32 is a format that only some GPUs have" in cells["torch", 2, "tf32"]["reason"]
    assert not (tmp_path / "out/logs").exists()


FAILS_WITH_LARGE = """
import torch
from tests.engine.end.test_endings import await_that
from tests.vehicles.tiny import TinyTask

class Mine(TinyTask):
    def __init__(self):
        super().__init__(64)

    def forward(self, model, batch):
        if len(batch["targets"]) > 32:
            raise RuntimeError("CUDA error: out of memory")
        return super().forward(model, batch)
"""


@pytest.mark.long
def test_a_cell_that_fails_is_listed_and_the_others_go_on(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILS_WITH_LARGE)
    words = ["--task", "mine.py:Mine", "--mode", "single", "--batch-size", "16,64", "--rounds", "2"]
    done = launch([*BENCH, *words, "--min-seconds", "1e-6", "--no-plots", "--out", "out"], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    small, large = json.loads((tmp_path / "out/bench.json").read_text())["cells"]
    assert (small["outcome"], len(small["measurements"])) == (MEASURED, 2)
    assert (large["outcome"], large["measurements"]) == (FAILED, [])
    assert large["reason"].startswith("rank 0: out of memory on cpu with --batch-size 64")
    # Its output stays; it was started once.
    assert [file.name for file in (tmp_path / "out/logs").glob("*.err")] == ["single-1-fp32-64-1.err"]
    assert not (tmp_path / "out/speedup.png").exists()
