"""Data as it lies: pictures, masks, tables, questions. ``contents.py`` says what any file is, weights too.

It imports no other room but what all share. Begin with ``labelled_images.py`` or ``table.py``.
"""
