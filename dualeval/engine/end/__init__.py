"""How a run ends early, whoever notices the reason: in order, once, with one exit code.

It imports control and folder. Begin with ``conclusion.py``; lines and exit codes are in ``outcome.py``.
Callers: joining and open_session; job holds its watch. Keep: all ends come to ``Conclusion.conclude``, which
saves before it speaks; nothing here may wait without a limit.
"""
