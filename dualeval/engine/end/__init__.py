"""How a run ends early, whoever notices the reason: in order, once, with one exit code.

It imports control and folder. Begin with ``conclusion.py``.
"""
