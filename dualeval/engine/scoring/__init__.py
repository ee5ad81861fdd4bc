"""Metrics from rows, without model or data: of a finished run again, and of groups of samples.

It imports job, folder and what these import. Begin with ``rescoring.py``.
"""
