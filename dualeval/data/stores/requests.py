"""Requests to stores: many at a time, and again where that may help."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from dualeval.data.stores.store import Again, Found, Store
from dualeval.errors import EXIT_FAILED, StoreError
from dualeval.process.status_line import LINE
from dualeval.urls import SCHEMES, without_secrets

# At a time, of a process; a connection brings 50 to 100 MB/s from far or near.
IN_FLIGHT = 16
# What lies between two wanted parts is read with them up to this size: another request takes longer.
_GAP_BYTES = 1 << 16
# What is wanted of one file is asked for in parts of this size.
PART_BYTES = 4 << 20
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often a request is sent, and how long is waited in between."""

    attempts: int = 7
    # Doubled each time.
    first_s: float = 0.5
    most_s: float = 60.0
    sleep: Callable[[float], object] = time.sleep

    def pauses(self) -> Iterator[float]:
        """The pauses, of random length, so that a thousand ranks do not come back at once."""
        for number in range(self.attempts - 1):
            yield self.first_s * 2**number * random.uniform(0.75, 1.25)


PATIENCE = Patience()
# What this process has asked for again, and has not said.
_notes: dict[str, None] = {}


def notes() -> list[str]:
    """Sentences on what was asked for again since the last call."""
    sentences = [*_notes]
    for sentence in sentences:
        _notes.pop(sentence, None)
    return sentences


def asked(url: str, request: Callable[[], _Result]) -> _Result:
    """The answer to a request, which is sent again as long as that may help."""
    patience, began = PATIENCE, time.monotonic()
    pauses = patience.pauses()
    while True:
        try:
            return request()
        except Again as error:
            pause = next(pauses, None)
            if pause is None:
                raise StoreError(
                    f"{url} could not be read: {patience.attempts} attempts in "
                    f"{time.monotonic() - began:.0f} s failed, the last with: {error}. Type the same command "
                    "when the store answers: finished work is kept.",
                    exit_code=EXIT_FAILED,
                ) from error
            host = "/".join(without_secrets(url).split("/")[:3])
            note = f"{host}: requests failed and were sent again ({error})"
            if note not in _notes:
                LINE.write(f"dualeval: note: {note}")
                _notes[note] = None
            patience.sleep(min(max(pause, error.after_s), patience.most_s))


def at_once(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Call a function for each item, many at a time."""
    if len(items) < 2:
        return [*map(function, items)]
    with ThreadPoolExecutor(min(IN_FLIGHT, len(items)), "dualeval-store") as pool:
        return [*pool.map(function, items)]


def store_of(url: str) -> Store:
    """The store that an address is of."""
    # With ssl or pyarrow only where they are needed.
    store: Store = import_module(f"dualeval.data.stores.{SCHEMES[url.partition(':')[0]]}").STORE
    return store


# A file, and an offset and count of bytes in it.
Wanted = tuple[Found, int, int]


def read_all(wanted: Sequence[Wanted], *, check: bool = True) -> list[bytes]:
    """The bytes of each part, in few requests; all of them are of files that have not changed."""
    order = sorted(range(len(wanted)), key=lambda place: (wanted[place][0].url, wanted[place][1]))
    # Parts that are read together: the file, begin and end, and which they are.
    spans: list[tuple[Found, int, int, list[int]]] = []
    for place in order:
        file, offset, count = wanted[place]
        if spans and spans[-1][0] == file and offset - spans[-1][2] <= _GAP_BYTES:
            _, begin, end, places = spans[-1]
            spans[-1] = file, begin, max(end, offset + count), [*places, place]
        else:
            spans.append((file, offset, offset + count, [place]))
    requests = [
        (file, begin, min(PART_BYTES, last - begin))
        for file, first, last, _ in spans
        for begin in range(first, last, PART_BYTES)
    ]
    parts = iter(at_once(_read, requests))
    result = [b""] * len(wanted)
    for _, first, last, places in spans:
        data = b"".join(next(parts) for _ in range(first, last, PART_BYTES))
        for place in places:
            begin = wanted[place][1] - first
            result[place] = data[begin : begin + wanted[place][2]]
    if check:
        # Behind them: what was read before the change is of the file as it was.
        at_once(_check, [*{file.url: file for file, _, _ in requests}.values()])
    return result


def _read(wanted: Wanted) -> bytes:
    file, offset, count = wanted
    return asked(file.url, lambda: store_of(file.url).read(file, offset, count))


def _check(file: Found) -> None:
    asked(file.url, lambda: store_of(file.url).check(file))
