"""Models whose parameters are divided over the ranks: identity, values, gathers, and a loop in lockstep.

It imports guest and loop, and what these import. Begin with ``sharded.py``, then ``lockstep.py``.
Caller: building alone, and only where a run asks for it. Keep: all ranks gather in one order; the identity
is that of the whole model; private parts of torch's FSDP stay in ``fsdp.py`` and ``gathers.py``.
"""
