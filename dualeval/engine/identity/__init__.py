"""What makes two runs the same job: digests of values, of source code, of models and of whole jobs.

It imports values and device. Begin with ``job.py``.
"""
