"""Finished results in trackers: a file a kind, in the table of ``loggers.py``. Begin there.

Callers: session, cli, door, the page, ``dualeval watch``. Keep: names of values in a tracker; a library is
imported where used.
"""
