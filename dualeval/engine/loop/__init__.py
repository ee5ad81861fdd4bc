"""The loop: a rank's batches are read, computed and recorded, without a collective.

It imports checks, job and what these import. Begin with ``strategy.py``, then ``loop.py`` and ``forward.py``.
"""
