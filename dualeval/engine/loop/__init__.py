"""The loop: a rank's batches are read, computed and recorded, without a collective.

It imports checks, job and what these import. Begin with ``strategy.py``, then ``loop.py`` and ``forward.py``.
Callers: run and building; guest, own_loop and sharding do it otherwise. Keep: the calls a batch are few
(benchmarks/widths.py); the host waits only for the batch two steps behind; which rank has it changes no bit.
"""
