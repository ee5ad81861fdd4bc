"""A user's own code: how it is found, and the lines of it that an error came through, for a traceback.

Own code is what belongs neither to this package nor to an installed distribution or the standard library.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType

from dualeval.errors import LibraryError, UsageError, with_type
from dualeval.wording import nearest

DEBUG_VARIABLE = "DUALEVAL_DEBUG"
# Of a recursion without an end the last ones say enough.
_SHOWN_AT_MOST = 6
# Not resolved: two of its folders are links, and a traceback names files by the way that led to them.
_PACKAGE = f"{Path(__file__).absolute().parent}{os.sep}"
_NAME = __name__.split(".")[0]
# Code that was typed, and lies in no file.
_TYPED = ("<string>", "<stdin>", "<ipython-input", "<python-input")
_CYTHON = (".pyx", ".pxi")
_ATTRIBUTE = "_dualeval_own_code"


def importable(folder: Path) -> None:
    """Let modules in a folder be imported, as ``python -m`` and ``python FILE`` do: first of all places."""
    here = str(folder.resolve())
    if here not in sys.path and not (folder.resolve() == Path.cwd() and "" in sys.path):
        sys.path.insert(0, here)


def own_module(place: str, said: str) -> ModuleType:
    """Import a module of the user's by its name, from the working folder too, or by its path, FILE.py."""
    importable(Path.cwd())
    if place.endswith(".py"):
        return _module_of_file(Path(place), said)
    if not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"{said}: expected package.module:NAME or FILE.py:NAME")
    return _module(place, said)


def _module(name: str, said: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise broken(f"{said}: the module {name}", error) from error
        raise LibraryError(
            f"{said}: there is no module {error.name!r} in {Path.cwd()}, nor is one installed."
            f"{_file_near(name, said)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise broken(f"{said}: the module {name}", error) from error


def _file_near(name: str, said: str) -> str:
    """What to type in place of a module's name: the path of a file beside the working folder, if one is."""
    file = Path(*name.split(".")).with_suffix(".py")
    found = next((path for path in [Path("..") / file, *Path().glob(f"*/{file}")] if path.is_file()), None)
    if found is None:
        files = sorted(path.stem for path in Path.cwd().glob("*.py"))
        return nearest(name, files) or " For a file give its path: FILE.py:NAME."
    return f" There is a file {found}. Type {said.replace(f' {name}', f' {found}')}."


def _module_of_file(path: Path, said: str) -> ModuleType:
    """The module of a file, under its own name on every rank; other files beside it can be imported."""
    if not path.is_file():
        raise LibraryError(f"{said}: there is no file {path.absolute()}")
    known = sys.modules.get(path.stem)
    if known is not None:
        file = getattr(known, "__file__", None)
        if file is not None and Path(file).resolve() == path.resolve():
            return known
        raise UsageError(
            f"{said}: a file of this name would hide the module {path.stem!r}, which is in use. "
            "Give the file another name."
        )
    importable(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None, "its name ends in .py"
    module = importlib.util.module_from_spec(spec)
    # As an import does: what the file defines is looked up there while it runs.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[path.stem]
        raise broken(f"{said}: {path}", error) from error
    return module


def broken(what: str, error: BaseException) -> LibraryError:
    """The error of an import: in its first line what is wrong, below the lines of the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<frozen importlib", _PACKAGE))]
    # An import of Python's own stands between, whose frames say nothing.
    own = [frame for frame in own if Path(frame.filename).parent != Path(importlib.__file__).parent]
    lines = traceback.format_list(own)
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(error)[:-1]
    shown = "".join(lines).rstrip()
    said = f"{what} cannot be imported: {with_type(error)}{_hint(error)}"
    return LibraryError(said + (f"\n{shown}" if shown else ""))


def _hint(error: BaseException) -> str:
    """What to do: above all where PyPI's torchvision stands beside a CPU build of torch."""
    cause: BaseException | None = error
    while cause is not None:
        if "torchvision::nms does not exist" in str(cause):
            return (
                " (this torchvision was built for another torch: install both from the same index, or type "
                "once: python -m dualeval.vision_library)"
            )
        if "relative import" in str(cause):
            return " (it belongs to a package: name it as PACKAGE.MODULE:NAME, from the folder above that)"
        cause = cause.__cause__ or cause.__context__
    return ""


def wants_debug(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for whole tracebacks."""
    return environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def own_code(error: BaseException) -> str:
    """The lines of the user's own code that an error came through, as a traceback shows them."""
    for each in _chain(error):
        found: str = getattr(each, _ATTRIBUTE, "") or _lines(each)
        if found:
            return found
    return ""


def keep_own_code(error: BaseException, lines: str) -> None:
    """Give an error lines that are shown for it: those of another process, whose traceback is lost."""
    setattr(error, _ATTRIBUTE, lines)


def is_raised_by_own_code(error: BaseException) -> bool:
    """Whether the statement that has raised an error is the user's own."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # A parameter whose values are in a file (``late_model``) computes in frames of this package.
    while frames and frames[-1].f_code.co_filename.startswith(_PACKAGE):
        frames.pop()
    return bool(frames) and _is_own(frames[-1])


def _chain(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        hidden = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or hidden


def _lines(error: BaseException) -> str:
    frames = list(traceback.walk_tb(error.__traceback__))
    inside = next(
        (place for place, (frame, _) in enumerate(frames) if frame.f_code.co_filename.startswith(_PACKAGE)), 0
    )
    # What calls this package is not what has failed.
    own = [(frame, line) for frame, line in frames[inside:] if _is_own(frame)]
    return "".join(traceback.StackSummary.extract(iter(own[-_SHOWN_AT_MOST:])).format())


def _is_own(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    if filename.startswith("<"):
        # A method that dataclasses have made is of "<string>", too.
        module = str(frame.f_globals.get("__name__"))
        return filename.startswith(_TYPED) and module.split(".")[0] != _NAME
    if filename.endswith(_CYTHON) and not Path(filename).exists():
        return False  # of a library: Cython names its sources by a path inside of their package
    path = Path(filename).absolute()
    return not str(path).startswith(_PACKAGE) and library_of(path) is None


@cache
def library_of(file: Path) -> str | None:
    """The installed distribution that owns a file, as NAME-VERSION; "python"; None for the user's own.

    Not by where it lies: a checkout may be on the path, a distribution may be installed anywhere (pip's
    --target, conda, Spack), and the user's own file may lie among the installed ones.
    """
    on_path = {*map(Path, map(os.path.abspath, sys.path))}
    for folder in on_path.intersection(file.parents):
        owner = _owner(folder, file.relative_to(folder).parts[0].partition(".")[0])
        if owner is not None:
            return owner
    for folder in {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}:
        if file.is_relative_to(folder):
            first = file.relative_to(folder).parts[0].partition(".")[0]
            return "python" if first in sys.stdlib_module_names else None
    return None


@cache
def _owner(folder: Path, name: str) -> str | None:
    """Which distribution in a folder has installed a top-level module or package, if any has."""
    found = sorted([*folder.glob("*-*.dist-info"), *folder.glob("*-*.egg-info")])
    # Most often it has the module's name; an editable install has no version in the name of its .egg-info.
    found.sort(key=lambda path: path.name.partition("-")[0].lower() != name.lower())
    installed = re.compile(rf"^{re.escape(name)}(?:[./]|$)", re.MULTILINE)
    for path in found:
        # Debian's have no RECORD.
        listed = next((path / file for file in ("RECORD", "top_level.txt") if (path / file).is_file()), None)
        if listed is not None and installed.search(listed.read_text("utf-8", "replace")):
            return path.stem
    return None
