"""Two finished runs over the same samples, compared pair by pair; see ``compare``."""
