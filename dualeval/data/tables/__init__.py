"""The forms of tables, a file each, as ``TABLES`` of ``data/set_names.py`` names them.

Caller: ``data/table.py``. Keep: the same rows and types, whatever the form.
"""
