"""The output folder of a run: opened, held, filled by the journal, and finished.

It imports values, control, device and samples. Begin with ``layout.py``, which names all files, then
``recorder.py`` and ``journal.py``.
"""
