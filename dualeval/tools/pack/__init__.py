"""``dualeval pack``: the decoded pictures of a data set in one file."""
