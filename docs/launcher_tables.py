"""Write the table of launchers and backends in docs/launchers.md. ``make tables`` calls this."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dualeval.launch.launchers import BACKENDS, LAUNCHERS, Launcher, launcher_of

PAGE = Path(__file__).resolve().parent / "launchers.md"


def tables() -> dict[str, str]:
    """Give each table's text by the name that stands in its two markers."""
    rows = [*map(launcher_of, LAUNCHERS)]
    return {
        "backends": _table(
            ("`--launcher`", "started by", *(f"`{name}`" for name in BACKENDS)),
            ((_page(each), f"`{each.start}`", *(_backend(each, name) for name in BACKENDS)) for each in rows),
        )
    }


def with_tables(page: str) -> str:
    """Put the tables into the text of the page, between their markers."""
    for name, table in tables().items():
        before, rest = page.split(f"<!-- table: {name} -->\n")
        after = rest.partition("<!-- end of table -->\n")[2]
        page = f"{before}<!-- table: {name} -->\n{table}<!-- end of table -->\n{after}"
    return page


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = ["".join(f" {cell} |" if cell else " |" for cell in line) for line in (head, *rows)]
    return "\n".join([f"|{cells[0]}", "|" + "---|" * len(head), *(f"|{line}" for line in cells[1:])]) + "\n"


def _page(launcher: Launcher) -> str:
    return f"[`{launcher.name}`](launchers/{launcher.page}.md)"


def _backend(launcher: Launcher, name: str) -> str:
    if name not in launcher.backends:
        return ""
    defaults = list(launcher.backends)[: 2 if launcher.starts_mpi else 1]
    condition = launcher.backends[name]
    return f"{'**yes**' if name in defaults else 'yes'}{f', {condition}' if condition else ''}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
