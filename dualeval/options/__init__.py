"""The options of a run: how they are declared, read, checked and recorded.

``fields.py``, ``choices.py``, ``evaluation.py`` and ``precision.py`` are shared by all; the others import
tasks' options. Begin with ``job.py``. What ``--precision`` does, and where: ``precision.py``.
Callers: cli, ``door.py``, tools; tasks and metrics declare theirs with ``fields.py``. Keep: names and
defaults are public, in job files, keywords (make tables) and results; no torch is imported; a wrong value
exits with 2.
"""
