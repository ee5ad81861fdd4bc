"""A task with two examples in each prompt, by lm-evaluation-harness and by dualeval, on 1 to 4 ranks.

    python benchmarks/harness.py

Prints the table of docs/lm-eval.md. The harness's ranks are played one after the other: its own ``evaluate``
and model class are told their rank, and what they send each other is kept until rank 0 asks for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, run_process

sys.path.insert(0, str(ROOT))

from tests.vehicles.harness_tasks import save_model, write_tasks

_DOCUMENTS, _RANKS, _TASK = 148, (1, 2, 3, 4), "choices"


def by_the_harness(model: Path, tasks: Path, size: int) -> tuple[list[str], dict[str, Any]]:
    """Its prompts in the order of the documents, and its figures."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    class Rank(HFLM):  # type: ignore[misc, unused-ignore]
        """The harness's model class as one of several ranks."""

        rank, world_size = 0, size

        def all_gather(self, tensor: Any) -> Any:
            return tensor.reshape(1).repeat(size)

        def gather_object(self, obj: Any, dst: int = 0) -> Any:
            self.sent.append(obj)
            calls = len(self.sent) // size if self.rank else len(self.sent) - (size - 1) * 2
            return [obj, *self.sent[calls - 1 : (size - 1) * 2 : 2]] if self.rank == dst else None

        def barrier(self) -> None:
            return

    ranked = Rank(pretrained=str(model), dtype="float32", batch_size=1, device="cpu")
    ranked.sent = []
    prompts: dict[int, str] = {}
    figures: dict[str, Any] = {}
    for rank in reversed(range(size)):
        ranked.rank = rank
        loaded = TaskManager(include_path=str(tasks), include_defaults=False).load([_TASK])
        loaded["tasks"][_TASK].set_fewshot_seed(1234)
        figures = lm_eval.evaluate(ranked, loaded, bootstrap_iters=0)
        prompts |= {each.doc_id: each.args[0] for each in loaded["tasks"][_TASK].instances}
    return [prompts[number] for number in sorted(prompts)], figures["results"][_TASK]


def by_dualeval(model: Path, tasks: Path, size: int, out: Path) -> tuple[list[str], dict[str, Any]]:
    options = f"--tasks {_TASK} --bootstrap-iters 0 --batch-size 8 --nproc {size} --no-progress".split()
    paths = ["--model", str(model), "--include-path", str(tasks), "--out", str(out)]
    command = [sys.executable, "-m", "dualeval", "run", "--task", "lm-eval", *options, *paths]
    run_process(command, timeout_s=600, environ=os.environ)
    lines = (out / f"samples_{_TASK}_dualeval.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line)["arguments"]["gen_args_0"]["arg_0"] for line in lines]
    return prompts, json.loads((out / "result.json").read_text("utf-8"))


def main(ranks: Sequence[int] = _RANKS) -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model, tasks = save_model(home / "model"), write_tasks(home / "tasks", _DOCUMENTS)
        print("| ranks | harness: acc, acc_norm | prompts that differ | dualeval: acc, acc_norm | ", end="")
        print("prompts that differ | metrics_digest |\n|---|---|---|---|---|---|")
        first: list[list[str]] = []
        for size in ranks:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                theirs, figures = by_the_harness(model, tasks, size)
            ours, result = by_dualeval(model, tasks, size, home / f"run-{size}")
            first = first or [theirs, ours]
            assert first[1] == first[0], "on one rank both have the same prompts"
            there = [f"{figures[f'{name},none']:.4f}" for name in ("acc", "acc_norm")]
            here = [f"{result['metrics'][f'{_TASK}/{name}']:.4f}" for name in ("acc", "acc_norm")]
            cells = [size, ", ".join(there), f"{_differ(theirs, first[0])} of {len(theirs)}"]
            cells += [", ".join(here), _differ(ours, first[1]), f"`{result['metrics_digest'][:12]}`"]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _differ(prompts: Sequence[str], first: Sequence[str]) -> int:
    return sum(one != other for one, other in zip(prompts, first, strict=True))


if __name__ == "__main__":
    main()
