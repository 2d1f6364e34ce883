"""`DownloadedFiles`: shards behind a URL, brought into the node's cache by the downloading process of a session."""

from __future__ import annotations

from typing import Any

import numpy as np

from savable_pipeline.data.remote.downloader import Downloader, Urgency
from savable_pipeline.data.remote.remote_files import RemotePlace
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.stores.shard_files import ShardFiles

_PREFETCH_REFS = 16, 2048  # refs announced ahead, at least and at most,
_PREFETCH_BYTES = 64 << 20  # and about this many bytes per lane


class DownloadedFiles(ShardFiles):
    """The base of files at a place in the cache."""

    behind_url = True

    def __init__(self, place: RemotePlace) -> None:
        super().__init__()
        self.place, self._cached, self._limit = place, place.cached, place.session.limit
        self._asked: Downloader | None = None  # the process that knows what was announced

    def _forget_announced(self) -> None:
        """Called for each new downloading process: it knows nothing of what was announced before."""

    def refs_ahead(self, mean_bytes: float) -> int:
        """The number of refs to announce ahead, of samples of this size."""
        ahead = int(min(_PREFETCH_BYTES, self._limit // 256) / max(mean_bytes, 1))
        return max(_PREFETCH_REFS[0], min(_PREFETCH_REFS[1], ahead))

    def fetch_rows(self, numbers: Rows) -> None:
        """See `ShardFiles.fetch_rows`."""
        parts = self._cached.layout.parts
        absent = [] if parts is None else parts.absent(np.unique(numbers)).tolist()
        if absent:
            self._call("index_rows", self.place.url, str(self._cached.folder), absent)

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
