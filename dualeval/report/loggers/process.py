"""The process that writes one record into one tracker: what ``sending`` starts."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from time import monotonic, sleep

from dualeval.errors import EXIT_FAILED, text_of
from dualeval.report.loggers.record import Record
from dualeval.report.loggers.sending import descendants
from dualeval.report.loggers.targets import Target

_MOST_LETTERS = 600
_LOOK_S = 0.5


def main() -> None:
    """Read target and record from standard input, and write the answer to a descriptor.

    Arguments of the process: the package's folder, the number of the descriptor, the most seconds that it may
    take, and the process that waits for it. The answer is JSON: ``said``, where the record is now, or
    ``error``.
    """
    limit_s, waiting = float(sys.argv[3]), int(sys.argv[4])
    threading.Thread(target=_end_in_time, args=(limit_s, waiting), daemon=True).start()
    content = json.load(sys.stdin)
    target, record = Target(**content["target"]), Record.from_json(content["record"])
    try:
        tracker = importlib.import_module(f"dualeval.report.loggers.{target.kind}")
        answer = {"said": tracker.write(record, target)}
    except Exception as error:  # noqa: BLE001 - whatever a tracker raises is reported, and costs no result
        answer = {"error": _described(error)}
    with os.fdopen(int(sys.argv[2]), "w") as file:
        json.dump(answer, file)


def _end_in_time(limit_s: float, waiting: int) -> None:
    """End this process, and those it started, where it takes too long or nobody waits for it any more."""
    end = monotonic() + limit_s
    while monotonic() < end and os.getppid() == waiting:
        sleep(_LOOK_S)
    for number in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    os._exit(EXIT_FAILED)


def _described(error: Exception) -> str:
    text = " ".join(text_of(error).split())
    text = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."
    return f"{type(error).__name__}: {text}"
