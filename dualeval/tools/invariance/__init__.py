"""Whether rows of a model have the same bits in batches of other shapes; see ``diagnosis.diagnose``."""
