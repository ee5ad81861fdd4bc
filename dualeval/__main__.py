"""``python -m dualeval``, and ``torchrun dualeval run`` from a checkout."""

import sys
from pathlib import Path

# Running a folder puts the folder itself first on the path, where dualeval/data and the like would shadow
# other packages; its parent belongs there, unless it has its place already, as site-packages has.
_HERE = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0] or ".").resolve() == _HERE:
    del sys.path[0]
    if str(_HERE.parent) not in sys.path:
        sys.path.insert(0, str(_HERE.parent))

from dualeval.cli import main  # noqa: E402 - the path must be right first

if __name__ == "__main__":
    main()
