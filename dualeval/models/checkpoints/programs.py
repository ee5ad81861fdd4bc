"""Files that are programs, and no weights: TorchScript archives and exported programs."""

from __future__ import annotations

import zipfile
from pathlib import Path

SCRIPT = "a TorchScript archive"
EXPORTED = "a torch.export program"


def program_in(path: Path) -> str | None:
    """What kind of program a file is; None for one that is none."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            # The first part is a folder that is named like the file.
            names = {name.partition("/")[2] or name for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return EXPORTED  # the second of torch before 2.8
    # What torch.save writes has neither code nor constants.
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return SCRIPT
    return None
