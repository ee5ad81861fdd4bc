"""Objects of S3, Google Cloud Storage and Azure Blob Storage, read by pyarrow.

What is opened is of one process: a fork opens its own.
"""

from __future__ import annotations

import os
import re
import threading
import urllib.request
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dualeval.data.stores.store import Again, Found, certificates, changed
from dualeval.errors import StoreError

_OPEN_FILES = 64
# The store's error to a read of fewer bytes than its own text has is lost.
_LEAST_BYTES = 2048
_CONNECT_S, _SILENT_S = 5.0, 20.0
_Result = TypeVar("_Result")


class ArrowStore:
    """One of the three; credentials and regions come from the environment, as each library takes them."""

    def look(self, url: str) -> Found:
        """By what the store says when the object is opened."""
        return _told(url, lambda: _found(url, _open(url)))

    def read(self, file: Found, offset: int, count: int) -> bytes:
        """By the object as it was opened, once a process."""
        process = os.getpid()
        # Threads that read parts of one object wait until the first of them has opened it.
        with _lock(process, file.url):
            opened = _told(file.url, lambda: _opened(process, file.url, file.mark))
        if _found(file.url, opened) != file:
            _opened.cache_clear()
            raise changed(file, _found(file.url, opened).mark)
        wanted = min(max(count, _LEAST_BYTES), file.size - offset)
        data: bytes = _told(file.url, lambda: opened.read_at(wanted, offset))
        if len(data) != wanted:
            raise changed(file, "fewer bytes")
        return data[:count]

    def check(self, file: Found) -> None:
        """One request: pyarrow cannot ask for a part on condition that the object is the same."""
        if (now := self.look(file.url)) != file:
            raise changed(file, now.mark)

    def whole(self, url: str, size: int, time: int) -> bytes:
        """By the object as it is opened, whose size and time are those of the list."""
        opened = _told(url, lambda: _open(url))
        now = _time_of(opened)
        if opened.size() != size or now not in (None, time // 10**9):
            raise OSError(f"{url} has changed since the run started")
        data: bytes = _told(url, lambda: opened.read_at(size, 0))
        return data

    def is_folder(self, url: str) -> bool:
        """By one entry of a list."""
        return str(_told(url, lambda: _system(url).get_file_info(_path(url))).type.name) == "Directory"

    def entries(self, url: str) -> list[tuple[str, int, int]]:
        """A request for each thousand of them."""
        first = len(_path(url)) + 1
        infos = _told(url, lambda: _list(url))
        return [(info.path[first:], info.size, info.mtime_ns or 0) for info in infos if info.is_file]


STORE = ArrowStore()


def _path(url: str) -> str:
    return url.partition("://")[2].rstrip("/")


def _found(url: str, opened: Any) -> Found:
    said = {str(key).casefold(): value for key, value in opened.metadata().items()}
    mark = next((said[key] for key in ("etag", "last-modified", "updated") if said.get(key)), b"")
    return Found(url=url, size=opened.size(), mark=mark.decode() if isinstance(mark, bytes) else str(mark))


def _time_of(opened: Any) -> int | None:
    """The time of change in s, where the store says it in the form of S3."""
    said = opened.metadata().get("Last-Modified", b"").decode()
    try:
        return int(datetime.fromisoformat(said.replace("Z", "+00:00")).timestamp())
    except ValueError:
        return None


def _open(url: str) -> Any:
    return _system(url).open_input_file(_path(url))


@lru_cache(_OPEN_FILES)
def _opened(process: int, url: str, mark: str) -> Any:
    return _open(url)


@lru_cache(4 * _OPEN_FILES)
def _lock(process: int, url: str) -> threading.Lock:
    return threading.Lock()


def _list(url: str, *, recursive: bool = True) -> list[Any]:
    from pyarrow.fs import FileSelector

    wanted = FileSelector(_path(url), recursive=recursive)
    infos: list[Any] = _system(url).get_file_info(wanted)
    return infos


def _system(url: str) -> Any:
    scheme, host = urlsplit(url)[:2]
    return _make(os.getpid(), scheme, host)


@lru_cache
def _make(process: int, scheme: str, bucket: str) -> Any:
    """A file system of pyarrow for a process and bucket, which asks once: ``requests.py`` asks again."""
    from pyarrow import fs

    env = os.environ
    if scheme == "gs":
        return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=_SILENT_S))
    if scheme == "az":
        account = env.get("AZURE_STORAGE_ACCOUNT") or env.get("AZURE_STORAGE_ACCOUNT_NAME")
        if not account:
            raise StoreError(f"az://{bucket}: set AZURE_STORAGE_ACCOUNT to the name of its storage account.")
        key, token = env.get("AZURE_STORAGE_KEY"), env.get("AZURE_STORAGE_SAS_TOKEN")
        return fs.AzureFileSystem(account, account_key=key, sas_token=None if key else token)
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or ""
    parts = urlsplit(endpoint if "//" in endpoint else f"https://{endpoint}")
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    if region is None:
        region = "us-east-1" if endpoint else fs.resolve_s3_region(bucket)
    host = parts.hostname or f"{bucket}.s3.{region}.amazonaws.com"
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(parts.scheme)
    authority = certificates("AWS_CA_BUNDLE", "SSL_CERT_FILE") if parts.scheme == "https" else None
    return fs.S3FileSystem(
        region=region,
        anonymous=_is_anonymous(),
        scheme=parts.scheme,
        endpoint_override=parts.netloc or None,
        connect_timeout=_CONNECT_S,
        request_timeout=_SILENT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        **({"proxy_options": proxy} if proxy else {}),
        **({"tls_ca_file_path": authority} if authority else {}),
    )


