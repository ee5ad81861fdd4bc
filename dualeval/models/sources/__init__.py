"""What ``--model`` names, made into a model: a file a kind. Begin with ``source.py``."""
