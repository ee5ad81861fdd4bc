"""The options of a run: how they are declared, read, checked and recorded.

``fields.py``, ``choices.py``, ``evaluation.py`` and ``precision.py`` are shared by all; the others import
tasks' options. Begin with ``job.py``.
"""
