"""Options as dataclasses: a field is a flag of the command line, a key of a job file and a line of help.

What a field may say of itself stands in its metadata, under plain names, so that a task of one's own needs
nothing of this module: ``field(default=0.5, metadata={"help": "Least score of a box."})``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from dualeval.errors import UsageError
from dualeval.messages import did_you_mean
from dualeval.options.choices import check_choice, check_count, check_kind
from dualeval.urls import check_url, refuse_url, url_of

_BOOLS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_ORDER = (int, float, bool, Path, str)
_EXPECTED: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    str: "text",
}
_EXAMPLES: dict[Any, str] = {int: "whole numbers with commas between, such as 1,2,3"}
_EXAMPLES[float] = "numbers with commas between, such as 0.25,0.5,0.75"
_METAVARS: dict[Any, str] = {int: "N", float: "X", bool: "BOOL", Path: "PATH", str: "TEXT"}
# What only the command line has.
IN_PYTHON = {
    "metric": "give metrics=[...]",
    "model_arg": "give model_arguments={...}",
    "download": "type 'dualeval run --download', or give the path of the weights",
}
_Options = TypeVar("_Options")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Attributes):\s*$")
_ENTRY = re.compile(r"^(\s+)\*{0,2}(\w+)(?: *\([^)]*\))?: *(.*)$")


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    group: str | None = None,
    least: int | None = None,
    choices: tuple[str, ...] = (),
    is_path: Callable[[str], bool] | None = None,
    resolve: Callable[[str, Path], str] | None = None,
    shown: str | None = None,
    metavar: str | None = None,
    is_repeated: bool = False,
    fits: Callable[[object], bool] | None = None,
    expected: str = "",
    also: Callable[[str, Any], object] | None = None,
    takes_urls: bool = False,
) -> Any:
    """A field of a dataclass of options; ``fits`` and ``also`` check what its type does not say."""
    # All arguments but the first.
    arguments = dict(locals())
    del arguments["default"]
    metadata = {
        name: value for name, value in arguments.items() if value is not False and value not in (None, "", ())
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Given:
    """A value that was typed, where it looks like one that nobody gave: None, or an empty list or tuple."""

    value: Any


def flag_of(name: str) -> str:
    """The flag of the command line that belongs to a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class OptionField:
    """One option, as read from a field of a dataclass."""

    name: str
    kind: Any
    # Its value where nobody gives one; None where it has none.
    default: Any
    # Whether it has to be given.
    is_required: bool
    # As for `option`.
    help: str
    metavar: str
    group: str | None = None
    least: int | None = None
    choices: Sequence[str] = ()
    is_path: Callable[[str], bool] | None = None
    resolve: Callable[[str, Path], str] | None = None
    shown: str | None = None
    is_repeated: bool = False
    fits: Callable[[object], bool] | None = None
    expected: str = ""
    also: Callable[[str, Any], object] | None = None
    # Whether it may lie in an object store or on the web.
    takes_urls: bool = False

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def kind_name(self) -> str:
        """The type's name, for messages."""
        return getattr(self.kind, "__name__", str(self.kind))

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off, and so has a flag without a value."""
        return _kinds(self.kind) == (bool,)

    @property
    def is_settable(self) -> bool:
        """Whether its type has values that can be typed."""
        return all(map(_is_settable, _kinds(self.kind)))

    def parse(self, text: str, flag: str) -> Any:
        """The value that a text stands for."""
        if self.choices:
            check_choice(flag, text, self.choices)
        if self.is_repeated:
            return (text,)
        kinds = _kinds(self.kind)
        is_none = text.lower() == "none" and not any("none" in typing.get_args(kind) for kind in kinds)
        if _is_optional(self.kind) and str not in kinds and is_none:
            return None
        if len(kinds) == 1 and typing.get_origin(kinds[0]) is Literal:
            check_choice(flag, text, [str(value) for value in typing.get_args(kinds[0])])
        if Path in kinds or (self.is_path is not None and self.is_path(text)):
            (check_url if self.takes_urls else refuse_url)(flag, text)
        # Whatever is a number is meant as one, and any text is a text.
        for kind in sorted(kinds, key=lambda kind: _ORDER.index(kind) if kind in _ORDER else -1):
            try:
                return _parsed(text, kind)
            except ValueError:
                continue
        raise UsageError(f"{flag} {text!r}: expected {' or '.join(map(_expected, kinds))}")

    def of_toml(self, value: Any, where: str, folder: Path) -> Any:
        """The value that one of a job file stands for; paths count from ``folder``."""
        if self.takes_urls and url_of(value):
            check_url(where, value)
            return value if str in _kinds(self.kind) else Path(value)
        return self.resolved(_as_kind(value, self.kind, where), folder)

    def resolved(self, value: Any, folder: Path) -> Any:
        """A value whose paths count from ``folder``."""
        if isinstance(value, tuple | list):
            return type(value)(self.resolved(item, folder) for item in value)
        if self.takes_urls and url_of(value):
            return value
        if isinstance(value, Path):
            return folder / value
        if isinstance(value, str) and self.resolve is not None:
            return self.resolve(value, folder)
        if isinstance(value, str) and self.is_path is not None and self.is_path(value):
            return str(folder / value)
        return value

    def check(self, value: Any, flag: str = "") -> None:
        """Check a value for kind, bounds and choices; messages name ``flag``, by default its own."""
        flag = flag or self.flag
        if self.is_switch:
            check_kind(flag, value, isinstance(value, bool), "True or False")
        if self.fits is not None:
            check_kind(flag, value, self.fits(value), self.expected)
        if self.also is not None:
            self.also(flag, value)
        if [*_kinds(self.kind)] == [Path] and not isinstance(value, str | os.PathLike | None):
            raise UsageError(f"{flag} {value!r}: expected a path")
        if self.takes_urls and url_of(value):
            check_url(flag, value)
        if self.least is not None:
            check_count(flag, value, self.least)
        if self.choices and value is not None:
            check_choice(flag, value, self.choices)


# What a field's metadata may say beside its help and metavar.
_IN_METADATA = [field.name for field in dataclasses.fields(OptionField) if field.default is not MISSING]


def fields_of(options_class: type) -> tuple[OptionField, ...]:
    """The options that a dataclass declares, in its order."""
    declared = [field for field in dataclasses.fields(options_class) if field.init]
    hints = _hints(options_class, {field.name: field.type for field in declared})
    helps = _documented(options_class.__doc__)
    options = []
    for field in declared:
        metadata = field.metadata
        required = field.default is MISSING and field.default_factory is MISSING
        default = None if required else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        options.append(
            OptionField(
                name=field.name,
                kind=hints[field.name],
                default=default,
                is_required=required,
                help=metadata.get("help") or helps.get(field.name, ""),
                metavar=metadata.get("metavar") or _metavar(hints[field.name]),
                **{name: metadata[name] for name in _IN_METADATA if name in metadata},
            )
        )
    return tuple(options)


def check_fields(options: Any) -> None:
    """Check the values of a dataclass of options for their bounds and choices."""
    for field in fields_of(type(options)):
        field.check(getattr(options, field.name))


class _Paths(list[Path]):
    """Stands for a job file's folder, and keeps the paths that count from it."""

    def __truediv__(self, path: str | Path) -> Path:
        self.append(Path(path))
        return Path(path)


