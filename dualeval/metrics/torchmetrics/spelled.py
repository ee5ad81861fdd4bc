"""A TorchMetrics metric in a line of text: parsed, never evaluated.

    torchmetrics:CLASS(ARGUMENTS)@COLUMNS as NAME

ARGUMENTS are literals, or metrics spelled the same way. COLUMNS are ``argument=column``, separated by commas;
a column stands by itself or in quotes, ``[column]`` is a list with one entry a sample, ``{"key": column}`` a
dict, and ``parsed(column)`` the JSON in a text. What stands behind @, and behind as, may be left out.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection
from typing import Any

from dualeval.errors import UsageError
from dualeval.metrics.torchmetrics.arguments import Parsed, Shape
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
    for keyword in call.keywords:
        if keyword.arg is None:
            raise UsageError(
                f"{text!r}: ** stands for arguments that nobody can see, expected them one by one"
            )
    positional = [_value(argument, text) for argument in call.args]
    named = {str(keyword.arg): _value(keyword.value, text) for keyword in call.keywords}
    try:
        return kind(*positional, **named)
    except (TypeError, ValueError, ImportError, RuntimeError, LookupError) as error:
        raise UsageError(f"{text!r}: TorchMetrics cannot make this metric: {str(error).strip()}") from error


def _value(node: ast.expr, text: str) -> Any:
    """A literal, or a metric for a wrapper."""
    if isinstance(node, ast.Call):
        return _built(node, text)
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [_value(key, text) for key in node.keys if key is not None]
        return dict(zip(keys, (_value(value, text) for value in node.values), strict=True))
    if isinstance(node, ast.List):
        return [_value(entry, text) for entry in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise UsageError(
            f"{text!r}: {ast.unparse(node)!r} is no literal; expected a number, a text in quotes, True, "
            "False, None, or lists, tuples, sets and dicts of these"
        ) from error


def _columns(source: str, text: str) -> dict[str, Shape]:
    call = _parsed(f"columns({source})", text)
    # What closes the bracket early is no call of columns any more.
    if (
        not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name))
        or call.args
        or not call.keywords
        or any(keyword.arg is None for keyword in call.keywords)
    ):
        raise UsageError(f"{text!r}: behind @ expected argument=column, separated by commas, as in {SYNTAX}")
    return {str(keyword.arg): _shape(keyword.value, text) for keyword in call.keywords}


def _shape(node: ast.expr, text: str) -> Shape:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.List):
        return [_shape(entry, text) for entry in node.elts]
    if isinstance(node, ast.Dict):
        keys = [
            key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]
        if len(keys) == len(node.keys):
            return {key: _shape(value, text) for key, value in zip(keys, node.values, strict=True)}
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "parsed"
    if isinstance(node, ast.Call) and named and len(node.args) == 1 and not node.keywords:
        inner = _shape(node.args[0], text)
        if isinstance(inner, str):
            return Parsed(inner)
    raise UsageError(
        f"{text!r}: {ast.unparse(node)!r} is no column; expected a column's name, [column], "
        f"{{'key': column}} or parsed(column)"
    )
