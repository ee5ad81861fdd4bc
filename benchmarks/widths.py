"""How many calls and files of dualeval's own a batch passes, and the end of a run that has lost a rank.

A batch is one in the midst of the embedded job, on one CPU thread. The end is that of rank 0, in its main
thread, from the session's `conclude` until it has an exit code. With `--beside` a commit is counted, too.

    python benchmarks/widths.py [--beside COMMIT]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import ROOT, machine, run_process, table, write_results

# Where a batch begins; and which of the job's 20 is counted: neither of the first, nor of the last.
_BATCH, _COUNTED = ("engine/model/compute.py", "_columns"), 12
_SAMPLES = 20_000
_HEAD = "", "calls a batch", "its files", "its changes of file", "files of an end", "watch entered"


class Calls:
    """A profile function."""

    def __init__(self) -> None:
        # Calls in dualeval's files: file, name, the caller's file.
        self.met: list[tuple[str, str, str]] = []
        # How many there were when the session concluded, and when it had concluded.
        self.concludes = self.concluded = 0

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        file, name, caller = _file(frame), frame.f_code.co_name, _file(frame.f_back or frame)
        if file and event == "call":
            self.met.append((file, name, caller))
        if (file, name) == ("engine/open_session.py", "conclude"):
            self.concludes, self.concluded = self.concludes or len(self.met) - 1, len(self.met)


def _file(frame: Any) -> str:
    package, found, name = frame.f_code.co_filename.rpartition("/dualeval/")
    return name if found and "site-packages" not in package else ""


def count_batch(calls: Calls, out: str) -> None:
    """Evaluate the embedded job in this process, and print what a batch passes."""
    from dualeval.cli import main as run

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    def count(code: int) -> None:
        sys.setprofile(None)
        begun = [at for at, call in enumerate(calls.met) if call[:2] == _BATCH]
        files = [file for file, _, _ in calls.met[begun[_COUNTED] : begun[_COUNTED + 1]]]
        changes = sum(file != files[at - 1] for at, file in enumerate(files))
        print("\n" + json.dumps([len(files), len({*files}), changes]), flush=True)
        end(code)

    end, vars(os)["_exit"] = os._exit, count  # as the command ends its process
    sys.setprofile(calls)
    run(["run", "--no-progress", "--limit", "1280", "--batch-size", "64", "--out", out])


def count_end(calls: Calls, out: str) -> None:
    """Evaluate as one of two ranks, of which rank 1 kills itself; rank 0 prints what its end passes."""
    import torch

    import dualeval

    def die(_: Any, inputs: tuple[torch.Tensor]) -> None:
        if os.environ["RANK"] == "1" and inputs[0].min() < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).eval()
    model.register_forward_pre_hook(die)
    samples = torch.cat([torch.rand(_SAMPLES // 2, 8), -torch.ones(_SAMPLES // 2, 8)])
    data = torch.utils.data.TensorDataset(samples, torch.arange(_SAMPLES) % 4)
    sys.setprofile(calls)
    with suppress(dualeval.PeerError):
        dualeval.evaluate(model=model, data=data, metrics=["loss"], batch_size=20, out=out)
    sys.setprofile(None)
    met = calls.met[calls.concludes : calls.concluded]
    entered = sum("watch.py" in file and caller != file for file, _, caller in met)
    print("\n" + json.dumps([len({file for file, _, _ in met}), entered]), flush=True)


def counted(checkout: Path, out: Path) -> list[str]:
    """What a checkout's package comes to, as in the table."""
    environ = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, "--out"]
    batch = run_process([*words, f"{out}-batch"], timeout_s=120, environ=environ)
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    with subprocess.Popen([*words, f"{out}-end"], env={**environ, "RANK": "1", "LOCAL_RANK": "1"}):
        end = run_process([*words, f"{out}-end"], timeout_s=120, environ=environ)
    return [str(number) for done in (batch, end) for number in json.loads(done.output.splitlines()[-1])]


def main() -> None:
    """Read the command line, count, and write."""
    parser = argparse.ArgumentParser(description="Count what a batch and an end pass.")
    parser.add_argument("--beside", metavar="COMMIT", help="a commit of this checkout")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.out:
        (count_end if "RANK" in os.environ else count_batch)(Calls(), asked.out)
        return
    with tempfile.TemporaryDirectory() as made:
        rows = [["here", *counted(ROOT, Path(made, "here"))]]
        if asked.beside:
            subprocess.run(["git", "clone", "-qn", str(ROOT), f"{made}/old"], check=True)
            subprocess.run(["git", "-C", f"{made}/old", "checkout", "-q", asked.beside], check=True)
            rows.append([asked.beside, *counted(Path(made, "old"), Path(made, "beside"))])
    write_results("widths", "What a batch and an end pass", table(_HEAD, rows), {"rows": rows}, machine())


if __name__ == "__main__":
    main()
