"""The forms of tables, a file each, as ``TABLES`` of ``data/set_names.py`` names them."""
