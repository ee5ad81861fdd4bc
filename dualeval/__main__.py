"""``python -m dualeval``, and ``torchrun dualeval run`` from a checkout."""

import sys
from pathlib import Path

# Running a folder puts the folder itself first on the path, where dualeval/data and the like would shadow
# other packages; its parent belongs there.
_HERE = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0] or ".").resolve() == _HERE:
    sys.path[0] = str(_HERE.parent)

from dualeval.cli import main  # noqa: E402 - the path must be right first

if __name__ == "__main__":
    main()
