"""The samples of a job: what they are, which of them, their ids, and the batches that are read.

It imports values, control, device and identity. Begin with ``samples.py``, then ``feed.py``.
"""
