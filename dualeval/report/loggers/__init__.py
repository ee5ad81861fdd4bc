"""Finished results in trackers: a file a kind, in the table of ``loggers.py``. Begin there."""
