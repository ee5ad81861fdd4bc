"""Models whose parameters are divided over the ranks: what they are, and how their forward is watched."""
