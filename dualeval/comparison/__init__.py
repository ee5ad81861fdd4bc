"""Two finished runs over the same samples, compared pair by pair; see ``compare``.

It imports the engine, results and their scores. Begin with ``compared.py``.
"""