def paths_in(options: Any) -> Iterator[tuple[str, Path]]:
    """The paths in the values of a dataclass of options, with their flags."""
    for field in fields_of(type(options)):
        value, paths = getattr(options, field.name), _Paths()
        # A name may stand before a path.
        is_text = field.resolve is not None and value is not None
        field.resolved(str(value) if is_text else value, cast("Path", paths))
        yield from ((field.flag, path) for path in paths)


def of_python(
    kind: Callable[..., _Options], options: Mapping[str, Any], metrics: Sequence[str], **arguments: Any
) -> _Options:
    """A dataclass of options, of the arguments of a task's class; a list stands for a tuple."""
    if isinstance(metrics, str):
        raise UsageError(f"metrics={metrics!r}: expected a list of names, as metrics=[{metrics!r}]")
    for name, instead in IN_PYTHON.items():
        if name in options and hasattr(kind, name):
            raise TypeError(f"{name} is not an argument here: {instead}")
    known = [*kind.__dataclass_fields__, "metrics"]  # type: ignore[attr-defined]
    if unknown := next((name for name in options if name not in known), None):
        task = kind.__name__.removesuffix("Options")
        raise TypeError(f"{task} has no option {unknown!r}.{did_you_mean(unknown, known)}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    for field in fields_of(kind):  # type: ignore[arg-type]
        if isinstance(values.get(field.name), str) and [*_kinds(field.kind)] == [Path]:
            values[field.name] = Path(values[field.name])
    return kind(**arguments, **values, metric=tuple(metrics))


def with_keywords(
    keywords: Any, *kinds: type, like: Sequence[Callable[..., Any]] = ()
) -> Callable[[_Function], _Function]:
    """Have ``help`` and completion show what a function takes as ``**options``, as a TypedDict types it.

    Defaults and sentences are those of dataclasses of options, and of what has a signature and a docstring
    of its own.
    """
    helps: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    for each in like:
        helps |= _documented(each.__doc__, whole=True)
        defaults |= {
            name: parameter.default for name, parameter in inspect.signature(each).parameters.items()
        }
    for kind in kinds:
        for field in fields_of(kind):
            defaults[field.name] = field.default
            if field.help:  # as arguments, options have no dashes
                helps[field.name] = re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), field.help)

    def decorated(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = [each for each in signature.parameters.values() if "VAR_" not in each.kind.name]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name),
                annotation=hint.__forward_arg__,
            )
            for name, hint in keywords.__annotations__.items()
            if name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*parameters, *more])  # type: ignore[attr-defined]
        documented = _documented(function.__doc__)
        lines = [
            f"    {each.name}: {helps[each.name].removesuffix('.')}; default: {each.default!r}"
            for each in more
            if each.name in helps and each.name not in documented
        ]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
        return function

    return decorated


