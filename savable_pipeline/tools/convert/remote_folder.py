"""`RemoteFolder`: files below a URL that hold records, read through the cache by any process on any machine.

    who plans   size and stamp of each file ──▶ RecordFile (`behind` this folder) ── in each job ──▶ a process
    a process   opens a file: has it the stamp still? ──▶ the node's cache ──▶ pages in memory ──▶ records

The files of a folder are one version in the cache, so processes of a node download none twice.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from savable_pipeline.data.remote.remote_files import asked_stamps_of, check_stamp, place_of_objects
from savable_pipeline.data.remote.scratch import shared_downloader
from savable_pipeline.data.shards.file_bytes import FileBytes
from savable_pipeline.data.stores.cached_blocks import CachedBlocks, CachedBytes

_PAGE, _PAGES = 1 << 20, 4  # bytes that are read at once, and how many times as many are kept of a file


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """Files below `url` as they were when the conversion was planned: their size and stamp by name."""

    url: str
    digest: str  # of the files, so that two folders are compared fast
    files: dict[str, tuple[int, str]] = field(compare=False, repr=False)

    @classmethod
    def at(cls, url: str, names: Iterable[str]) -> RemoteFolder:
        """Those of these files that are there, as they are now. Raises `RemoteError`."""
        files = asked_stamps_of(url, sorted(set(names)), shared_downloader(), needed=False)
        return cls(url, hashlib.sha256(repr([*files.items()]).encode()).hexdigest(), files)

    def open(self, path: str) -> Pages:
        """The file with this URL. Raises `ShardError` if it is another one by now, or gone, `RemoteError`."""
        name = path.removeprefix(f"{self.url}/")
        found = asked_stamps_of(self.url, [name], shared_downloader())
        check_stamp(path, self.files[name][1], found[name][1])
        return Pages(_opened(self)[name])

    def expect(self, path: str) -> None:
        """Announces that all of the file with this URL is read soon."""
        name = path.removeprefix(f"{self.url}/")
        _opened(self)[name].expect([(0, self.files[name][0])])


class Pages:
    """A file of which the pages that were read last are in memory, since records are read in small pieces."""

    def __init__(self, file: FileBytes) -> None:
        self._file = file
        self._page = functools.lru_cache(_PAGES)(lambda number: file.read(number * _PAGE, _PAGE))

    def read(self, offset: int, size: int) -> bytes:
        """See `FileBytes.read`."""
        if size > _PAGE:
            return self._file.read(offset, size)
        first, last = offset // _PAGE, (offset + max(size, 1) - 1) // _PAGE
        data = self._page(first) if first == last else self._page(first) + self._page(last)
        begin = offset - first * _PAGE
        return data[begin : begin + size]


@functools.lru_cache(maxsize=1)
def _opened(folder: RemoteFolder) -> dict[str, CachedBytes]:
    place = place_of_objects(folder.url, folder.files, f"{folder.url} records")
    blocks = CachedBlocks(place, all_used=True)
    return {entry.name: CachedBytes(blocks, i) for i, entry in enumerate(place.cached.shards)}


def close_folder() -> None:
    """Close what this process has open behind a URL."""
    _opened.cache_clear()
