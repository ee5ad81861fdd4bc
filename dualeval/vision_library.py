"""The one place that imports torchvision.

PyPI's torchvision wheel is compiled for CUDA builds of torch: beside a CPU build its compiled operators do
not load, and the import stops because ``torchvision::nms`` has no schema. Declaring the two schemas that
the import looks for makes models, transforms, data sets and weights work there; the compiled operators
themselves (nms, decode_jpeg) stay out of reach, and nothing here uses them.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a library's schemas go when it is collected


@functools.cache
def torchvision() -> Any:
    """The torchvision package, imported at the first call (about a second)."""
    if not _operators_load():
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in _MISSING:
            library.define(schema)  # type: ignore[no-untyped-call]
        _declared.append(library)
    import torchvision as package
    import torchvision.models
    import torchvision.transforms.functional

    return package


def _operators_load() -> bool:
    """Whether torchvision's compiled operators fit this torch; declaring them twice would be an error."""
    found = find_spec("torchvision")
    folders = (found and found.submodule_search_locations) or ()
    for library in (path for folder in folders for path in Path(folder).glob("_C*.so")):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError:
            return False
    return True
