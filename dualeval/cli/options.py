"""Options that several commands have, and what they do; flags of a dataclass's fields; help in groups."""

from __future__ import annotations

import errno
import os
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.shell_completion import CompletionItem

from dualeval.errors import EXIT_DONE, DualevalError
from dualeval.options.evaluation import LAUNCH
from dualeval.options.fields import Given, OptionField
from dualeval.options.job import COMMON
from dualeval.process.start import end_with, unwritten
from dualeval.urls import ON_A_DISK, refuse_url

if TYPE_CHECKING:
    from dualeval.engine.session import Session
    from dualeval.report.loggers.loggers import Target
    from dualeval.result import Result


_WIDTH = 110


class GroupedOption(click.Option):
    """A flag that stands under a heading in the help."""

    def __init__(self, *arguments: Any, group: str | None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.group = group


class Words(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic from click 8.4 on
    """A text that is one of a few words; what it may be is checked where all options are."""

    name = "text"

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self._words if word.startswith(incomplete)]


class _PathType(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        is_out = param is not None and param.name == "out"
        refuse_url("--out" if is_out else "the path", str(value), ON_A_DISK if is_out else "")
        try:
            os.lstat(value)
        except OSError as error:
            if not str(value) or error.errno == errno.ENAMETOOLONG:
                what = error.strerror if str(value) else "it is empty"
                self.fail(f"{what}; expected a path, such as runs/mine.", param, ctx)
        return super().convert(value, param, ctx)


# A path that is not empty, and not too long for the system.
PATH = _PathType(path_type=Path)


class _FieldType(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic from click 8.4 on
    """The type of a field's flag."""

    def __init__(self, field: OptionField) -> None:
        self.name = field.metavar
        self._field = field

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self._field.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        parsed = self._field.parse(value, self._field.flag)
        return Given(parsed) if parsed is None or parsed == () else parsed

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        kind = self._field.kind
        words: Sequence[Any] = self._field.choices
        if typing.get_origin(kind) is Literal:
            words = typing.get_args(kind)
        if words:
            return [CompletionItem(str(word)) for word in words if str(word).startswith(incomplete)]
        takes_path = self._field.is_path is not None or self._field.resolve is not None
        if takes_path or kind is Path or Path in typing.get_args(kind):
            return [CompletionItem(incomplete, type="file")]
        return []


def flag_for(field: OptionField, *, name: str | None = None) -> GroupedOption:
    """The flag of a field; None where it is not given."""
    default = "" if field.default in (None, (), [], "", False) else _default_text(field.default)
    shown = "" if "(default)" in field.help else field.shown or default
    text = field.help.removesuffix(".") + "; repeatable." if field.is_repeated else field.help
    text = f"{text}  [default: {shown}]" if shown else text
    declared = [name or field.name, field.flag]
    if field.is_switch:
        if field.default is True:
            declared[1] = f"{field.flag}/--no-{field.flag[2:]}"
        return GroupedOption(declared, is_flag=True, default=None, help=text, group=field.group)
    if field.is_repeated:
        return GroupedOption(declared, multiple=True, metavar=field.metavar, help=text, group=field.group)
    return GroupedOption(declared, type=_FieldType(field), default=None, help=text, group=field.group)


def with_flags(*flags: click.Parameter) -> Callable[[Any], Any]:
    """A decorator that gives a command these flags, as several ``click.option`` above each other do."""

    def decorate(function: Any) -> Any:
        # The lowest decorator comes first.
        function.__click_params__ = [*getattr(function, "__click_params__", []), *reversed(flags)]
        return function

    return decorate


def _default_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def grouped(*declared: str, group: str, **named: Any) -> Callable[[Any], Any]:
    """``click.option`` with a heading."""
    return click.option(*declared, cls=GroupedOption, group=group, **named)


class GroupedCommand(click.Command):
    """A command whose help shows its flags in groups, in the order of ``groups`` and then as they come."""

    def __init__(
        self, *arguments: Any, groups: Sequence[str] = (), last: Sequence[str] = (), **named: Any
    ) -> None:
        named["context_settings"] = {"max_content_width": _WIDTH, **named.get("context_settings", {})}
        super().__init__(*arguments, **named)
        self._groups = groups
        self._last = last

    def shown_params(self, context: click.Context) -> list[click.Parameter]:
        """Those that the help shows."""
        return self.get_params(context)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags under their headings."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in self._groups}
        last: dict[str, list[tuple[str, str]]] = {group: [] for group in self._last}
        for parameter in self.shown_params(ctx):
            row = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if row is None:
                continue
            group = getattr(parameter, "group", None) or (self._last[0] if self._last else "Options")
            (last if group in last else rows).setdefault(group, []).append(row)
        for group, lines in [*rows.items(), *last.items()]:
            if lines:
                with formatter.section(group):
                    formatter.write_dl(lines, col_max=28)


_T = TypeVar("_T")

METRIC = click.option(
    "--metric", multiple=True, help="Metric to compute; give it again for more.  [default: all]"
)
CLUSTER = click.option(
    "--cluster",
    metavar="COLUMN",
    help="Column of samples that go together, for intervals.  [default: the run's own]",
)
BY = click.option(
    "--by", multiple=True, metavar="COLUMN", help="Column, or A*B for a cross; give it again for more."
)
BINS = with_flags(flag_for(COMMON["bins"]))
ONLY_JSON = click.option("--json", "as_json", is_flag=True, help="Print only JSON on standard output.")
ALLOW_SHARED_GPU = grouped(
    "--allow-shared-gpu", group=LAUNCH, is_flag=True, help="Let several ranks of a node share a GPU."
)


def show(result: Result, *, as_json: bool, kept: Path | None) -> None:
    """Show a result on standard output, as a table or as the text of result.json."""
    from dualeval.report.table import print_result

    if as_json:
        click.echo(result.to_json(), nl=False)
    else:
        print_result(result)
    problem = unwritten()
    if problem is None:
        return
    sentence = f"standard output cannot be written ({problem.strerror})"
    if kept is None:
        raise DualevalError(f"{sentence}, and the result is kept nowhere else: give --out DIR.")
    click.echo(f"dualeval: note: {sentence}; the result is in {kept}", err=True)


def evaluate_and_show(
    session: Session, evaluate: Callable[[Session], Result], *, as_json: bool, targets: Sequence[Target] = ()
) -> int:
    """Evaluate in a session of its own; returns the exit code, the same on every rank."""
    from dualeval.result import RESULT

    code, result = work_in_session(session, evaluate)
    if result is not None and session.world.is_main:
        kept = None if result.folder is None else Path(result.folder) / RESULT
        try:
            show(result, as_json=as_json, kept=kept)
        finally:
            # Also where whoever reads the table has seen enough of it, as head.
            if targets:
                from dualeval.report.loggers.log import log_result

                log_result(result, targets, None, session.note)
    return code


def work_in_session(
    session: Session, work: Callable[[Session], _T], code_of: Callable[[Any], int] | None = None
) -> tuple[int, _T | None]:
    """Do something in a session of its own; returns the exit code, and what came of it if anything did."""
    from dualeval.process.speech import end_process

    session.is_command = True
    try:
        with session:
            try:
                done = work(session)
                ended = EXIT_DONE if code_of is None else code_of(done)
                # It is on the disk: a signal that comes when the session takes none any more is too late.
                end_with(ended)
            except BaseException as error:
                code = session.conclude(error)
                end_with(code)
                if session.control.stopping is not None:
                    # A launcher may leave a second between SIGTERM and SIGKILL.
                    end_process(code)
                raise
    except Exception:
        if not session.is_concluded:
            raise
        return session.exit_code, None
    return ended, done
