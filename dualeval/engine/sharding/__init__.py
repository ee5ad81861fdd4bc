"""Models whose parameters are divided over the ranks: what they are, how they are filled and watched."""
