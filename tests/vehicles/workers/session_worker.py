"""One rank of a script that evaluates: ``session_worker.py OUT [MODE ...]``; prints a JSON line a rank.

Modes: torch, horovod, spawned (the script has a group of its own, and the session is a guest); twice; what
rank ``BAD`` (1, or 0 where it is alone) does in its twelfth batch: exit, interrupt, error, surrogate (an
error whose text cannot be written), hang, term (it sends itself SIGTERM); stop (``stop`` says so);
fast (rank 0 looks after the others without a pause).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from time import sleep
from typing import Any

from torch import Tensor, nn

import dualeval
from dualeval.engine.control import plane
from tests.vehicles.tiny import TinyTask

BATCH = 10
SAMPLES = 400
# Of a rank that hangs; where none is to, a slow machine is no reason to end.
TIMEOUT_S = {True: 2.0, False: 60.0}


class Odd(TinyTask):
    """A TinyTask whose forward may go wrong."""

    # The same job as a TinyTask: the fingerprint names the source.
    __module__ = TinyTask.__module__
    __qualname__ = TinyTask.__qualname__

    def __init__(self, modes: set[str], *, bad: bool) -> None:
        super().__init__(SAMPLES)
        self._modes = modes if bad else set()
        self._batches = 0
        self.session: dualeval.Session

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self._batches += 1
        if self._batches == 12:
            self._go_wrong()
        return super().forward(model, batch)

    def _go_wrong(self) -> None:
        if "exit" in self._modes:
            sys.exit(0)
        if "interrupt" in self._modes:
            raise KeyboardInterrupt
        while "stop" in self._modes and self.session.control.stopping is None:
            sleep(0.01)
        if "error" in self._modes:
            raise ValueError("twelve")
        if "surrogate" in self._modes:
            raise RuntimeError("bad \udcff name")
        if "term" in self._modes:
            os.kill(os.getpid(), signal.SIGTERM)
            sleep(1)
        while "hang" in self._modes:
            sleep(0.01)


def open_group(modes: set[str]) -> Any:
    """Open a group as a training script does; returns what sums a number over it."""
    import torch

    if "horovod" in modes:
        import horovod.torch as hvd

        hvd.init()
        return lambda: float(hvd.allreduce(torch.ones(1), op=hvd.Sum))
    import torch.distributed as dist

    def total() -> float:
        value = torch.ones(1)
        dist.all_reduce(value)
        return float(value)

    if "torch" in modes:
        dist.init_process_group("gloo")
    return total


def run(out: Path, modes: set[str], rank: int) -> None:
    if "fast" in modes:
        vars(plane)["pause_for"] = lambda *_: 0.0
    total = open_group(modes) if modes & {"torch", "horovod", "spawned"} else None
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    said: dict[str, Any] = {"rank": rank}
    bad = rank == int(os.environ.get("BAD", "0"))
    task = Odd(modes, bad=bad)
    stops = bad and "stop" in modes

    def stop() -> bool | str:
        return "enough" if stops and task._batches == 12 else False

    with dualeval.Session(heartbeat_timeout=TIMEOUT_S["hang" in modes], stop=stop) as session:
        task.session = session
        said["owner"] = session.is_owner
        try:
            result = session.evaluate(task, batch_size=BATCH, out=out)
            if "twice" in modes:
                again = session.evaluate(TinyTask(SAMPLES), batch_size=BATCH, out=out / "again")
                said["again"] = again.metrics_digest
            said |= {"digest": result.metrics_digest, "resumed": result.chunks["resumed"]}
        except BaseException as error:
            said |= {"raised": type(error).__name__, "says": str(error)}
            if total is None and "catches" not in modes:
                raise
        finally:
            if total is not None:
                said["sum"] = total()
            print(json.dumps(said), flush=True)
    if modes & {"torch", "spawned"}:
        import torch.distributed as dist

        # Else its threads now and then abort the interpreter at its end.
        dist.destroy_process_group()
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    assert before == after
    print("went on", flush=True)


def spawned(rank: int, size: int, out: Path, modes: set[str]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{out}.meeting", rank=rank, world_size=size)
    run(out, modes, rank)


if __name__ == "__main__":
    place, wanted = Path(sys.argv[1]), set(sys.argv[2:])
    if "spawned" in wanted:
        from torch.multiprocessing.spawn import spawn

        spawn(spawned, (2, place, wanted), nprocs=2)  # type: ignore[no-untyped-call]
    else:
        own = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
        run(place, wanted, int(os.environ.get("HOROVOD_RANK", own)))
