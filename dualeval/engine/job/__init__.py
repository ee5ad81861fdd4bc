"""What is evaluated, agreed on by all ranks, and what earlier runs have left of it.

It imports all rooms below: model, samples, folder, end and what these import. Begin with ``evaluation.py``.
Callers: run, session, finish, scoring, checks, loop, sharding, building, own_loop. Keep: all ranks
agree before a folder is opened.
"""
