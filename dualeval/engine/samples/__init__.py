"""The samples of a job: what they are, which of them, their ids, and the batches that are read.

It imports values, control, device and identity. Begin with ``samples.py``, then ``feed.py``.
Callers: building, job, folder, loop, scoring, checks, finish, own_loop. Keep: a batch depends on its place
alone, not on who reads it; ids, fingerprints and the text of ``samples.py`` and ``subset.py`` are in
identities.
"""
