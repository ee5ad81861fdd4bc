"""What makes two runs the same job: digests of values, of source code, of models and of whole jobs.

It imports values and device. Begin with ``job.py``.
Callers: model, samples, job, scoring, checks, loop, sharding, run. Keep: digests are in results and in
folders; a change of one makes another job of each stored run, which is then refused, not resumed.
"""
