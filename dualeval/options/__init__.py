"""The options of a run: how they are declared, read, checked and recorded."""
