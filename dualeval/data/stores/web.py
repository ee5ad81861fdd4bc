"""Files on the web, read by ranges over https, with the standard library: each by a connection of its own."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
from email.message import Message
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, Request, build_opener

from dualeval.data.stores.store import Again, Found, certificates, changed
from dualeval.errors import StoreError
from dualeval.urls import is_safe, without_secrets

_TIMEOUT_S = 20
# Servers that are asked again: too early or late, too much, or broken.
_PASSES = {408, 425, 429, *range(500, 600)}
# What is sent as it stands: the marks that RFC 3986 has in paths, and what is in %XX already.
_AS_IT_IS = "/%!$&'()*+,;=:@"
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_UNSEEN = (
    ", so that a change of the file during a run would not be seen. Copy it to a disk, and give its path."
)
_FOR_EVERYONE = (
    "Only files that everyone may read are read over https://; for others give the address of their store "
    "(s3://, gs://, az://), or copy the file to a disk."
)


class WebStore:
    """Files by https, by the proxy of HTTPS_PROXY, also where redirects lead."""

    def look(self, url: str) -> Found:
        """By its first byte: the answer to HEAD does not show whether ranges are served."""
        try:
            mark, size, _ = _get(url, 0, 1)
        except _TooShort as error:
            raise StoreError(f"{url} is empty (0 bytes): its upload has failed. Upload it again.") from error
        if not mark:
            raise StoreError(f"{url}: the server says neither ETag nor Last-Modified{_UNSEEN}")
        return Found(url=url, size=size, mark=mark)

    def read(self, file: Found, offset: int, count: int) -> bytes:
        """The ETag of each answer is compared."""
        mark, size, data = _get(file.url, offset, count)
        if (mark, size) != (file.mark, file.size):
            if (again := _get(file.url, 0, 1)[0]) != mark:
                marks = f"{file.mark}, {mark}, {again}"
                raise StoreError(
                    f"{file.url}: the server says another ETag with each answer ({marks}){_UNSEEN}"
                )
            raise changed(file, mark)
        return data

    def check(self, file: Found) -> None:
        """Each answer has said it."""

    def whole(self, url: str, size: int, time: int) -> bytes:
        raise AssertionError("no file was listed")

    def is_folder(self, url: str) -> bool:
        """No: servers have no list of files that is the same everywhere."""
        return False

    def entries(self, url: str) -> list[tuple[str, int, int]]:
        """None."""
        return []


STORE = WebStore()


class _TooShort(OSError):
    """A file ends before the part that is asked for."""


class _Redirects(HTTPRedirectHandler):
    """Leads to safe addresses alone."""

    def redirect_request(self, request: Request, *others: Any) -> Request | None:
        answer, *_, target = others
        if not is_safe(target):
            answer.close()
            shown = without_secrets(target)
            raise StoreError(f"{request.full_url} leads to {shown}, expected an address of https://.")
        return super().redirect_request(request, *others)


def _quoted(url: str) -> str:
    """An address as it is sent: a #, too, is part of a file's name."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}/{quote(_PERCENT.sub('%25', path), _AS_IT_IS)}"


def _get(url: str, offset: int, count: int) -> tuple[str, int, bytes]:
    """The mark, the file's size and the bytes of a range."""
    asked = {"Range": f"bytes={offset}-{offset + count - 1}", "User-Agent": "dualeval"}
    try:
        with build_opener(_Redirects).open(
            Request(_quoted(url), headers=asked), timeout=_TIMEOUT_S
        ) as answer:
            said = answer.headers
            there = _RANGE.fullmatch(said.get("Content-Range", ""))
            if not there and said.get("Content-Length") == "0":
                raise _TooShort(f"{url} is empty by now")
            first, last, size = map(int, there.groups()) if there else (0, 0, 0)
            if (first, last) != (offset, min(offset + count, size) - 1):
                raise StoreError(
                    f"{url}: the server ignores ranges of bytes, and sends something else than the part that "
                    f"is asked for (HTTP {answer.status}). Copy the file to a disk, and give its path."
                )
            data = answer.read(count)
            if offset + len(data) <= last:
                raise Again("the connection was cut")
            return said.get("ETag") or said.get("Last-Modified") or "", size, data
    except HTTPError as error:
        error.close()
        raise _refused(url, error.code, error.headers) from None
    except (http.client.InvalidURL, UnicodeError) as error:
        raise StoreError(
            f"{url}: its host or port cannot be read ({error}). Expected https://HOST/PATH; a host "
            "of letters that are not ASCII by its name xn--... in DNS."
        ) from error
    except _TooShort:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise _unreached(url, error) from error


def _refused(url: str, status: int, headers: Message) -> Exception:
    said = f"HTTP {status} {http.client.responses.get(status, '')}".strip()
    if status in _PASSES:
        after = headers.get("Retry-After") or ""
        return Again(said, float(after) if after.isdecimal() else 0.0)
    if status in (404, 410):
        return FileNotFoundError(2, "No such file", url)
    if status == 416:
        return _TooShort(f"{url} has fewer bytes than it had")
    access = f"access denied ({said}). {_FOR_EVERYONE}"
    return StoreError(f"{url}: {access if status in (401, 403) else said}")


def _unreached(url: str, error: Exception) -> Exception:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, ssl.SSLError):
        certificates("SSL_CERT_FILE")
        return StoreError(
            f"{url}: no secure connection ({reason}). If its certificate is one of your own organisation's, "
            "set SSL_CERT_FILE to a file of it."
        )
    if isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN:
        return StoreError(f"{url}: the host is not known here ({reason.strerror}). Check its name.")
    if "Tunnel connection failed" in str(reason):
        return StoreError(f"{url}: the proxy of HTTPS_PROXY refuses ({reason}). Check it and NO_PROXY.")
    silent = isinstance(reason, TimeoutError)
    return Again(f"no answer within {_TIMEOUT_S} s" if silent else str(reason) or type(reason).__name__)
