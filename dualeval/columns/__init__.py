"""Columns: the values of a batch, one row a sample, from ``observe`` to the rows of a run.

It imports errors. Begin with ``ragged.py``: what ``observe`` and ``postprocess`` return is checked and made
columns there. ``of_data.py``: columns of the data that no task reads; ``job/evaluation.py`` reads them.
Callers: engine, metrics, tasks, data. Keep: kinds and dtypes are those of rows on the disk; ``Ragged`` and
``Text`` are public; the files' texts are in identities.
"""
