"""Models whose parameters are divided over the ranks: their identity, their values, and their gathers."""
