"""What ``--model`` names, made into a model: a file a kind. Begin with ``source.py``.

Callers: models, tasks and their options. Keep: what a source says of preprocessing and classes decides
numbers.
"""
