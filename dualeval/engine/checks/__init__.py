"""What is tried beside the loop: the first samples twice, the first batch to its end, finished batches again.

It imports scoring, job and what these import. Begin with ``repeatability.py``.
Callers: run, loop, sharding, own_loop, finish. Keep: model, task and random generators are as before
afterwards; no number of the result comes from here; a warning only where numbers do differ.
"""
