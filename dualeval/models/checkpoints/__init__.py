"""What a training has saved, read without running its code. Begin with ``checkpoint.py``.

Callers: models, its sources, tasks. Keep: no pickle is run unless it is trusted; of a file no more is read
than asked.
"""
