"""A model whose parameters are divided over the ranks: which parts, how it is filled, what it is."""
