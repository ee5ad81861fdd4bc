"""``dualeval doctor``: what this machine and its launcher give, and whether ranks come together."""
