"""How far a run is: a bar on a person's own terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from dualeval.messages import printable
from dualeval.process.status_line import LINE

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_LINE_EVERY_S = 3.0


class ProgressDisplay:
    """Shows samples done over all ranks, samples per second and the time left; called from any thread."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = monotonic, *, as_bar: bool = False, name: str = ""
    ) -> None:
        self._stream = stream
        # Of what is evaluated, to stand before it; empty for none.
        self._name = printable(name)
        self._as_bar = as_bar
        self._clock = clock
        self._bar: Bar | None = None
        self._start: float | None = None
        self._printed_at = 0.0
        self._is_closed = False

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` samples are finished."""
        # Before the first batch the status line says more.
        if self._is_closed or LINE.name:
            return
        now = self._clock()
        if self._start is None:
            self._start = self._printed_at = now
        if self._as_bar:
            self._show_bar(done, total)
        elif now - self._printed_at >= _LINE_EVERY_S and done < total:
            self._printed_at = now
            line = progress_line(done, total, now - self._start)
            print(f"{self._name}: {line}" if self._name else line, file=self._stream, flush=True)

    def _show_bar(self, done: int, total: int) -> None:
        bar = self._bar
        if bar is None:
            bar = self._bar = _make_bar(self._stream, self._name)
            bar.add_task("evaluating", total=total)
            bar.start()
        bar.update(bar.task_ids[0], completed=done, refresh=True)

    def close(self) -> None:
        """End the bar, if there is one, and show nothing any more."""
        self._is_closed = True
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def _make_bar(stream: TextIO, name: str) -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed or 0:,.0f} samples/s")

    return Progress(
        *([TextColumn(name, markup=False)] if name else []),
        BarColumn(),
        MofNCompleteColumn(),
        Speed(),
        TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
        auto_refresh=False,
    )


def progress_line(done: int, total: int, seconds: float) -> str:
    """One line: samples done, the mean rate since the start, and the time left at that rate."""
    rate = done / seconds if seconds > 0 else 0.0
    left = f"{(total - done) / rate:,.0f} s left" if rate > 0 else "time left unknown"
    return f"{done:,}/{total:,} samples, {rate:,.0f} samples/s, {left}"