def options_of_call(function: Callable[..., Any]) -> type:
    """A dataclass of the keyword arguments of a function, or of a class's ``__init__``."""
    called = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if unnamed := [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]:
        raise UsageError(
            f"{function.__name__} takes {unnamed[0]} only by position (before a '/'), but options are given "
            "by name. Leave the '/' out."
        )
    annotations = {
        parameter.name: _kind_of_default(parameter.default)
        if parameter.annotation is parameter.empty
        else parameter.annotation
        for parameter in parameters
    }
    hints = _hints(called, annotations)
    helps = {**_documented(function.__doc__), **_documented(called.__doc__)}
    declared = []
    for parameter in parameters:
        metadata = {"help": helps.get(parameter.name, "")}
        field = dataclasses.field(metadata=metadata)
        if parameter.default is not parameter.empty:
            # A factory: a dataclass refuses a list as a default, and a function does not.
            field = dataclasses.field(default_factory=_giving(parameter.default), metadata=metadata)
        declared.append((parameter.name, hints[parameter.name], field))
    return dataclasses.make_dataclass(f"{function.__name__}Options", declared, kw_only=True, frozen=True)


def as_json(options: Any) -> dict[str, Any]:
    """The values of a dataclass of options, as JSON has them; without those that cannot be typed."""
    return {
        field.name: _json_value(getattr(options, field.name))
        for field in fields_of(type(options))
        if field.is_settable
    }


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_json_value(item) for item in value]
    is_no_json = isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_no_json else value


def _giving(value: Any) -> Callable[[], Any]:
    return lambda: value


def _kind_of_default(default: Any) -> Any:
    """The type of an argument that has a default and no annotation."""
    if isinstance(default, tuple | list) and default and len({type(item) for item in default}) == 1:
        item = _kind_of_default(default[0])
        return list[item] if isinstance(default, list) else tuple[item, ...]  # type: ignore[valid-type]
    return type(default) if isinstance(default, bool | int | float | str | Path) else Any


# -- types ---------------------------------------------------------------------------------------------


def _hints(owner: Any, annotations: Mapping[str, Any]) -> dict[str, Any]:
    """The types of annotations, which may be texts; Any where one names what only a type checker sees."""
    module = inspect.getmodule(owner)
    try:
        if isinstance(owner, type):
            # Inherited fields are looked up in the modules of their own classes.
            hints = typing.get_type_hints(owner)
            return {name: hints[name] for name in annotations}
    except (NameError, TypeError, KeyError):
        pass
    hints = {}
    for name, annotation in annotations.items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints[name] = typing.get_type_hints(alone, vars(module) if module else {})[name]
        except (NameError, TypeError):
            hints[name] = _Unknown
    return hints


