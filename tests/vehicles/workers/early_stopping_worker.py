"""One rank of EarlyStopping's updates: ``early_stopping_worker.py BACKEND``; prints a JSON line.

On rank 1 every value has noise: by its own floats it would go on where rank 0 stops.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

import dualeval
from dualeval import EarlyStopping
from dualeval.errors import UsageError
from dualeval.metrics import Mean

# By epoch: how many of the 1,000 samples are classified as wanted.
RIGHT = [500, 600, 600, 599]


def observe(outputs: Any, batch: Any) -> dict[str, Any]:
    return {"right": outputs}


def results(rank: int) -> list[dualeval.Result]:
    """The result of each epoch; on rank 1 as another library would have summed it there."""
    found = []
    for number, right in enumerate(RIGHT):
        data = (torch.arange(1000) < right).double()
        result = dualeval.evaluate(
            model=torch.nn.Identity().eval(),
            data=data,
            observe=observe,
            metrics=[Mean("right", higher_is_better=True)],
        )
        exact = result.metrics["right"]
        assert isinstance(exact, float)
        found.append(dataclasses.replace(result, metrics={"right": exact + rank * number * 1e-9}))
    return found


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return "nothing"


def main() -> None:
    group = sys.argv[1]
    if group == "torch":
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    else:
        import horovod.torch as hvd  # type: ignore[import-untyped, import-not-found, unused-ignore]

        hvd.init()
        rank = hvd.rank()
    epochs = results(rank)
    stopping = EarlyStopping("right", patience=2)
    said: dict[str, Any] = {"rank": rank, "decisions": [], "bests": []}
    for result in epochs[:3]:
        said["decisions"].append(stopping.update(result))
        said["bests"].append(stopping.is_best)

    # Rank 0 alone has a checkpoint, and goes on from it.
    resumed = EarlyStopping("right", patience=2)
    if rank == 0:
        resumed.load_state_dict(stopping.state_dict())
    said["decisions"].append(resumed.update(epochs[3]))
    said["best_epoch"] = resumed.best_epoch
    assert resumed.best is not None
    said["best"] = resumed.best.metrics["right"]

    def update(result: dualeval.Result, **options: Any) -> str:
        return refusal(lambda: EarlyStopping(**{"metric": "right", "patience": 2, **options}).update(result))

    lacking = dataclasses.replace(epochs[0], metrics={"top1": 0.5} if rank else epochs[0].metrics)
    said["refusals"] = [update(lacking), update(epochs[0], patience=2 + rank)]
    # NaN on one rank only: rank 0's value counts.
    stopping = EarlyStopping("right", patience=1)
    broken = dataclasses.replace(epochs[0], metrics={"right": float("nan")} if rank else epochs[0].metrics)
    said["nan"] = [stopping.update(broken), stopping.is_best]
    with dualeval.Session() as session:
        stopping = EarlyStopping("right", patience=1, backend=session.backend)
        said["session"] = [stopping.update(epochs[number]) for number in (1, 2)]
        stopping = EarlyStopping("right", patience=1)
        said["in session"] = [stopping.update(epochs[number]) for number in (1, 2)]
    print(json.dumps(said), flush=True)
    if group == "torch":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
