"""The control plane: ranks meet here, share out chunks, report their progress, and learn of failures.

It imports no other room of the engine. Begin with ``plane.py``; why a run ends is in ``verdict.py``.
A rank killed on rank 0's host is named in ``ending.py`` (``name_killed``), one that hangs in ``monitor.py``.
Callers: all rooms that wait for other ranks or report. Keep: no collective, a few bytes a rank and second;
the first verdict in the store wins; whoever waits learns of an end.
"""
