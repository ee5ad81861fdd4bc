"""Two finished runs over the same samples, compared pair by pair; see ``compare``.

It imports the engine, results and their scores. Begin with ``compared.py``.
Callers: cli (compare, show), report and its page. Keep: it only reads; runs over other data are refused.
"""
