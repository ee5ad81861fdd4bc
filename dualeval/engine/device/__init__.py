"""The device that computes: streams and copies, numeric settings, and which machines are of one kind.

It imports values. Begin with ``accelerator.py``.
"""
