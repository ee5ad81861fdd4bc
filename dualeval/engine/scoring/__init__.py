"""Metrics from rows, without model or data: of a finished run again, and of groups of samples.

It imports job, folder and what these import. Begin with ``rescoring.py``.
Callers: finish, checks, comparison, cli (verify, score, slice). Keep: the same bits as the run has counted, a
window of rows at a time.
"""
