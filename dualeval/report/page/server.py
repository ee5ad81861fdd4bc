"""The page of a run at an address of this machine, with all of its rows: ``dualeval report RUN --serve``.

It answers whoever knows the token in the address, and from what it has read: no name in a request is one of a
file.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from dualeval.errors import DualevalError, UsageError, text_of
from dualeval.report.page.all_rows import AllRows
from dualeval.report.page.content import PageContent, samples_shown
from dualeval.report.page.html import policy_of, render, render_card
from dualeval.report.page.page import content_of
from dualeval.report.page.rows import columns_of
from dualeval.report.page.runs import Runs
from dualeval.report.page.things import seen

_LOOPBACK = "127.0.0.1"
# With any port: `ssh -L` brings the page to another one. A stranger's name that leads here is neither.
_HOSTS = (_LOOPBACK, "localhost")
_IDLE_S = 10.0

_Answer: TypeAlias = tuple[str, str]  # its media type and its text


class ServedPage:
    """The page of a finished run, and what it asks for: rows of its table, and cards."""

    def __init__(self, runs: Runs, task: Any, *, problem: str = "") -> None:
        """Arguments as of ``page.content_of``."""
        self._runs, self._task = runs, task
        self._table = AllRows(columns_of(runs))
        self._files = {each.rows.path: _state(each.rows.path) for each in (runs.rows, *runs.others.values())}
        # It is not sent, so it names folders: ids are those in the file.
        self.content: PageContent = content_of(
            runs, task, problem=problem, paths=True, table=self._table.head()
        )
        self.policy = f"{policy_of(self.content)}; frame-ancestors 'none'"
        self._page = render(self.content)
        # One after the other: a task reads its data from one thread.
        self._lock = threading.Lock()
        self._known: Mapping[str, Callable[[Mapping[str, str]], _Answer]] = {
            "": lambda _: ("text/html", self._page),
            "rows": self._some,
            "card": self._card,
        }

    def answer(self, name: str, wanted: Mapping[str, str]) -> _Answer | None:
        """What there is of a name, with what was wanted of it; None if there is nothing.

        Raises ValueError, TypeError, LookupError or AttributeError where what is wanted makes no sense.
        """
        make = self._known.get(name)
        if make is None:
            return None
        with self._lock:
            return make(wanted)

    def _some(self, wanted: Mapping[str, str]) -> _Answer:
        found = self._table.rows(wanted["query"], int(wanted["first"]), int(wanted["last"]))
        rows = [[seen(each) if isinstance(each, str) else each for each in row] for row in found["rows"]]
        return "application/json", json.dumps({**found, "rows": rows})

    def _card(self, wanted: Mapping[str, str]) -> _Answer:
        """A sample's card, by its row or by its id; nothing if there is no such sample."""
        place = int(wanted["row"]) if "row" in wanted else self._table.place_of(wanted["id"])
        if not 0 <= place < self._runs.rows.rows.count:
            return "text/html", ""
        for path, state in self._files.items():
            if _state(path) != state:
                raise UsageError(
                    f"the run {path.parent} has changed: start 'dualeval report RUN --serve' again"
                )
        [sample] = samples_shown(self._runs, self._task, {place: ()})
        return "text/html", render_card(self.content, sample)


def _state(path: Path) -> tuple[int, ...]:
    """What is another one where a file has been written again."""
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


class PageServer(ThreadingTCPServer):
    """Serves a page on the loopback alone; ``address`` has the token.

    The port is taken before the ``page`` is there, which takes long to read.
    """

    page: ServedPage
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        try:
            super().__init__((_LOOPBACK, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"--port {port} cannot be taken ({error.strerror}). Leave it out for any free one."
            ) from error
        self.token = secrets.token_urlsafe(24)
        self.address = f"http://{_LOOPBACK}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show an error, but not that whoever asked has gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET, with one answer a connection, as HTTP/1.0 has it."""

    server: PageServer
    # A browser opens connections that it may need; one that says nothing is left.
    timeout = _IDLE_S

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        path, _, query = self.path.partition("?")
        _, token, *names = path.split("/") if path.startswith("/") else ("", "")
        is_right = hmac.compare_digest(token.encode(), self.server.token.encode())
        if host not in _HOSTS or not is_right:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        try:
            wanted = {name: values[0] for name, values in parse_qs(query, max_num_fields=5).items()}
            answer = self.server.page.answer("/".join(names), wanted)
        except (DualevalError, OSError) as error:  # the run was evaluated again, or is gone
            self._send(HTTPStatus.CONFLICT, "text/plain", text_of(error))
            return
        except (ValueError, TypeError, LookupError, AttributeError):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(HTTPStatus.OK, *answer)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request, also one that is none of HTTP."""
        text = "Open the whole address that 'dualeval report RUN --serve' has printed last."
        self._send(HTTPStatus(code), "text/plain", text)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: it would print the token."""

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.send_response_only(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", self.server.page.policy),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
