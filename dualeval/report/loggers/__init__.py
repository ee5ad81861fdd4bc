"""Loggers: a finished result in trackers of experiments."""
