"""The one place that knows of a torchvision that was built for another torch, and imports it all the same.

PyPI's torchvision is compiled for CUDA builds of torch. Beside a CPU build its operators do not load, and
``import torchvision`` stops because ``torchvision::nms`` has no schema. Here the two schemas that the import
looks for are declared just before it: models, transforms, data sets and weights then work. The compiled
operators themselves (nms, decode_jpeg) stay out of reach, and nothing here uses them.

``python -m dualeval.vision_library``, which ``make run`` calls, does the same for every script of an
environment: it copies this file there, and Python runs it at each start. It therefore imports nothing but
``sys`` before somebody imports torchvision.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.machinery import ModuleSpec
    from typing import Any

_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_COPY = "_dualeval_torchvision"
_declared: list[Any] = []  # a library's schemas go when it is collected


class TorchvisionFinder:
    """Finds torchvision where Python finds it, and declares what it lacks when it is imported, not before."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find torchvision; None for all else, which the next finders find."""
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def declare_and_execute(module: Any) -> None:
                declare(spec.submodule_search_locations or ())
                execute(module)

            spec.loader.exec_module = declare_and_execute  # type: ignore[method-assign]
        return spec


def put_finder() -> None:
    """Have this process import torchvision through ``TorchvisionFinder``."""
    if not any(type(each).__name__ == TorchvisionFinder.__name__ for each in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())


def torchvision() -> Any:
    """The torchvision package, imported at the first call (about a second)."""
    put_finder()
    import torchvision as package
    import torchvision.models
    import torchvision.transforms.functional

    return package


def declare(folders: Iterable[str]) -> bool:
    """Declare the two schemas where torchvision's own operators do not load; returns whether that was so."""
    from pathlib import Path

    import torch

    for library in (path for folder in folders for path in Path(folder).glob("_C*.so")):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError:
            schemas = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            for schema in _MISSING:
                schemas.define(schema)  # type: ignore[no-untyped-call]
            _declared.append(schemas)
            return True
    return False


def put_into_environment() -> None:
    """Let all of this environment import torchvision, if that needs help; says what it has done."""
    import sysconfig
    from importlib.metadata import version
    from importlib.util import find_spec
    from pathlib import Path

    copy = Path(sysconfig.get_path("purelib"), f"{_COPY}.py")
    start = copy.with_suffix(".pth")
    found = find_spec("torchvision")
    if found is None or not declare(found.submodule_search_locations or ()):
        start.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        print("torch and torchvision fit together: nothing to do.")
        return
    copy.write_bytes(Path(__file__).read_bytes())
    start.write_text(f"import {_COPY}; {_COPY}.put_finder()\n", "utf-8")
    print(
        f"torchvision {version('torchvision')} was built for another torch than {version('torch')}: with "
        f"{start} 'import torchvision' works here, without its compiled operators (nms, decode_jpeg). To "
        f"undo this, delete {start.name} and {copy.name} there."
    )


if __name__ == "__main__":
    put_into_environment()
