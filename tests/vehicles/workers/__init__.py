"""Scripts that ranks of tests run."""
