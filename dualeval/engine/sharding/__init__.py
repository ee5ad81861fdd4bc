"""Models whose parameters are divided over the ranks: identity, values, gathers, and a loop in lockstep.

It imports loop and what that imports. Begin with ``model.py``, then ``lockstep.py``.
"""
