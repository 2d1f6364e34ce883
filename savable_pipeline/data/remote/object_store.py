"""`ObjectStore`: access to objects of buckets, web servers and the Hub.

Only the downloading process imports this file, because obstore hangs in a process forked from one that has used it.

A server of S3 that redirects requests to another host is rejected, because obstore would send it the session's token.

    GET http://endpoint/bucket, unsigned ──▶ 307, Location: http://elsewhere/bucket      RemoteError

obstore has no setting against it, so the endpoint gets one request without credentials that follows no redirect. A
server that redirects only other requests is not detected. AWS itself, the default endpoint, is not checked.

`Pace` decides how many bytes a downloading process requests at a time, by the measured speed.

    at a time     the bytes of 2 s, at least half a MiB    a slow link carries little but the most urgent bytes
    in a request  1 to 8 MiB, at most a quarter of these   urgent requests wait for a second, not for minutes

    2.5 MB/s: 5 MB at a time, in requests of 1 MiB     50 MB/s: 100 MB at a time, in requests of 8 MiB

Each process on a link measures its own fraction of the speed. Only bytes are bounded: as many small requests are sent
at a time as there are threads.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urljoin, urlsplit

import obstore
import obstore.exceptions
import obstore.store

from savable_pipeline.core.wording import clean_address, short_error
from savable_pipeline.data.remote.cache_files import PIECE
from savable_pipeline.data.remote.hub import Hub, HubFile
from savable_pipeline.data.remote.listing import TIME_PREFIX, Listing
from savable_pipeline.data.shards.paths import is_hub
from savable_pipeline.errors import RemoteError, SavableError, ShardError

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 15.0
_TIMEOUT_S = 30.0  # seconds without a byte of a request, or fewer if the retries end sooner
_TIMEOUTS = 20  # a whole request may take this many times the timeout, because requests are small
_UPLOAD_PART = 16 << 20  # bytes; an object has at most 10,000 parts, so 160 GB
_MISSING = FileNotFoundError  # the base class of obstore's NotFoundError
_MOST_OBJECT_STORES = 64  # open stores of a single object's URL, each with its own connections
_FINAL = (
    obstore.exceptions.PermissionDeniedError,
    obstore.exceptions.UnauthenticatedError,
    obstore.exceptions.InvalidPathError,
    obstore.exceptions.NotSupportedError,
    obstore.exceptions.PreconditionError,
    obstore.exceptions.UnknownConfigurationKeyError,
    NotImplementedError,
    PermissionError,
)
# Texts of final errors that have no class in obstore: errors of a listing, and 400 for an expired token.
_FINAL_TEXT = re.compile(r"status code: 40(?:[134]\b|0\b(?!.*RequestTimeout))|incorrectly configured region", re.DOTALL)
# Addresses of the service from which a virtual machine of a cloud gets credentials, in AWS, Google Cloud and Azure.
_METADATA_SERVICE = re.compile(r"/latest/(?:api/token|meta-data)|/computeMetadata/|/metadata/identity/")
_CREDENTIALS = {
    "s3": ("AWS", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
    "gs": ("Google Cloud", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("Azure", "AZURE_STORAGE_ACCOUNT_KEY"),
}
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_CHEAP_REQUEST = 1 << 20  # bytes of a request long enough that its latency hardly matters
_AT_ONCE_S = 2.0  # seconds that the bytes requested at a time take
_LEAST_AT_ONCE = 1 << 19  # bytes
_CREDENTIALS_FOR = timedelta(minutes=10)  # boto3 refreshes credentials longer before they expire
_CHUNK = 1 << 18  # bytes passed on at a time, few enough to stay in the processor's cache
_WINDOW_S = 0.2  # shortest time over which speed is measured
_FIRST_SPEED = float(1 << 20)  # bytes/s, until it is measured
T = TypeVar("T")
Write: TypeAlias = Callable[[memoryview, int], None]  # (bytes, offset in the object)


class Pace:
    """Measures the speed of downloads, and decides how much to request. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._speed = _FIRST_SPEED
        self._in_progress = 0  # number of requests in progress
        self._since = 0.0  # when the first request in progress or the window started, whichever is later
        # of the current window: time with requests before `_since`, and bytes received
        self._seconds, self._bytes = 0.0, 0

    @property
    def bytes_at_once(self) -> int:
        """Return the number of bytes to request at a time."""
        return max(_LEAST_AT_ONCE, int(self._speed * _AT_ONCE_S))

    @property
    def request_bytes(self) -> int:
        """Return the number of bytes of one request."""
        at_once = self.bytes_at_once
        return min(PIECE, max(at_once // 8, min(at_once // 4, _CHEAP_REQUEST)))

    @property
    def chunk_bytes(self) -> int:
        """Return the number of bytes to pass on at a time.

        A request that fails loses at most these.
        """
        return min(_CHUNK, self.request_bytes // 16)

    @contextlib.contextmanager
    def measure_request(self) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with the size of each chunk that a request receives.

        The time in this context is that of the request. Time with several requests in progress counts once.
        """
        with self._lock:
            if not self._in_progress:
                self._since = self._clock()
            self._in_progress += 1
        try:
            yield self._count
        finally:
            with self._lock:
                self._in_progress -= 1
                if not self._in_progress:
                    self._seconds += self._clock() - self._since

    def _count(self, size: int) -> None:
        with self._lock:
            self._bytes += size
            now = self._clock()
            seconds = self._seconds + now - self._since
            if seconds >= _WINDOW_S:
                self._speed = (self._speed + self._bytes / seconds) / 2
                self._since, self._seconds, self._bytes = now, 0.0, 0


def check_endpoint(root: str, timeout_s: float) -> None:
    """Raise `RemoteError` if the server of a bucket redirects to another host.

    Other errors of the server are ignored here and show later.
    """
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None:
        return
    url = f"{endpoint.rstrip('/')}/{urlsplit(root).netloc}?list-type=2&max-keys=1"
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        if (target := _redirect_of(url, timeout_s)) is not None and _host(target) != _host(url):
            raise RemoteError(
                f"{root}: {clean_address(endpoint)} redirects to {clean_address(target)}, which would get your "
                "credentials. Set AWS_ENDPOINT_URL to the server itself"
            )


def _redirect_of(url: str, timeout_s: float) -> str | None:
    """Return the target of a redirect of `url`, or None."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}")
        answer = connection.getresponse()
        target = answer.getheader("Location")
        return urljoin(url, target) if 300 <= answer.status < 400 and target else None
    finally:
        connection.close()


def _host(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


class WrongAnswerError(Exception):
    """Error for a server that sent fewer or more bytes than requested."""


class ObjectStore:
    """Opens each root URL once, and retries failing requests.

    A request fails for good after `retry_s` seconds without progress. The `cache` stores answers of the Hub. Raises
    `ShardError` for a missing or changed object, `RemoteError` if the server fails for longer.
    """

    def __init__(self, retry_s: float, cache: Path = Path()) -> None:
        self._retry_s = retry_s
        self._hub = Hub(cache, self._timeout_s)
        self.pace = Pace()
        self._stores: dict[str, obstore.store.ObjectStore] = {}
        self._object_stores: dict[HubFile | str, obstore.store.ObjectStore] = {}

    def listing(self, root: str) -> Listing:
        """Return every object below `root`, with relative names.

        A listing that fails starts again.
        """
        if is_hub(root):
            return self._retried(root, lambda: self._hub.listing(root))
        listed = 0  # most objects that one try has listed

        def list_objects() -> Iterator[tuple[str, int, str]]:
            nonlocal listed
            for number, meta in enumerate(meta for chunk in obstore.list(self._store(root)) for meta in chunk):
                yield meta["path"], meta["size"], _version(meta)
                listed = max(listed, number)

        return self._retried(root, lambda: Listing.of(list_objects()), lambda: listed)

    def stat(self, root: str, name: str, *, needed: bool = False) -> tuple[int, str] | None:
        """Return size and version of an object, or None if there is none.

        A bucket that may be read but not listed answers "forbidden" (403) for a missing object, also over `https:`. So
        403 means that there is none. For a `needed` object it raises `RemoteError` instead.
        """
        if is_hub(root):
            return self._retried(root, lambda: self._hub.stat(root, name))
        try:
            meta = self._retried(f"{root}/{name}", lambda: obstore.head(*self._object(root, name)))
        except ShardError:
            return None
        except RemoteError as error:
            if needed or not isinstance(error.__cause__, obstore.exceptions.PermissionDeniedError):
                raise
            return None
        return meta["size"], _version(meta)

    def commit(self, dataset: str) -> str:
        """Return the commit of a dataset of the Hub at a branch or tag."""
        return self._retried(dataset, lambda: self._hub.commit(dataset))

    def dated(self, root: str) -> list[tuple[str, int, int]]:
        """Return name, size and modification time of all objects.

        The time is in nanoseconds since 1970.
        """

        def list_dated() -> list[tuple[str, int, int]]:
            found = (meta for chunk in obstore.list(self._store(root)) for meta in chunk)
            return [(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1e9)) for meta in found]

        return self._retried(root, list_dated)

    def upload(self, root: str, name: str, path: Path) -> None:
        """Upload a file as an object, in parts if it is large.

        The object appears, or replaces an earlier one, when all of it is written.
        """
        try:
            self._retried(f"{root}/{name}", lambda: obstore.put(self._store(root), name, path, chunk_size=_UPLOAD_PART))
        except ShardError as error:  # an upload creates its object, so only the bucket can be missing
            raise RemoteError(f"{root}/{name}: no such bucket or container. Check its name, or create it") from error

    def rename(self, root: str, name: str, new: str) -> None:
        """Rename an object. The server copies it and removes the old one."""
        self._retried(f"{root}/{name}", partial(obstore.copy, self._store(root), name, new))
        self.erase(root, [name])

    def erase(self, root: str, names: list[str]) -> None:
        """Remove objects if they exist."""
        for name in names:
            with contextlib.suppress(ShardError):
                self._retried(f"{root}/{name}", partial(obstore.delete, self._store(root), name))

    def copy(self, root: str, name: str, start: int, stop: int, size: int, write: Write, pin: str = "") -> str:
        """Pass bytes `start` to `stop - 1` of an object to `write` in order.

        If a request fails, the next one continues after the bytes that arrived. Requests are repeated as long as bytes
        arrive, so a slow link delivers in the end.

        Returns the object's version: its ETag, or its modification time; for a file of the Hub the hash of its content.
        Raises `ShardError` unless the object has `size` bytes in all, and the version `pin` if that is set.
        """
        position = start  # offset up to which bytes have arrived
        if is_hub(root):  # located before the pace is measured, because the Hub may make us wait for minutes
            self._retried(f"{root}/{name}", lambda: self._hub.file(root, name))

        def write_counted(chunk: memoryview, offset: int) -> None:
            nonlocal position
            write(chunk, offset)
            position = offset + len(chunk)
            count(len(chunk))

        def copy_rest() -> str:
            nonlocal pin
            pin = self._copy(root, name, position, stop, size, write_counted, pin)
            return pin

        with self.pace.measure_request() as count:
            return self._retried(f"{root}/{name}", copy_rest, lambda: position)

    def _copy(self, root: str, name: str, start: int, stop: int, size: int, write: Write, pin: str) -> str:
        options: Any = {"range": (start, stop)}
        if pin.startswith('"'):  # the server compares strong ETags; other versions are compared below
            options["if_match"] = pin
        if is_hub(root):
            response, version = self._get_of_hub(root, name, options)
        else:
            try:
                response = obstore.get(*self._object(root, name), options=options)
            except obstore.exceptions.PreconditionError as error:
                raise _other_version(root, name) from error
            version = _version(response.meta)
        if response.meta["size"] != size:
            raise ShardError(
                f"{root}/{name}: {response.meta['size']} bytes, but {size} when indexed. Start again, or restore it",
                reason="changed shard",
            )
        if pin and version != pin:
            raise _other_version(root, name)
        position = start
        for chunk in response.stream(min_chunk_size=self.pace.chunk_bytes):
            if position + len(chunk) > stop:
                raise _length_error(response, f"{root}/{name}", f"more than the {stop - start} bytes it was asked for")
            write(memoryview(chunk), position)
            position += len(chunk)
        if position != stop:
            raise _length_error(response, f"{root}/{name}", f"{position - start} of {stop - start} bytes")
        return version

    def _get_of_hub(self, root: str, name: str, options: Any) -> tuple[Any, str]:
        """Return the response of the store that the Hub names, and the content's hash."""
        file = self._hub.file(root, name)
        headers = {"authorization": file.token} if file.token else {}
        try:
            return obstore.get(self._store_of_object(file, file.url, headers), "", options=options), file.content
        except Exception as error:
            if not isinstance(error, _MISSING) and not _is_final(error):
                raise
            self._hub.forget(root, name)  # the signature has probably expired
            raise WrongAnswerError(f"the store rejects the URL of the Hub: {short_error(error)}") from error

    def _store_of_object(self, key: HubFile | str, url: str, headers: dict[str, str]) -> obstore.store.ObjectStore:
        """Return obstore's store for a single object, whose URL is used unchanged."""
        if key not in self._object_stores:
            if len(self._object_stores) >= _MOST_OBJECT_STORES:
                self._object_stores.clear()
            self._object_stores[key] = self._open_store(url, {"default_headers": headers})
        return self._object_stores[key]

    def _object(self, root: str, name: str) -> tuple[obstore.store.ObjectStore, str]:
        """Return the store of an object, and its name there.

        obstore escapes `%` as `%25`, although a user may write `%20` for a blank.
        """
        if root.startswith("http") and _ESCAPE.search(name):
            return self._store_of_object(f"{root}/{name}", f"{root}/{name}", {}), ""
        return self._store(root), name

    @property
    def _timeout_s(self) -> float:
        return min(_TIMEOUT_S, self._retry_s / 2)

    def _store(self, root: str) -> obstore.store.ObjectStore:
        if root not in self._stores:
            if root.startswith("s3:"):
                check_endpoint(root, self._timeout_s)
            self._stores[root] = self._open_store(root, {})
        return self._stores[root]

    def _open_store(self, url: str, extra: dict[str, Any]) -> obstore.store.ObjectStore:
        timeout = timedelta(seconds=self._timeout_s)
        options: Any = {"read_timeout": timeout, "connect_timeout": timeout, "timeout": timeout * _TIMEOUTS, **extra}
        options["allow_http"] = not url.startswith("https:")  # an endpoint in the environment may be http
        credentials: Any = _credentials() if url.startswith("s3:") else {}
        return obstore.store.from_url(url, client_options=options, retry_config={"max_retries": 0}, **credentials)

    def _retried(self, url: str, act: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Return what `act` returns. Retry it until `progress()` has not changed for `retry_s` seconds.

        obstore itself stops retrying once it has the header of a response: of ten downloads that were interrupted once
        in the body, version 0.12 completed none.
        """
        start, wait_s, tries, before = time.monotonic(), _FIRST_WAIT_S, 0, progress()
        while True:
            tries += 1
            try:
                return act()
            except SavableError:
                raise
            except _MISSING as error:
                raise ShardError(f"{url}: no such object on the server", reason="missing shard") from error
            except Exception as error:
                missing = _missing_setting(url, error)
                if _is_final(error):
                    fault = missing or f"{short_error(error)}. Check the address and the credentials"
                    raise RemoteError(f"{url}: {fault}") from error
                if progress() != before:
                    start, wait_s, tries, before = time.monotonic(), _FIRST_WAIT_S, 0, progress()
                spent = time.monotonic() - start
                if spent + wait_s > self._retry_s:
                    fault = missing or f"{short_error(error)}. Check the server, or raise SAVABLE_RETRY_S"
                    raise RemoteError(
                        f"{url}: {tries} tries in {spent:.1f} s failed: {fault}\n"
                        "The loader's state is whole: save it or continue"
                    ) from error
            time.sleep(wait_s * SystemRandom().uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _credentials() -> dict[str, Any]:
    """Return credentials of AWS profiles, which boto3 reads and refreshes.

    Profiles may use SSO, roles or processes. The result is empty if obstore finds credentials itself. Raises
    `RemoteError` if `AWS_PROFILE` is set, and boto3 or the profile is missing.
    """
    profile = os.environ.get("AWS_PROFILE", "")
    files = ("AWS_CONFIG_FILE", "~/.aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    has_profile = profile or any(Path(os.environ.get(name, default)).expanduser().exists() for name, default in files)
    if not has_profile or "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SKIP_SIGNATURE" in os.environ:
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return {"credential_provider": Boto3CredentialProvider(ttl=_CREDENTIALS_FOR)}
    except Exception as error:  # boto3 may raise anything
        if not profile:
            return {}
        fault = f"no credentials for AWS_PROFILE={profile!r}: {short_error(error)}"
        raise RemoteError(f"{fault}. Install boto3, and log in to the profile") from error


def _missing_setting(url: str, error: Exception) -> str:
    """Return which setting of this machine or server is missing and its fix, or ""."""
    text = str(error)
    if "Range request not supported" in text:
        return "the server does not support range requests. Copy the files to a disk or another server"
    name, variables = _CREDENTIALS.get(url.partition("://")[0], ("", ""))
    if name and _METADATA_SERVICE.search(text):  # obstore asks it last, even outside a cloud
        return f"no {name} credentials found. Set {variables}"
    return ""


def _is_final(error: Exception) -> bool:
    """Return whether a retry would get the same answer."""
    if isinstance(error, WrongAnswerError):
        return False
    return isinstance(error, _FINAL) or _FINAL_TEXT.search(str(error)) is not None


def _version(meta: Any) -> str:
    """Return the server's version of an object: its ETag, or its modification time.

    It is the same in a listing and in a response.
    """
    tag = meta["e_tag"]
    if not tag:
        return f"{TIME_PREFIX}{meta['last_modified']:%Y-%m-%d %H:%M:%S}"
    return str(tag) if tag.startswith(('"', "W/")) else f'"{tag}"'  # some servers do not quote it in listings


def _length_error(response: Any, url: str, sent: str) -> Exception:
    """Return the error about a response of unexpected length.

    It is not retried if the server compresses what it sends. (Objects that are stored compressed often have a
    Content-Encoding too, but arrive with the right length.)
    """
    encoding = response.attributes.get("Content-Encoding")
    if encoding in (None, "", "identity"):
        return WrongAnswerError(f"the server sent {sent}")
    return RemoteError(f"{url}: the server sent {sent}, compressed as {encoding}. Turn off Content-Encoding")


def _other_version(root: str, name: str) -> ShardError:
    return ShardError(
        f"{root}/{name}: the shard was rewritten on the server. Start again to index it, or restore the old shard",
        reason="changed shard",
    )
