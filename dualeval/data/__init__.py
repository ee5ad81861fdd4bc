"""Data as it lies: pictures, masks, tables, questions (``squad.py``), of files or of rows in Python.

``contents.py`` says what any file is, weights too; ``packed.py`` has pictures inside of larger files, and
``stores/`` files in object stores and on the web.

It imports no other room but what all share. Begin with ``image_sets/`` or ``table.py``. Which class a
folder or a table's label is: ``labels.py``, ``table_labels.py``.
Callers: tasks and models, cli, and the checks of options. Keep: the same file gives the same samples, ids
and fingerprints, which are in identities as this room's text is; a file that is not understood is refused.
"""
