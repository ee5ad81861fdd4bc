"""How a run and its result are shown to people; it reads results and comparisons, and knows no engine.

Begin with ``table.py``; the page is in ``page/``, trackers in ``loggers/``.
Callers: cli, tools, and ``print`` of a result or comparison. Keep: no number is computed here that a result
has not.
"""
