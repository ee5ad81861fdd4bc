"""How a run ends early, whoever notices that it has to: in order, once, with one exit code."""
