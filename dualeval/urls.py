"""Which texts are addresses of files in object stores or on the web, and which of these are taken."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import PurePath
from urllib.parse import urlsplit

from dualeval.errors import UsageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Why none is written.
ON_A_DISK = (
    ", and results are written to a disk. Give a path there, and copy it to the store when all is done."
)
# By scheme the module of ``data/stores`` that reads them.
SCHEMES: dict[str, str] = {"s3": "arrow", "gs": "arrow", "az": "arrow", "https": "web", "http": "web"}
# A Path has lost one of the slashes.
_OF_STORE = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}(?=[^/])")
# Parts of a path that mean nothing on a disk.
_LEFT_OUT = re.compile(r"(?:^|/)\.{0,2}(?:/|$)")
_OF_THIS_MACHINE = re.compile(r"(?:127\.0\.0\.1|\[::1\]|localhost)(?::\d*)?", re.IGNORECASE)


def url_of(value: object) -> str | None:
    """The address that a path or text is; None where it is none of the kinds that are read."""
    text = str(value) if isinstance(value, str | PurePath) else ""
    match = _OF_STORE.match(text)
    return None if match is None else f"{match[1]}://{text[match.end() :]}"


def without_secrets(url: str) -> str:
    """An address without user, password and query, which may be a signature."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.sub(r'^[^/]*@', '', rest).partition('?')[0]}"


def is_safe(url: str) -> bool:
    """Whether nobody on the way can change what an address of the web gives."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts.scheme == "https" or (parts.scheme == "http" and bool(_OF_THIS_MACHINE.fullmatch(host)))


def is_plain(path: str) -> bool:
    """Whether no part of a path is empty, "." or ".."; a slash at its end makes none."""
    return not _LEFT_OUT.search(path.removesuffix("/"))


def check_parts(what: str, url: str) -> None:
    """Refuse an address with parts that paths and servers leave out: it would name another object."""
    shown, (scheme, _, path) = without_secrets(url), url.partition("://")
    if not is_plain(path):
        raise UsageError(
            f"{what} {shown} has an empty part, . or .. in it, expected a name between any two slashes. Give "
            f"{scheme}:/{posixpath.normpath(f'/{path}')}, or copy an object whose key is so to another key."
        )


def command_on(command: Callable[[PurePath], str], path: PurePath) -> str:
    """A command on a file, for people; one in a store is not where commands take it from."""
    if url_of(path) is None:
        return command(path)
    return f"download it, type {command(PurePath(path.name))}, and upload what that writes"


def refuse_url(what: str, text: str, why: str = "") -> None:
    """Refuse an address, of an object store or of the web, where a path is expected."""
    if _URL.match(text):
        why = why or ", expected a path: copy it to a disk first, or mount it."
        raise UsageError(f"{what} {without_secrets(text)} is a URL{why}")


def check_url(what: str, value: object) -> None:
    """Check an address that is read; a text that is none is not looked at."""
    if (url := url_of(value)) is None:
        refuse_url(what, str(value))
        return
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{what} {shown} is no address: {error}") from error
    if "@" in parts.netloc:
        raise UsageError(
            f"{what} {shown} has a user or password in it, which would be seen by others. {_CREDENTIALS}"
        )
    if "?" in url:
        raise UsageError(
            f"{what} {shown} has a query (?...), expected an address without: a signature in it is a secret, "
            f"and would be seen by others. {_CREDENTIALS}"
        )
    if parts.scheme == "http" and not is_safe(url):
        raise UsageError(
            f"{what} {shown}: over http:// anyone on the way can change what is evaluated. Give https://, or "
            "copy the file to a disk."
        )
    if not parts.netloc or not parts.path.strip("/"):
        place = "HOST" if parts.scheme.startswith("http") else "BUCKET"
        raise UsageError(f"{what} {shown} names no file. Expected {parts.scheme}://{place}/PATH.")
    check_parts(what, url)


_CREDENTIALS = (
    "Credentials come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY)."
)
