"""Which texts of ``--weights`` name weights that torchvision publishes, and are no path."""

from __future__ import annotations

import re

# Members of torchvision's enumerations, such as IMAGENET1K_V1, or with the enumeration's name before them.
# In capitals behind the dot: my_Weights.pt is a file.
_NAME = re.compile(r"\w+_Weights\.[A-Z][A-Z0-9_]*|DEFAULT|IMAGENET[A-Z0-9_]*")


def is_published_name(weights: str) -> bool:
    """Whether a value of ``--weights`` is such a name: ``DEFAULT``, ``IMAGENET1K_V1``, ``X_Weights.NAME``."""
    return _NAME.fullmatch(weights) is not None


def is_path_of_weights(weights: str) -> bool:
    """Whether a value of ``--weights`` names a file: no published name, and not ``random:SEED``."""
    return not is_published_name(weights) and not weights.startswith("random:")