class _Unknown:
    """The type of an annotation that cannot be looked up."""


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type, without None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(kind for kind in typing.get_args(hint) if kind is not type(None))
    return (str,) if hint is Any else (hint,)


def _is_optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _is_settable(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin in (tuple, list):
        return all(item is Ellipsis or item in _EXPECTED for item in typing.get_args(kind))
    return origin is Literal or kind in (*_EXPECTED, tuple, list)


def _parsed(text: str, kind: Any) -> Any:
    """The value of a type that a text stands for; ValueError where it stands for none."""
    origin = typing.get_origin(kind) or kind
    if origin is Literal:
        words = {str(value): value for value in typing.get_args(kind)}
        if text not in words:
            raise ValueError(text)
        return words[text]
    if origin in (tuple, list):
        texts = text.split(",") if text else []
        items = typing.get_args(kind) or (str, Ellipsis)
        if origin is list or items[-1] is Ellipsis:
            items = (items[0],) * len(texts)
        if len(items) != len(texts):
            raise ValueError(text)
        return origin(_parsed(each.strip(), item) for each, item in zip(texts, items, strict=True))
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError(text)
        return _BOOLS[text.lower()]
    return kind(text)


def _expected(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    if origin in (tuple, list):
        items = typing.get_args(kind) or (str,)
        if origin is tuple and items[-1] is not Ellipsis:
            return f"{len(items)} values with commas between"
        return _EXAMPLES.get(items[0], "values with commas between")
    return _EXPECTED.get(kind) or ", ".join(map(str, typing.get_args(kind)))


def _metavar(hint: Any) -> str:
    [kind, *_] = _kinds(hint)
    origin = typing.get_origin(kind) or kind
    if origin is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if origin in (tuple, list):
        item = _METAVARS.get((typing.get_args(kind) or (str,))[0], "TEXT")
        return f"{item},.."
    return _METAVARS.get(kind, "VALUE")


def _as_kind(value: Any, hint: Any, where: str) -> Any:
    """A TOML value as the field's type."""
    kinds = _kinds(hint)
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        if origin is Literal:
            words = typing.get_args(kind)
            if any(type(value) is type(word) and value == word for word in words):
                return value
            if len(kinds) == 1:
                near = [word for word in words if type(word) is type(value)]
                # A text, as True and 1.0 are equal to 1.
                check_choice(where, value if near else repr(value), near or words)
            continue
        if origin in (tuple, list) and isinstance(value, list):
            items = typing.get_args(kind) or (str, Ellipsis)
            if origin is list or items[-1] is Ellipsis:
                items = (items[0],) * len(value)
            if len(items) != len(value):
                raise UsageError(f"{where} = {value!r}: expected {len(items)} values, found {len(value)}")
            return origin(_as_kind(entry, item, where) for entry, item in zip(value, items, strict=True))
        if origin is float and type(value) is int:
            return float(value)
        if origin is Path and value == "":
            raise UsageError(f"{where} is empty, expected a path")
        if origin is Path and type(value) is str:
            refuse_url(where, value)
            return Path(value)
        if type(value) is origin:
            return value
    names: dict[Any, str] = {tuple: "a list", Path: "a str", int: "an int"}
    wanted = []
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        noun = names.get(origin, f"a {getattr(origin, '__name__', origin)}")
        wanted.append(" or ".join(map(repr, typing.get_args(kind))) if origin is Literal else noun)
    actual = names.get(type(value), f"a {type(value).__name__}")
    raise UsageError(f"{where} = {value!r}: expected {' or '.join(wanted)}, found {actual}")


# -- docstrings ----------------------------------------------------------------------------------------


def _documented(docstring: str | None, *, whole: bool = False) -> dict[str, str]:
    """What a docstring in Google's style says of each argument; its first line, or the whole."""
    texts: dict[str, str] = {}
    depth = None
    inside = False
    for line in inspect.cleandoc(docstring or "").splitlines():
        if _SECTION.match(line):
            inside, depth = True, None
        elif inside and line and not line[0].isspace():
            inside = False
        elif inside and (entry := _ENTRY.match(line)) and len(entry[1]) == (depth or len(entry[1])):
            depth = len(entry[1])
            name = entry[2]
            texts[name] = entry[3].strip()
        elif inside and whole and depth and line:
            texts[name] += f" {line.strip()}"
    return {name: text[:1].upper() + text[1:] for name, text in texts.items()}
