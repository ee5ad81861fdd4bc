"""What a training loop asks of evaluations. It imports results, backends and launch.

Callers: users' scripts. Keep: all ranks decide alike.
"""
