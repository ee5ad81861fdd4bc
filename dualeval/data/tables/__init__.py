"""The forms of tables, a file each, in the table of ``data/table.py``. Begin there."""
