"""How a run ends early, whoever notices the reason: in order, once, with one exit code."""
