"""Writes dualeval/assets/imagenet_wnids.txt anew: ``python -m tests.write_wnids``.

The list is that of the package timm, which 'make test' installs; a test compares the two.
"""

from __future__ import annotations

from pathlib import Path

from dualeval.data.class_folders import WNIDS_FILE
from tests.assets import package_folder


def installed_list() -> Path:
    """timm's list of the wnids of ILSVRC-2012, a line a class."""
    return package_folder("timm") / "data/_info/imagenet_synsets.txt"


if __name__ == "__main__":
    WNIDS_FILE.write_text(
        "".join(f"{wnid}\n" for wnid in installed_list().read_text("ascii").split()), "ascii"
    )
