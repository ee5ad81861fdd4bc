"""A TorchMetrics metric in a line of text: parsed, never evaluated.

    torchmetrics:CLASS(ARGUMENTS)@COLUMNS as NAME

ARGUMENTS are literals. COLUMNS are ``argument=column``, separated by commas; a column stands by itself or in
quotes. What stands behind @, and behind as, may be left out. Wrappers, and lists and dicts of columns, are
for ``from_torchmetrics``.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection
from typing import Any

from dualeval.errors import UsageError
from dualeval.metrics.torchmetrics.arguments import Shape
from dualeval.metrics.torchmetrics.library import find_class

PREFIX = "torchmetrics:"
SYNTAX = "'torchmetrics:Class(argument=value)@preds=column,target=column as name'"
# A class, with what is in its brackets; what stands behind @; and a name behind "as".
_FORM = re.compile(r"([\w.\s]+(?:\(.*?\))?\s*)(?:@(.*?))?(?: as ([^'\"()\[\]{}@]+))?", re.DOTALL)

# By argument of update: the columns that a task may have for it, the best first.
_USUAL = {
    "preds": ("preds", "prediction", "predictions", "probabilities", "logits"),
    "target": ("target", "targets", "label", "labels"),
    "targets": ("targets", "target", "label", "labels"),
    "labels": ("labels", "label", "target"),
    "value": ("value", "loss"),
    "indexes": ("indexes", "index"),
    "groups": ("groups", "group"),
}


def read(text: str) -> tuple[Any, dict[str, Shape] | None, str | None]:
    """The metric that a text spells, its columns where it has any, and its name likewise."""
    found = _FORM.fullmatch(text.removeprefix(PREFIX))
    if found is None:
        raise UsageError(f"{text!r} cannot be read, expected {SYNTAX}")
    call, columns, name = found.groups()
    metric = _built(_parsed(call, text), text)
    return metric, None if columns is None else _columns(columns, text), name and name.strip()


def usual_columns(metric: Any, available: Collection[str] | None, text: str) -> dict[str, Shape]:
    """The columns that the arguments of an update have where nobody names any."""
    parameters = inspect.signature(metric.update).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    found: dict[str, Shape] = {}
    for argument in needed:
        candidates = (argument, *_USUAL.get(argument, ()))
        column = next((name for name in candidates if available is None or name in available), None)
        if column is None:
            raise UsageError(
                f"{text}: no column for {argument!r} of update({', '.join(needed)}). The task makes "
                f"{', '.join(sorted(available or ())) or 'none'}. Name one: {text.partition('@')[0]}@"
                + ",".join(f"{name}=COLUMN" for name in needed)
            )
        found[argument] = column
    if not found:
        raise UsageError(f"{text}: name its columns, as in {SYNTAX}")
    return found


def _parsed(source: str, text: str) -> ast.expr:
    try:
        return ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UsageError(f"{text!r} cannot be read ({error}), expected {SYNTAX}") from error


def _built(node: ast.expr, text: str) -> Any:
    """A metric of ``Class`` or ``Class(...)``."""
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    kind = find_class(ast.unparse(call.func))
    positional = [_value(argument, text) for argument in call.args]
    named = {keyword.arg or "**": _value(keyword.value, text) for keyword in call.keywords}
    try:
        return kind(*positional, **named)
    except (TypeError, ValueError, ImportError, RuntimeError, LookupError) as error:
        raise UsageError(f"{text!r}: TorchMetrics cannot make this metric: {str(error).strip()}") from error


def _value(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise UsageError(
            f"{text!r}: {ast.unparse(node)!r} is no literal; expected a number, a text in quotes, True, "
            "False, None, or lists, tuples, sets and dicts of these. A metric with another one inside is "
            "made in Python: dualeval.metrics.from_torchmetrics"
        ) from error


def _columns(source: str, text: str) -> dict[str, Shape]:
    call = _parsed(f"columns({source})", text)
    found: dict[str, Shape] = {}
    # What closes the bracket early is no call of columns any more.
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
        for keyword in call.keywords:
            name = getattr(keyword.value, "id", getattr(keyword.value, "value", None))
            if isinstance(name, str):
                found[keyword.arg or "**"] = name
        if found and len(found) == len(call.keywords):
            return found
    raise UsageError(
        f"{text!r}: behind @ expected argument=column, separated by commas, as in {SYNTAX}. Lists and dicts "
        "of columns are for dualeval.metrics.from_torchmetrics"
    )
