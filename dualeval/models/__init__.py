"""Building a model and reading checkpoints: what ``--model`` and ``--weights`` name, as modules with values.

It imports data. Begin with ``classifiers.py``; how a checkpoint's tensors get into one is in
``loading.py``, where a prefix of their names goes in ``prefixes.py``.
Callers: tasks and their options; the engine takes what they build. Keep: no code of a file is run unasked;
each tensor is used, or a message names it.
"""
