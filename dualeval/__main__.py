"""Where the command line begins: ``python -m dualeval``, ``torchrun dualeval`` from a checkout."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own takes time in which a signal would end with a traceback
if TYPE_CHECKING:
    from typing import NoReturn

# Running a folder puts the folder itself first on the path, where dualeval/data and the like would shadow
# other packages; its parent belongs there, unless it has its place already, as site-packages has.
_HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - pathlib takes time as well
if sys.path and os.path.realpath(sys.path[0]) == _HERE:
    del sys.path[0]
    _ABOVE = os.path.dirname(_HERE)  # noqa: PTH120
    if _ABOVE not in sys.path:
        sys.path.insert(0, _ABOVE)


def main() -> NoReturn:
    """Take signals and open the standard streams; then import the command line, and run it."""
    from dualeval.process.start import prepare

    prepare(sys.argv[1:])
    from dualeval import cli

    cli.main()


if __name__ == "__main__":
    main()
