"""``dualeval setup-horovod``: build Horovod for the installed torch, and keep its wheel."""
