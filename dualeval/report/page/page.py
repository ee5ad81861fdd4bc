"""The page of a finished run, made and written."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualeval.atomic_files import write_text
from dualeval.errors import UsageError, with_type
from dualeval.result import REPORT, Result

if TYPE_CHECKING:
    from dualeval.report.page.content import PageContent
    from dualeval.report.page.runs import Runs


def check_installed() -> None:
    """Check, without imports, that a page can be made."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a report needs {' and '.join(missing)}, which is not installed. Type: pip install "
            "'dualeval[report]'"
        )


def check_report(out: object, *, is_main: bool) -> None:
    """Check before a run that its page can be made, and has a place."""
    if out is None:
        raise UsageError(
            "report=True: the page is written to the output folder, but there is none: give out=DIR"
        )
    if is_main:
        check_installed()


def content_of(runs: Runs, task: Any, *, problem: str = "", paths: bool = False, **more: Any) -> PageContent:
    """Read what the page of a finished run says. More: as ``content.build``.

    A ``problem`` says why the task is None, and so what is missing. Without ``paths`` no folder of this
    machine is named: a page is sent to others.
    """
    from dualeval.options.job import command_of
    from dualeval.report.page.content import build
    from dualeval.report.page.folders import without_folders

    notes = [problem] if problem else []
    command = command_of(runs.rows.result.job)
    content = build(runs, task, command=command, notes=notes, paths=paths, **more)
    return content if paths else without_folders(content)


def write_page(content: PageContent, path: Path) -> None:
    """Make the page with a content, and write it to a file."""
    from dualeval.report.page.html import render

    try:
        write_text(path, render(content))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror or error}). 'dualeval report RUN --out FILE' writes "
            "another file, and 'dualeval report RUN --serve' none."
        ) from error


def write_at_end(result: Result, task: Any, note: Callable[[str], None]) -> None:
    """Write the page of a run that is done: what goes wrong with it is a note."""
    try:
        from dualeval.report.page.runs import Runs

        assert result.folder is not None
        path = Path(result.folder) / REPORT
        write_page(content_of(Runs.open(path.parent, shown=result), task), path)
    except Exception as error:  # noqa: BLE001 - the result is on the disk, and the run has done its work
        note(f"{REPORT} could not be made, and the result is complete: {with_type(error)}")
    else:
        note(f"the report is in {path}")
