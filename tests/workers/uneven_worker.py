"""Evaluates a sharded network and the whole one over data of many shapes, by one group of ranks: FOLDER."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dualeval
from dualeval.engine import plan
from dualeval.errors import UsageError
from dualeval.result import Result
from tests.workers.lockstep_worker import ShardedTask


def evaluated(
    count: int, *, shard: str, broken: str = "", calls: str = "one", draws: str = "", **options: Any
) -> Result:
    """One evaluation; nothing of the sharded model is left after it."""
    try:
        wrong = {"shard": shard, "broken": broken, "calls": calls, "draws": draws}
        task = ShardedTask(count, wrong)
        return dualeval.evaluate(task, batch_size=4, **options)
    finally:
        gc.collect()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    found: dict[str, dict[str, Any]] = {}
    cases: dict[str, dict[str, Any]] = {
        "prime": {"count": 29},
        "fewer samples than ranks": {"count": 2},
        "one batch more": {"count": 13},
        "batches that cannot be read": {"count": 30, "broken": "0,1,2,3,8,29", "on_error": "skip"},
        "readers": {"count": 17, "workers": 1},
        "several calls a batch": {"count": 17, "calls": "several"},
    }
    of_prime: list[Result] = []
    for name, case in cases.items():
        results = [evaluated(**case, shard=shard) for shard in ("yes", "no")]
        of_prime = results if name == "prime" else of_prime
        digests = [result.metrics_digest for result in results]
        found[name] = {"sharded": digests[0], "whole": digests[1]}
        found[name]["schedules"] = [result.job.get("schedule", "static") for result in results]
    with mock.patch.object(plan, "MAX_CHUNKS", 5):
        results = [evaluated(29, shard=shard) for shard in ("yes", "no")]
    found["several batches a chunk"] = {
        "sharded": results[0].metrics_digest,
        "whole": results[1].metrics_digest,
    }
    for name, first, then in (("resumed whole", "yes", "no"), ("resumed sharded", "no", "yes")):
        out = folder / first
        earlier = evaluated(21, shard=first, out=out)
        again = evaluated(21, shard=then, out=out)
        assert again.earlier
        found[name] = {"sharded": earlier.metrics_digest, "whole": again.metrics_digest}
        found[name]["replay"] = again.replay
    for name, options in (("unreadable", {"broken": "21"}), ("dynamic", {"schedule": "dynamic"})):
        # As each session ends with its error, the next evaluation opens another one.
        try:
            evaluated(30, shard="yes", **options)
        except UsageError as error:
            found[name] = {"sharded": "", "whole": "", "error": str(error)}
        dist.barrier()
    drawn = evaluated(13, shard="yes", draws="x")
    found["drawn"] = {"sharded": "", "whole": "", "result": [drawn.deterministic, drawn.warnings]}
    found["prime"]["deterministic"] = [result.deterministic for result in of_prime]
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