# What pyarrow says, what it means, and what to do; the order counts.
_REGION = "PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation"
_DENIED = "ACCESS_DENIED|AccessDenied|PermissionDenied|Forbidden|AuthenticationFailed"
_MEANINGS = (
    (
        "ExpiredToken|TokenRefresh|expired",
        "the credentials have expired",
        "Get new ones; finished work is kept",
    ),
    ("NO_SUCH_BUCKET|NoSuchBucket|ContainerNotFound", "there is no such bucket", "Check its name"),
    ("INVALID_ACCESS_KEY|InvalidAccessKey", "the store does not know the access key", "{}"),
    ("SIGNATURE_DOES_NOT|SignatureDoesNot", "the secret key is wrong", "Check AWS_SECRET_ACCESS_KEY"),
    ("TIME_TOO_SKEWED|TimeTooSkewed", "this machine's clock is wrong", "Set it"),
    (rf"status 30\d|{_REGION}", "the bucket is in another region", "Set AWS_REGION to it, or to nothing"),
    (
        rf"status 40[13]|{_DENIED}",
        "access denied",
        "{}. Without the right to list, stores deny what is not there, too",
    ),
    ("curlCode: 6,", "the host is not known here", "Check AWS_ENDPOINT_URL, AWS_REGION and the network"),
    ("curlCode: (35|51|58|60|77),", "no secure connection", "AWS_CA_BUNDLE names a file of certificates"),
    ("curlCode: (5|97),|status 407", "the proxy cannot be used", "Check HTTPS_PROXY and NO_PROXY"),
)
_PASSES = re.compile(
    "SLOW_DOWN|SlowDown|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|THROTTL|REQUEST_TIMEOUT|NETWORK_CONNECTION"
    r"|status (408|429|5\d\d)|TooManyRequests|UNAVAILABLE|DEADLINE_EXCEEDED|timed? ?out"
)
_LOST_ANSWER = re.compile("Failed to flush response stream")


def _told(url: str, ask: Callable[[], _Result]) -> _Result:
    """The answer to a request, or its error in this room's words."""
    try:
        return ask()
    except OSError as error:
        raise _meaning(url, error) from error


def _meaning(url: str, error: OSError) -> Exception:
    said = _short(error)
    if re.search("HeadObject|operation: $", said) or isinstance(error, FileNotFoundError):
        # An answer to HEAD has no text, and others may lose it: that to a list says the reason.
        try:
            _list(url, recursive=False)
        except OSError as other:
            if (reason := _short(other)) and not _PASSES.search(reason):
                said = f"{reason}; {said}"
    for pattern, what, advice in _MEANINGS:
        if re.search(pattern, said):
            return StoreError(f"{url}: {what} ({said}). {advice.format(_who(url))}.")
    if isinstance(error, FileNotFoundError) or re.search("NO_SUCH_KEY|NoSuchKey|NotFound|NOT_FOUND", said):
        return FileNotFoundError(2, "No such object", url)
    if _LOST_ANSWER.search(said):
        return Again("more bytes were sent than asked for: an error, or a server that ignores ranges")
    return Again(said) if _PASSES.search(said) else StoreError(f"{url}: {said}")


def _short(error: OSError) -> str:
    """An error without the names of objects, which may say anything."""
    return "" if isinstance(error, FileNotFoundError) else str(error).rpartition("AWS Error ")[2][:300]


def _is_anonymous() -> bool:
    return os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "yes", "true")


def _who(url: str) -> str:
    """How this process shows who it is, without any secret."""
    if _is_anonymous() and url.startswith("s3:"):
        return "No credentials are sent, as AWS_NO_SIGN_REQUEST is set: unset it if the bucket is not public"
    names = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_KEY")
    there = [name for name in names if os.environ.get(name)]
    if there:
        return f"Check that {' and '.join(there)} may read it"
    return (
        f"None of {', '.join(names)} is set, so that the machine's own role was tried: set one. For a public "
        "bucket of S3 set AWS_NO_SIGN_REQUEST=YES"
    )
