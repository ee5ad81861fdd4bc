"""The steps of ``gpu.py``: ``trial.py`` says what a step is, ``page.py`` joins their parts; a file a kind.

What a process of its own measures is in ``on_bits.py`` and ``on_speed.py``; ``gpu_worker.py`` starts it.
"""
