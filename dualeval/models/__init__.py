"""Building a model and reading checkpoints.

It imports data. Begin with ``classifiers.py``; what becomes of a checkpoint's tensors is in ``weights.py``.
"""
