"""Scripts: of what runs as ``__main__`` definitions that nothing names do not count, wherever it is read.

So a job is the same from Python and from the command line, and what a script defines besides may change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

# Code that names one of these may use anything of its module.
_LOOK_UP = {"globals", "vars", "eval", "exec"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def used_of_script(text: str, used: Iterable[str], *, is_main: bool) -> tuple[str, set[str]] | None:
    """The lines of a script that count, and all names in them; None for any other module.

    A script runs as ``__main__``, or has an ``if __name__ == "__main__"``. All statements count, and the
    definitions that these or ``used`` name, also as attributes or in texts. Other definitions do not, nor
    texts that stand alone.
    """
    try:
        statements = ast.parse(text).body
    except SyntaxError:  # written anew since it was imported
        return None
    if not is_main and not any(map(_is_guard, statements)):
        return None
    left = [*_flat(statements)]
    needed, names = list[ast.stmt](), {*used}
    while found := [each for each in left if _counts(each, names)]:
        left = [each for each in left if each not in found]
        needed += found
        names.update(*map(_names, found))
    if names & _LOOK_UP:
        return text, names
    lines = text.splitlines()
    spans = sorted((_first_line(each) - 1, each.end_lineno) for each in needed)
    return "\n".join(line for first, end in spans for line in lines[first:end]), names


def _is_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in _names(statement.test)


def _flat(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for each in statements:
        if isinstance(each, ast.If) and _is_guard(each):
            yield from (*each.body, *each.orelse)
        else:
            yield each


def _counts(statement: ast.stmt, names: set[str]) -> bool:
    if isinstance(statement, _DEFINITIONS):
        # One that is decorated, or derived from one that counts, may be registered somewhere.
        bases = getattr(statement, "bases", ())
        return (
            statement.name in names
            or bool(statement.decorator_list)
            or any(names & _names(each) for each in bases)
        )
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _names(node: ast.AST) -> set[str]:
    """All names in some code: variables, attributes, and words of texts, by which one may be found."""
    found = set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            found.add(inner.attr)
        elif isinstance(inner, ast.alias):
            found.add(inner.asname or inner.name.partition(".")[0])
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            found.update(re.findall(r"\w+", inner.value))
    return found


def _first_line(statement: ast.stmt) -> int:
    decorators = statement.decorator_list if isinstance(statement, _DEFINITIONS) else []
    return min([statement.lineno, *(each.lineno for each in decorators)])
