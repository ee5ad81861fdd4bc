"""Columns: the values of a batch, one row a sample, from ``observe`` to the rows of a run.

It imports errors. Begin with ``ragged.py``; columns of the user's data that no task reads are ``of_data.py``.
Callers: engine, metrics, tasks, data. Keep: kinds and dtypes are those of rows on the disk; ``Ragged`` and
``Text`` are public; the files' texts are in identities.
"""
