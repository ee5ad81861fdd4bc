"""The source of what decides a number: files by module, and code objects where there is no file."""

from __future__ import annotations

import hashlib
import inspect
import site
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from dualeval.engine.identity.plain import short_hex
from dualeval.engine.sharding.detect import class_of

_OWN_PACKAGE = __name__.partition(".")[0]
_PYTHON = "python"
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a program has made


def source_file(module: str) -> Path | None:
    """The file that a module was made of; None for one of a notebook, of ``python -c``, or built in."""
    found = sys.modules.get(module)
    try:
        name = None if found is None else inspect.getsourcefile(found)
    except TypeError:  # no file at all
        return None
    path = None if name is None else Path(name)
    return path if path is not None and path.is_file() else None


def has_source(item: type | FunctionType) -> bool:
    """Whether a class or function stands in a file, or is Python's own.

    Not so in a notebook, in ``python -c``, after ``exec``.
    """
    if isinstance(item, type) and not item.__flags__ & _HEAP_TYPE:
        return True
    if source_file(item.__module__ or "") is None:
        return False
    if isinstance(item, FunctionType):
        return not item.__code__.co_filename.startswith("<")
    generated = hasattr(item, "__dataclass_fields__") or hasattr(item, "_fields")
    return generated or not any(
        isinstance(value, FunctionType) and value.__code__.co_filename.startswith("<")
        for value in vars(item).values()
    )


def is_own(item: type | FunctionType) -> bool:
    """Whether a class or function is the user's: of no installed library, not Python's, not dualeval's."""
    if isinstance(item, type) and not item.__flags__ & _HEAP_TYPE:
        return False
    module = str(item.__module__ or "builtins")
    group, name = _place(module, source_file(module))
    return group == "source" and name != _OWN_PACKAGE


def modules_of(items: Iterable[Any]) -> set[str]:
    """Names of the modules that define some objects' classes, what these derive from, and some callables."""
    names: set[str] = set()
    for item in items:
        if isinstance(item, ModuleType):
            names.add(item.__name__)
            continue
        if class_of(item) is not type(item):
            item = class_of(item)
        elif not isinstance(item, type):
            # A function says where it stands; for anything else its class does.
            names.add(str(getattr(inspect.unwrap(item), "__module__", None) or "builtins"))
            item = type(item)
        names |= {kind.__module__ for kind in item.__mro__}
    return names


def names_in(code: CodeType) -> set[str]:
    """The globals and attributes that a code object, and those inside of it, name."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def source_fingerprints(modules: Iterable[str], code: dict[str, bytes]) -> dict[str, dict[str, str]]:
    """Hashes of modules' source files."""
    groups: dict[str, dict[str, dict[str, bytes]]] = {
        "source": defaultdict(dict),
        "libraries": defaultdict(dict),
    }
    for module in sorted({*modules, *code}):
        file = source_file(module)
        content = b"" if file is None else hashlib.sha256(file.read_bytes()).digest()
        content += code.get(module, b"")
        if content:
            kind, group = _place(module, file)
            groups[kind][group][module] = content
    return {kind: {name: _hash(found) for name, found in places.items()} for kind, places in groups.items()}


def _hash(contents: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for module, content in contents.items():
        digest.update(module.encode() + b"\0" + content)
    return short_hex(digest.digest())


def _place(module: str, file: Path | None) -> tuple[str, str]:
    """Whose a module is, and the name under which its hash is given."""
    package = module.partition(".")[0]
    if package == _OWN_PACKAGE:
        return "source", package
    if file is None:
        return "source", module
    if package in sys.stdlib_module_names and package != "__main__":
        return "libraries", _PYTHON
    installed = any(file.is_relative_to(folder) for folder in _library_folders())
    return ("libraries", package) if installed else ("source", module)


@lru_cache
def _library_folders() -> tuple[Path, ...]:
    known = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    folders = {*known, *site.getsitepackages(), site.getusersitepackages()}
    return tuple(Path(folder) for folder in folders if folder)
