"""The model that computes: its state before, how it is prepared, and its forward on a batch.

It imports values, control, device and identity. Begin with ``preparation.py``, then ``compute.py``.
Callers: run, loop, checks, job, guest, own_loop, sharding. Keep: a caller's model is given back as it was;
the identity is taken before anything here changes the model; what ``--precision`` casts is in
options/precision.py.
"""
