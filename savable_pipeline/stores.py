"""What a bucket or a web server holds, through obstore: names, sizes and ranges of bytes, with retries.

Only the fetcher's own process imports this: obstore hangs in a process forked from one that has used it.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import obstore
import obstore.exceptions
from obstore.store import ObjectStore, from_url

from savable_pipeline.errors import RemoteError, SavableError, ShardError

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 15.0
_TIMEOUT_S = 30.0  # of one request; less where the retries end sooner
_MISSING = FileNotFoundError  # obstore's NotFoundError is one
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
_REFUSED = re.compile(r"status code: 40[134]\b|incorrectly configured region")  # in what obstore says of a listing
_CHUNK = 1 << 18  # bytes handed on at a time: few enough to stay in the processor's cache
T = TypeVar("T")
Write: TypeAlias = Callable[[memoryview, int], None]  # of bytes, and of their offset in the object


class WrongAnswerError(Exception):
    """The server sent fewer bytes than it had been asked for, or more."""


class Stores:
    """Opens each root URL once, and asks it again, with pauses, for `retry_s` seconds when it fails."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._open: dict[str, ObjectStore] = {}

    def listing(self, root: str) -> list[tuple[str, int]]:
        """Name relative to `root` and size of everything below it."""
        return self._retried(root, lambda: self._listing(root))

    def _listing(self, root: str) -> list[tuple[str, int]]:
        return [(meta["path"], meta["size"]) for chunk in obstore.list(self._store(root)) for meta in chunk]

    def stat(self, root: str, name: str) -> tuple[int, str] | None:
        """Size, and what changes when the object is replaced; None if there is none.

        Of what is not there, a bucket that may be read but not listed says that it is forbidden.
        """
        try:
            meta = self._retried(f"{root}/{name}", lambda: obstore.head(self._store(root), name))
        except ShardError:
            return None
        except RemoteError as error:
            if isinstance(error.__cause__, obstore.exceptions.PermissionDeniedError):
                return None
            raise
        return meta["size"], f"{meta['e_tag']} {meta['last_modified']}"

    def copy(self, root: str, name: str, start: int, stop: int, size: int, write: Write) -> None:
        """Give `write` the bytes `start` to `stop - 1` of an object in order, and again from the start if that fails.

        Raises `ShardError` unless the object has `size` bytes in all.
        """
        self._retried(f"{root}/{name}", lambda: self._copy(root, name, start, stop, size, write))

    def _copy(self, root: str, name: str, start: int, stop: int, size: int, write: Write) -> None:
        found = obstore.get(self._store(root), name, options={"range": (start, stop)})
        if found.meta["size"] != size:
            raise ShardError(
                f"{root}/{name}: {found.meta['size']} bytes, but {size} when it was indexed; the shard was rewritten "
                "since: start again to index it, or put the old shard back",
                reason="changed shard",
            )
        done = start
        for chunk in found.stream(min_chunk_size=_CHUNK):
            if done + len(chunk) > stop:
                raise WrongAnswerError(f"the server sent more than the {stop - start} bytes it was asked for")
            write(memoryview(chunk), done)
            done += len(chunk)
        if done != stop:
            raise WrongAnswerError(f"the server sent {done - start} of {stop - start} bytes")

    def _store(self, root: str) -> ObjectStore:
        if root not in self._open:
            timeout = timedelta(seconds=min(_TIMEOUT_S, self._retry_s / 2))
            options: Any = {"timeout": timeout, "connect_timeout": timeout}
            options["allow_http"] = not root.startswith("https:")  # an endpoint in the environment may be plain too
            self._open[root] = from_url(root, client_options=options, retry_config={"max_retries": 0})
        return self._open[root]

    def _retried(self, url: str, act: Callable[[], T]) -> T:
        begin, wait_s, tries = time.monotonic(), _FIRST_WAIT_S, 0
        while True:
            tries += 1
            try:
                return act()
            except SavableError:
                raise
            except _MISSING as error:
                raise ShardError(f"{url}: no such object on the server", reason="missing shard") from error
            except Exception as error:
                if isinstance(error, _FINAL) or _REFUSED.search(str(error)):
                    raise RemoteError(
                        f"{url}: {_short(error)}; see that the address and the credentials are right"
                    ) from error
                spent = time.monotonic() - begin
                if spent + wait_s > self._retry_s:
                    raise RemoteError(
                        f"{url}: tried {tries} times in {spent:.1f} s, the last time: {_short(error)}. See that the "
                        "server is up and can be reached; SAVABLE_RETRY_S sets for how many seconds to try. The "
                        "loader's state is whole: save it or go on"
                    ) from error
            time.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _short(error: Exception) -> str:
    """The first line of an error, at most 300 characters: obstore adds a dump of its own."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
