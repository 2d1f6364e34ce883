"""`DownloadedFiles`: shards behind a URL, brought into the node's cache by the downloading process of a session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from savable_pipeline.core.open_files import is_out_of_handles
from savable_pipeline.data.remote.downloader import Downloader, Urgency
from savable_pipeline.data.remote.remote_files import RemotePlace
from savable_pipeline.data.remote.shard_cache import BLOCK
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.shard_files import ShardFiles
from savable_pipeline.errors import RemoteError

TRIES = 100  # to read what was evicted, each time, before it could be read, after which reading fails
_PREFETCH_REFS = 16, 2048  # refs announced ahead, at least and at most,
_PREFETCH_BYTES = 64 << 20  # and about this many bytes per lane


class DownloadedFiles(ShardFiles):
    """The base of files at a place in the cache."""

    behind_url = True

    def __init__(self, place: RemotePlace, numbers: Rows) -> None:
        super().__init__()
        self.place, self._cached, self._limit = place, place.cached, place.session.limit
        self._numbers = numbers  # of the files in the cache's index
        self._known_rows: set[int] = set()  # files whose rows in the index were compared with their checksum
        self._asked: Downloader | None = None  # the process that knows what was announced

    def _forget_announced(self) -> None:
        """Called for each new downloading process: it knows nothing of what was announced before."""

    def refs_ahead(self, mean_bytes: float) -> int:
        """The number of refs to announce ahead, of samples of this size."""
        ahead = int(min(_PREFETCH_BYTES, self._limit // 256) / max(mean_bytes, 1))
        return max(_PREFETCH_REFS[0], min(_PREFETCH_REFS[1], ahead))

    def path(self, shard: int) -> Path:
        """The file in the cache."""
        return self._cached.path(int(self._numbers[shard]))

    def open(self, shard: int) -> int:
        """A new descriptor of the file in the cache."""
        try:
            return self._cached.open(int(self._numbers[shard]))
        except OSError as error:
            if is_out_of_handles(error):
                raise
            raise RemoteError(f"{self.path(shard)}: {error.strerror}; see that the cache is there") from error

    def is_right(self, shard: int, row: int, stop: int) -> bool:
        """Whether rows of the cache are as they were downloaded. Else they are to be downloaded again, perhaps to a new
        file: what is open may have been deleted.
        """
        right = self._cached.is_right(int(self._numbers[shard]), self[shard], row, stop)
        if not right:
            fresh = self.open(shard)
            os.dup2(fresh, self[shard], inheritable=False)
            os.close(fresh)
        return right

    def name(self, shard: int) -> str:
        """The URL of a file."""
        return f"{self.place.url}/{self._cached.shards.names[int(self._numbers[shard])]}"

    def _request(self, row: int, stop: int) -> tuple[str, str, str, int, int]:
        """The begin of a request for rows of the cache."""
        return "rows", self.place.url, str(self._cached.folder), row, stop

    def _check_room(self, shard: int, row: int, stop: int, tries: int = 0) -> None:
        """Raises `RemoteError` if the cache cannot have so many rows at once; so too after so many `tries`."""
        start, past = self._cached.extent(row, stop)
        size = past // BLOCK * BLOCK - start // BLOCK * BLOCK + BLOCK
        least = size + self._limit if tries else size
        if least > self._limit:
            lost = f"evicted, or damaged on its disk, {tries} times before it was read: " if tries else ""
            raise RemoteError(
                f"{self.name(shard)}: {lost}{size} bytes are read at once, and the cache of {self._limit} bytes is too "
                "small for that and what else its processes read: set cache_bytes= or SAVABLE_CACHE_BYTES to at least "
                f"{least}"
            )

    def fetch_rows(self, numbers: Rows) -> None:
        """See `ShardFiles.fetch_rows`. Rows that are damaged are fetched again."""
        parts = self._cached.layout.parts
        if parts is None:
            return
        numbers = np.unique(numbers)
        fresh = [number for number in numbers.tolist() if number not in self._known_rows]
        parts.check(np.array(fresh, dtype=np.int64))
        absent = parts.absent(numbers).tolist()
        if absent:
            self._call("index_rows", self.place.url, str(self._cached.folder), absent)
        self._known_rows.update(fresh)

    def has_all_rows(self) -> bool:
        """Whether the whole index is in the cache."""
        parts = self._cached.layout.parts
        return parts is None or not len(parts.all_absent())

    def _call(self, kind: str, *arguments: Any) -> Any:
        answer = self.place.session.call(kind, *arguments)
        self._look_whom_was_asked()
        return answer

    def _prefetch(self, urgency: Urgency, *request: Any) -> None:
        self._look_whom_was_asked()
        self.place.session.prefetch(urgency, *request)

    def _look_whom_was_asked(self) -> None:
        found = self.place.session.connected()
        if found is not self._asked:
            self._asked = found
            self._forget_announced()
