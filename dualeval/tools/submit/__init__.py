"""``dualeval submit``: a job for Slurm."""
