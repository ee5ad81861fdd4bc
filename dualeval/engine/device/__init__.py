"""The device that computes: streams and copies, numeric settings, and which machines are of one kind.

It imports values. Begin with ``accelerator.py``.
Callers: model, samples, identity, folder, job, loop, checks, sharding. Keep: settings of the process are put
back after a run, and decide bits; a machine's kind is stored with a run.
"""
