"""Runs the first step of a job while others have the ports that its ranks want to meet at.

``occupied_ports_worker.py NUMBER COMMAND...``, inside a job on its first host: so many ports are taken, each
with a server that answers as one of another kind. Ends with the command's exit code; the last line says how
many came to the servers.
"""

from __future__ import annotations

import os
import socketserver
import subprocess
import sys
import threading
from contextlib import ExitStack

from dualeval.launch import detect
from dualeval.world.meetings.address import AtAddress
from tests.environments import read_variables

# What the first rank of the step is going to find, but for the job's own number.
STEP = read_variables(
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 "
    "'SLURM_STEP_TASKS_PER_NODE=1(x2)' SLURM_STEP_NODELIST=h[0-1]"
)

visitors: list[object] = []


class Other(socketserver.BaseRequestHandler):
    """Answers whoever comes."""

    def handle(self) -> None:
        visitors.append(self.client_address)
        self.request.sendall(b"SSH-2.0-Other\r\n")


def main() -> None:
    world = detect({**STEP, "SLURM_JOB_ID": os.environ["SLURM_JOB_ID"]}, "srun")
    assert isinstance(world.meeting, AtAddress)
    first = world.meeting.port
    with ExitStack() as stack:
        for port in range(first, first + int(sys.argv[1])):
            server = stack.enter_context(socketserver.ThreadingTCPServer(("", port), Other))
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        code = subprocess.run(sys.argv[2:], timeout=60).returncode
    print(len(visitors))
    sys.exit(code)


if __name__ == "__main__":
    main()
