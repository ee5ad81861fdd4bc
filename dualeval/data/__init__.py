"""Data as it lies: pictures, masks, tables, questions. ``contents.py`` says what any file is, weights too.

It imports no other room but what all share. Begin with ``labelled_images.py`` or ``table.py``. Which class a
folder or a table's label is: ``labels.py``.
Callers: tasks and models, and the checks of their options. Keep: the same file gives the same samples, ids
and fingerprints, which are in identities as this room's text is; a file that is not understood is refused.
"""
