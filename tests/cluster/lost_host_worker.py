"""``dualeval``, on whose second rank the name of the first host leads nowhere, and which soon gives up."""

from __future__ import annotations

import os

from dualeval.cli import main
from dualeval.world.meetings import address

if __name__ == "__main__":
    address._UNREACHABLE_S = 1.0
    if os.environ["SLURM_PROCID"] == "1":
        os.environ["SLURM_STEP_NODELIST"] = "nowhere,h1"
    main()
