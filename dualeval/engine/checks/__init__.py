"""What is tried beside the loop: the first samples twice, the first batch to its end, finished batches again.

It imports scoring, job and what these import. Begin with ``repeatability.py``.
"""
