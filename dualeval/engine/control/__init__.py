"""The control plane: ranks meet here, share out chunks, report their progress, and learn of failures.

It imports no other room of the engine. Begin with ``plane.py``; why a run ends is in ``verdict.py``.
A rank that is killed is named in ``ending.py``, one that hangs in ``monitor.py``.
"""
