"""Building a model and reading checkpoints."""
