"""A store of objects on this machine: as much of S3 and HTTP as is read, and failing on demand."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

# What answers a request in place of the store: it gets the handler, and returns whether it has answered.
Fault = Callable[["Handler"], bool]


class ObjectStore(ThreadingHTTPServer):
    """Objects by path, as bucket/key."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, tuple[bytes, float]] = {}
        # (method, path, range or "") of each request, and bytes of bodies sent.
        self.requests: list[tuple[str, str, str]] = []
        self.sent = 0
        self.most_at_once = 0
        self.at_once = 0
        self.lock = threading.Lock()
        # Seconds before each answer.
        self.delay = 0.0
        self.has_ranges = True
        self.has_marks = True
        self.fault: Fault | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, path: str, content: bytes) -> None:
        """Put an object, in place of one that is there; each has another time."""
        self.objects[path] = content, 1e9 + len(self.objects) + self.objects.get(path, (b"", 0.0))[1] % 1e6

    def forget(self) -> None:
        """Count from now on."""
        self.requests, self.sent, self.most_at_once = [], 0, 0

    def handle_error(self, *_: object) -> None:
        """A client that has hung up is none."""


@lru_cache
def mark_of(content: bytes) -> str:
    """The ETag, as S3 has it."""
    return f'"{hashlib.md5(content).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    """Answers of the store."""

    protocol_version = "HTTP/1.1"
    server: ObjectStore

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        store, url = self.server, urlsplit(self.path)
        path = unquote(url.path).lstrip("/")
        with store.lock:
            store.requests.append((self.command, path, self.headers.get("Range", "")))
            store.at_once += 1
            store.most_at_once = max(store.most_at_once, store.at_once)
        try:
            time.sleep(store.delay)
            if store.fault is not None and store.fault(self):
                return
            query = {key: value[-1] for key, value in parse_qs(url.query, keep_blank_values=True).items()}
            if "list-type" in query:
                self._list(path.strip("/"), query)
            elif path in store.objects:
                self._object(*store.objects[path])
            elif not any(name.startswith(path.split("/")[0] + "/") for name in store.objects):
                self.refuse(404, "NoSuchBucket")
            else:
                self.refuse(404, "NoSuchKey")
        finally:
            with store.lock:
                store.at_once -= 1

    def _object(self, content: bytes, modified: float) -> None:
        mark, store = mark_of(content), self.server
        headers = {"Accept-Ranges": "bytes"}
        if store.has_marks:
            headers |= {"ETag": mark, "Last-Modified": formatdate(modified, usegmt=True)}
        if self.headers.get("If-Match", mark) != mark:
            self.refuse(412, "PreconditionFailed")
            return
        status, part = 200, content
        if store.has_ranges and (wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
            first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
            if first >= len(content):
                self.refuse(416, "InvalidRange")
                return
            status, part = 206, content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(status, part, headers)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter, objects = query.get("prefix", ""), query.get("delimiter", ""), self.server.objects
        keys = sorted(name.removeprefix(f"{bucket}/") for name in objects if name.startswith(f"{bucket}/"))
        if not keys:
            self.refuse(404, "NoSuchBucket")
            return
        entries: dict[str, str] = {}
        for key in (key for key in keys if key.startswith(prefix)):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folder = escape(prefix + rest.split(delimiter)[0] + delimiter)
                entries[folder] = f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"
            else:
                content, modified = objects[f"{bucket}/{key}"]
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(modified))
                entries[key] = (
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                    f"<Size>{len(content)}</Size><ETag>&quot;x&quot;</ETag></Contents>"
                )
        after = query.get("continuation-token", "")
        left = [key for key in entries if key > after]
        page = left[: int(query.get("max-keys", 1000))]
        more = len(left) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        body = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}"
            f"</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"{''.join(entries[key] for key in page)}</ListBucketResult>"
        )
        self.send(200, body.encode(), {"Content-Type": "application/xml"})

    def refuse(self, status: int, code: str) -> None:
        """Answer with an error of S3."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>of the test</Message></Error>"
        self.send(status, body.encode(), {"Content-Type": "application/xml"})

    def send(self, status: int, body: bytes, headers: dict[str, str], *, only: int | None = None) -> None:
        """Answer; with ``only`` so many bytes, and hang up."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:only])
        with self.server.lock:
            self.server.sent += len(body[:only])
        if only is not None:
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A store that runs."""
    with ObjectStore() as store:
        thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join(10)


# What a process needs to read from such a store of its test; nothing else of the machine counts.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def put_all(store: ObjectStore, folder: Path, bucket: str) -> None:
    """Put the files below a folder into a bucket."""
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(f"{bucket}/{path.relative_to(folder).as_posix()}", path.read_bytes())
