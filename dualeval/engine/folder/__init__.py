"""The output folder of a run: opened, held, filled by the journal, and finished.

It imports values, control, device and samples. Begin with ``layout.py``, which names all files; a batch is
counted in ``recorder.py``, then written by ``journal.py``.
Callers: job, loop, scoring, checks, end, finish, comparison, cli. Keep: earlier folders stay readable, so
that files only gain fields; counts are int64; a file is on the disk before what it replaces is removed.
"""
