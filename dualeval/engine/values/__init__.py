"""Plain values that all rooms share: the plan, the options, what was measured, differences, nests.

It imports no other room of the engine. Begin with ``plan.py``.
"""
