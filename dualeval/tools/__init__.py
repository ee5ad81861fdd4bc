"""What stands around the engine, each with its command: the engine, tasks and launch know nothing of these.

Each tool imports the command line and all below it, and of the tools ``starts.py`` and ``node_facts.py``.
Caller: cli, by its table of commands. Keep: taken out with that line, the rest stays green
(test_deletable.py).
"""
