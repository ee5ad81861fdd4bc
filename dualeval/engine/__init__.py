"""The one evaluation engine. Begin with ``run.py``: a run from its task to its result, one step a line.

Its rooms, from the ground up: values and control; device; identity; model and samples; folder; end; job;
scoring; checks; loop; sharding. Each may import those before it. Of the rest of the package the engine
imports metrics, columns, results, the abstract ``Backend`` and the protocol ``Task``, and no implementation.
Callers: cli, ``door.py``, tools, comparison (finished runs). Keep: the same bits on any number of ranks, each
sample counted once, one exit code.
"""
