"""Finished results in trackers: a kind of tracker a function. Begin with ``loggers.py``."""
