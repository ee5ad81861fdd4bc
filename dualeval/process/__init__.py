"""This process: its streams, its signals, what it says, and which process it is.

It imports errors, messages and user_code. Begin with ``start.py``, which runs before anything else.
Callers: cli, engine, report, world, launch. Keep: light to import; streams may be closed, full or broken.
"""
