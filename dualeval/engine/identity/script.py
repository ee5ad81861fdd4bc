"""Scripts: of what runs as ``__main__`` only what is used of it counts, also where it is imported.

So a job is the same from Python and from the command line, and a script may parse, print and plot.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

# Code that names one of these may use anything of its module.
_LOOK_UP = {"globals", "vars", "eval", "exec"}


def used_of_script(text: str, used: Iterable[str], *, is_main: bool) -> tuple[str, set[str]] | None:
    """The lines of a script that some of its names need, and all names in them; None for any other module.

    A script runs as ``__main__``, or has an ``if __name__ == "__main__"``. Needed are statements that bind a
    name, write into it or call its methods, and what these need; decorated definitions and classes derived
    from needed ones, which may be registered; of a script that can be imported also all that an import runs.
    """
    try:
        statements = ast.parse(text).body
    except SyntaxError:  # written anew since it was imported
        return None
    guards = [each for each in statements if isinstance(each, ast.If) and "__name__" in _names(each.test)]
    if not guards and not is_main:
        return None
    outside = [each for each in statements if each not in guards]
    needed = [each for each in outside if guards and not _only_binds(each)]
    left = [*outside, *(each for guard in guards for each in (*guard.body, *guard.orelse))]
    own = {
        name for each in left if not isinstance(each, (ast.Import, ast.ImportFrom)) for name in _bound(each)
    }
    names = {*used}.union(*map(_names, needed))
    left = [each for each in left if each not in needed]
    while found := [each for each in left if _is_needed(each, names, own)]:
        left = [each for each in left if each not in found]
        needed += found
        names.update(*map(_names, found))
    if names & _LOOK_UP:
        return text, names
    lines = text.splitlines()
    spans = sorted((_first_line(each) - 1, each.end_lineno) for each in needed)
    return "\n".join(line for first, end in spans for line in lines[first:end]), names


def _is_needed(statement: ast.stmt, names: set[str], own: set[str]) -> bool:
    bound = {*_bound(statement)}
    if bound & {*names, "*"} or _decorators(statement):
        return True
    if isinstance(statement, ast.ClassDef):
        return bool(names & own & {name for base in statement.bases for name in _names(base)})
    return bool(names & own & {*_written_into(statement)})


def _only_binds(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return not any(_written_into(statement))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, (*_DEFINITIONS, ast.Import, ast.ImportFrom))


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds, or deletes; more where it is no definition and has one inside."""
    for node in [statement] if isinstance(statement, _DEFINITIONS) else ast.walk(statement):
        if isinstance(node, _DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id


def _written_into(statement: ast.stmt) -> Iterator[str]:
    """The names whose attributes or items a statement writes, and those whose methods it calls by itself."""
    for node in () if isinstance(statement, _DEFINITIONS) else ast.walk(statement):
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        place: ast.AST = node.value.func if is_call else node  # type: ignore[attr-defined]
        if isinstance(place, (ast.Attribute, ast.Subscript)) and (
            is_call or not isinstance(place.ctx, ast.Load)
        ):
            while isinstance(place, (ast.Attribute, ast.Subscript, ast.Call)):
                place = place.func if isinstance(place, ast.Call) else place.value
            if isinstance(place, ast.Name):
                yield place.id


def _first_line(statement: ast.stmt) -> int:
    return min([statement.lineno, *(each.lineno for each in _decorators(statement))])


def _decorators(statement: ast.stmt) -> list[ast.expr]:
    return statement.decorator_list if isinstance(statement, _DEFINITIONS) else []


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
