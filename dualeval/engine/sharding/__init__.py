"""Models whose parameters are divided over the ranks: identity, values, gathers, and a loop in lockstep.

It imports guest and loop, and what these import. Begin with ``sharded.py``, then ``lockstep.py``.
"""
