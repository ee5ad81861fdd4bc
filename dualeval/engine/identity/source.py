"""The source code that decides numbers: the text of modules, and code objects without a file."""

from __future__ import annotations

import ast
import inspect
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from dualeval.engine.identity.plain import module_name, sha256_of, short_hex
from dualeval.user_code.origin import library_of

_OWN_PACKAGE = __name__.partition(".")[0]
# Files of this package that define inputs, or what is made of them.
_OWN_FILES = (
    *("columns", "data", "metrics", "models", "tasks"),
    *("engine/samples/subset.py", "engine/samples/samples.py"),
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a program has made
_COMPILED = (*EXTENSION_SUFFIXES, ".pyc")


class _Source:
    """Where a module comes from, and the text of its file when first read."""

    def __init__(self, name: str, mark: object, origin: str | None, folders: Iterable[str]) -> None:
        self.mark = mark  # changes when the module is loaded again
        self.folders = [*folders]  # of a package
        place = None if origin is None else Path(origin).absolute()
        is_text = place is not None and not place.name.endswith(_COMPILED) and place.is_file()
        self.file = place if is_text else None
        if place is not None:
            self.library = library_of(place)
        else:
            is_built_in = name.partition(".")[0] in sys.stdlib_module_names and name != "__main__"
            self.library = "python" if is_built_in else None

    @cached_property
    def text(self) -> str | None:
        return None if self.file is None else self.file.read_text("utf-8", "surrogateescape")

    @cached_property
    def lines(self) -> list[str]:
        return (self.text or "").splitlines(keepends=True)

    @cached_property
    def imported(self) -> list[tuple[int, str, list[str]]]:
        """The text's imports: level of a relative import, module, and names that may be modules in it."""
        imports: list[tuple[int, str, list[str]]] = []
        with suppress(SyntaxError):  # changed since it was imported
            for node in ast.walk(ast.parse(self.text or "")):
                if isinstance(node, ast.Import):
                    imports += [(0, each.name, []) for each in node.names]
                elif isinstance(node, ast.ImportFrom):
                    imports.append((node.level, node.module or "", [each.name for each in node.names]))
        return imports


_sources: dict[str, _Source] = {}


def _source(name: str) -> _Source:
    """The source of a module, loaded or not: functions may import it later."""
    loaded = sys.modules.get(name)
    space = vars(loaded) if isinstance(loaded, ModuleType) else {}
    mark = space.get("__spec__") or loaded
    known = _sources.get(name)
    if known is None or known.mark is not mark:
        place = (space.get("__file__"), space.get("__path__") or ()) if loaded else _place_of(name)
        known = _sources[name] = _Source(name, mark, *place)
    return known


def _place_of(name: str) -> tuple[str | None, Iterable[str]]:
    """The file and the folders of a module that is not loaded, found without importing it."""
    parent = name.rpartition(".")[0]
    folders = _source(parent).folders if parent else None
    if folders != [] and name.replace(".", "_").isidentifier():
        for finder in sys.meta_path:
            spec = finder.find_spec(name, folders)
            if spec is not None:
                return spec.origin if spec.has_location else None, spec.submodule_search_locations or ()
    return None, ()


def has_source(item: type | FunctionType) -> bool:
    """Whether a class or function is defined in a file, or is Python's own.

    False in a notebook, in ``python -c``, and after ``exec``.
    """
    if isinstance(item, type) and not item.__flags__ & _HEAP_TYPE:
        return True
    if _source(item.__module__ or "").file is None:
        return False
    if isinstance(item, FunctionType):
        return not item.__code__.co_filename.startswith("<")
    generated = hasattr(item, "__dataclass_fields__") or hasattr(item, "_fields")
    return generated or not any(
        isinstance(value, FunctionType) and value.__code__.co_filename.startswith("<")
        for value in vars(item).values()
    )


def definition(function: FunctionType) -> bytes | CodeType:
    """The lines that define a function; its code if no file has them, or for a lambda."""
    code, source = function.__code__, _source(function.__module__ or "")
    if source.file is None or code.co_name == "<lambda>" or Path(code.co_filename).absolute() != source.file:
        return code
    try:
        return "".join(inspect.getblock(source.lines[code.co_firstlineno - 1 :])).encode(
            "utf-8", "surrogateescape"
        )
    except (tokenize.TokenError, SyntaxError):  # changed since it was imported
        return code


def is_own(item: type | FunctionType | str) -> bool:
    """Whether a class, a function or a module of this name is the user's.

    That is of no installed library, not Python's, not dualeval's.
    """
    if isinstance(item, type) and not item.__flags__ & _HEAP_TYPE:
        return False
    name = item if isinstance(item, str) else str(item.__module__ or "builtins")
    return name.partition(".")[0] != _OWN_PACKAGE and _source(name).library is None


def names_in(code: CodeType) -> set[str]:
    """The globals and attributes that a code object, and code nested in it, name."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def source_fingerprints(used: Iterable[str], code: Mapping[str, list[bytes]]) -> dict[str, dict[str, str]]:
    """Hashes of the user's modules that are used, and of libraries; ``code`` adds digests by module."""
    modules = defaultdict[str, list[bytes]](list, {_OWN_PACKAGE: [_own_digest()]})
    libraries = defaultdict[str, list[bytes]](list)
    for name, text in _reached(used).items():
        modules[module_name(name)] = [text.encode("utf-8", "surrogateescape")]
    for name in sorted({*used, *code}):
        source = _source(name)
        # Sorted: a model may hold its modules in another order.
        digests = sorted(code.get(name, ()))
        if name.partition(".")[0] == _OWN_PACKAGE:
            modules[_OWN_PACKAGE] += digests
        elif source.library is None:
            modules[module_name(name)] += digests
        else:
            libraries[source.library] += [
                name.encode(),
                (source.text or "").encode("utf-8", "surrogateescape"),
                *digests,
            ]
    return {
        "source": {name: _hash(digests) for name, digests in modules.items() if digests},
        "libraries": {
            name: f"{version} {_hash(libraries[library])}".strip()
            for library in libraries
            for name, _, version in [library.partition("-")]
        },
    }


def _hash(parts: Iterable[bytes]) -> str:
    return short_hex(sha256_of("source", *parts))


@cache
def _own_digest() -> bytes:
    root = Path(__file__).parents[2]
    files = [
        file
        for name in _OWN_FILES
        for file in sorted({root / name, *(root / name).rglob("*.py")})
        if file.is_file()
    ]
    return sha256_of(
        "dualeval", *(part for file in files for part in (file.name.encode(), file.read_bytes()))
    )


def _reached(used: Iterable[str]) -> dict[str, str]:
    """The text of the user's modules that are used, and of all that they reach.

    A module reaches the modules that it imports, at the start or in a function, and the modules that define
    the current values of its globals.
    """
    texts: dict[str, str] = {}
    waiting = [*used]
    while waiting:
        name = waiting.pop()
        text = _source(name).text if is_own(name) else None
        if text is not None and name not in texts:
            texts[name] = text
            waiting += [*_imports(name), *_held(name)]
    return texts


def _imports(name: str) -> Iterator[str]:
    """The modules that a module may import."""
    package = module_name(name) if _source(name).folders else module_name(name).rpartition(".")[0]
    for level, module, names in _source(name).imported:
        above = package.split(".")[: package.count(".") + 2 - level] if level else []
        base = ".".join(filter(None, [*above, module]))
        words = base.split(".")
        yield from (".".join(words[:count]) for count in range(1, len(words) + 1) if all(words))
        if base and names and is_own(base) and _source(base).folders:
            yield from (f"{base}.{each}" for each in names)


def _held(name: str) -> Iterator[str]:
    """The modules that define what a module's globals hold."""
    for value in [*vars(sys.modules[name]).values()] if name in sys.modules else ():
        kind = type(value)
        if issubclass(kind, ModuleType):
            defined = vars(value).get("__name__")
        else:
            defined = value.__module__ if issubclass(kind, (type, FunctionType)) else kind.__module__
        if isinstance(defined, str):
            yield defined
