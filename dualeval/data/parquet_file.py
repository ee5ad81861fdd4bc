"""A Parquet file, on a disk or in a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dualeval.urls import url_of


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """The file as pyarrow reads it; of one in a store OSError at the end where it has changed meanwhile."""
    import pyarrow.parquet

    with ExitStack() as stack:
        source = stack.enter_context(path.open("rb")) if url_of(path) else path
        yield stack.enter_context(pyarrow.parquet.ParquetFile(source))
