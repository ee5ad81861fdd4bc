"""What stands around the engine and is not it: the engine, tasks and launch know nothing of these."""
