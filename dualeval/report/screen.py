"""Whether what is written appears on a person's own terminal, where a line may be drawn anew."""

from __future__ import annotations

import os
from typing import TextIO

_STANDARD_STREAMS = (0, 1, 2)


def on_screen(stream: TextIO) -> bool:
    """Tell whether a stream of this process is the terminal that a person looks at.

    Open MPI gives the standard output of each rank a terminal of its own, whose lines mpirun then puts where
    its own go, horovodrun with the rank before each. A person's terminal has the standard input or error of
    the process as well, unless both are redirected: then nothing but colours and the moving bar is lost.
    """
    if not stream.isatty():
        return False
    return any(os.isatty(number) for number in _STANDARD_STREAMS if number != stream.fileno())
