"""This process: its streams, its signals, what it says, and which process it is.

It imports errors, messages and user_code. Begin with ``start.py``, which runs before anything else.
"""
