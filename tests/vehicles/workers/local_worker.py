"""Runs code as ranks on this machine: ``local_worker.py NUMBER CODE``."""

from __future__ import annotations

import os
import sys

from dualeval.world.local_ranks import run_local

if __name__ == "__main__":
    sys.exit(run_local([sys.executable, "-c", sys.argv[2]], int(sys.argv[1]), os.environ))
