"""Loggers: a finished result in a tracker of experiments, each of which has one file here."""
