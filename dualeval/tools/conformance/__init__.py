"""``dualeval conformance``: whether this system gives the same bits in every way to start ranks."""
