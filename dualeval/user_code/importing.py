"""A user's own modules: found by name or file, and what is wrong where one cannot be imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from dualeval.errors import LibraryError, UsageError, text_of, with_type
from dualeval.messages import nearest
from dualeval.torch_errors import TorchError
from dualeval.user_code.origin import PACKAGE


def importable(folder: Path) -> None:
    """Let modules in a folder be imported, as ``python -m`` and ``python FILE`` do: first of all places."""
    here = str(folder.resolve())
    if here not in sys.path and not (folder.resolve() == Path.cwd() and "" in sys.path):
        sys.path.insert(0, here)


def own_module(place: str, typed: str) -> ModuleType:
    """Import a module of the user's by its name, from the working folder too, or by its path, FILE.py."""
    importable(Path.cwd())
    if place.endswith(".py"):
        return _module_of_file(Path(place), typed)
    if not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"{typed}: expected package.module:NAME or FILE.py:NAME")
    return _module(place, typed)


def _module(name: str, typed: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise broken(f"{typed}: the module {name}", error) from error
        raise LibraryError(
            f"{typed}: there is no module {error.name!r} in {Path.cwd()}, nor is one installed."
            f"{_file_near(name, typed)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise broken(f"{typed}: the module {name}", error) from error


def _file_near(name: str, typed: str) -> str:
    """What to type in place of a module's name: the path of a file beside the working folder, if one is."""
    file = Path(*name.split(".")).with_suffix(".py")
    nearby = next((path for path in [Path("..") / file, *Path().glob(f"*/{file}")] if path.is_file()), None)
    if nearby is None:
        files = sorted(path.stem for path in Path.cwd().glob("*.py"))
        return nearest(name, files) or " For a file give its path: FILE.py:NAME."
    return f" There is a file {nearby}. Type {typed.replace(f' {name}', f' {nearby}')}."


def _module_of_file(path: Path, typed: str) -> ModuleType:
    """The module of a file, under its own name on every rank; other files beside it can be imported."""
    if not path.is_file():
        raise LibraryError(f"{typed}: there is no file {path.absolute()}")
    known = sys.modules.get(path.stem)
    if known is not None:
        file = getattr(known, "__file__", None)
        if file is not None and Path(file).resolve() == path.resolve():
            return known
        raise UsageError(
            f"{typed}: a file of this name would hide the module {path.stem!r}, which is in use. "
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
        raise broken(f"{typed}: {path}", error) from error
    return module


def broken(what: str, error: BaseException) -> LibraryError:
    """The error of an import: in its first line what is wrong, below the lines of the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(("<frozen importlib", PACKAGE))]
    # An import of Python's own stands between, whose frames say nothing.
    of_user = [frame for frame in of_user if Path(frame.filename).parent != Path(importlib.__file__).parent]
    lines = traceback.format_list(of_user)
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(error)[:-1]
    shown = "".join(lines).rstrip()
    sentence = f"{what} cannot be imported: {with_type(error)}{_hint(error)}"
    return LibraryError(sentence + (f"\n{shown}" if shown else ""))


def _hint(error: BaseException) -> str:
    """What to do: above all where PyPI's torchvision stands beside a CPU build of torch."""
    cause: BaseException | None = error
    while cause is not None:
        if TorchError.OTHER_TORCHVISION.search(text_of(cause)):
            return (
                " (this torchvision was built for another torch: install both from the same index, or type "
                "once: python -m dualeval.vision_library)"
            )
        if "relative import" in str(cause):
            return " (it belongs to a package: name it as PACKAGE.MODULE:NAME, from the folder above that)"
        cause = cause.__cause__ or cause.__context__
    return ""
