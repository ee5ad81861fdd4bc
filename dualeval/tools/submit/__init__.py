"""``dualeval submit``: a batch job from the templates in slurm/. Begin with ``command.py``."""
