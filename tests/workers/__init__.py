"""Scripts that tests start as ranks."""
