"""The model that computes: its state before, how it is prepared, and its forward on a batch.

It imports values, control, device and identity. Begin with ``preparation.py``, then ``compute.py``.
"""
