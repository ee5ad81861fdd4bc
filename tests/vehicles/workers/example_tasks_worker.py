"""Runs examples in turn, each as the script that it is: ``example_tasks_worker.py "FILE WORDS" ...``.

``dualeval WORDS`` is the command line in place of a script. With DUALEVAL_TEST_KILL=RANK a journal file is
written after each batch, and that rank ends by SIGKILL at its second one; its first is on the disk then.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys

from dualeval.engine.folder import recorder
from dualeval.launch import detect
from tests.vehicles.faulty_models import _end_at

KILL = "DUALEVAL_TEST_KILL"


def run(words: list[str]) -> None:
    sys.argv = words
    if words[0] == "dualeval":
        runpy.run_module("dualeval", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if KILL in os.environ:
        recorder.FLUSH_EVERY_S = 0.0
        if detect(os.environ).rank == int(os.environ[KILL]):
            _end_at("rename", 1)
    for command in sys.argv[1:]:
        run(shlex.split(command))
