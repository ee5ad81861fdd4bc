"""Plain values that all rooms share: the plan, the options, what was measured, differences, nests.

It imports no other room of the engine. Begin with ``plan.py``.
Callers: the whole engine, comparison, cli, tools. Keep: the plan depends on the number of samples and the
batch size alone, never on ranks; what is measured goes into result.json, which only gains fields.
"""
