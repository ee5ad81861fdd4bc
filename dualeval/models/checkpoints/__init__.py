"""What a training has saved, read without running its code. Begin with ``checkpoint.py``."""
