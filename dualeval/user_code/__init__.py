"""The user's own code: how it is imported, whose a file is, and its lines in an error.

It imports errors and messages. Begin with ``importing.py``.
Callers: tasks, models, options, identity, cli. Keep: whose a file is (``origin.py``) decides what is hashed.
"""
