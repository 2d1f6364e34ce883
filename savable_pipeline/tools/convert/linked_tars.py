"""Tars with links: their samples with the bytes that the links lead to, which readers of the tars do not give."""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from savable_pipeline.data.shards.energon_metadata import INDEX_NAME
from savable_pipeline.data.shards.index_place import index_places
from savable_pipeline.data.shards.paths import find_shards
from savable_pipeline.data.shards.tar import Extent, members, of_samples, split_name
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.data.shards.tar_links import linked_samples
from savable_pipeline.errors import ShardError
from savable_pipeline.tools.convert.model import Files, Input, Part, Reject
from savable_pipeline.tools.convert.names import printable
from savable_pipeline.tools.convert.stored import Row, add_rows
from savable_pipeline.tools.convert.stretches import changed


@dataclass(frozen=True, slots=True)
class _Tar:
    """A tar as it was planned: the number of its first sample, its bytes, and when it was changed last."""

    name: str
    first: int
    size: int
    written_ns: int


@dataclass(frozen=True, slots=True)
class LinkedReader:
    """A `SampleReader` of tars below `root`, with what their links lead to."""

    root: str
    tars: tuple[_Tar, ...]

    def expect(self, samples: list[Files]) -> None:
        """Nothing: see `SampleReader.expect`."""

    def elsewhere(self, samples: list[Files]) -> LinkedReader:
        """See `SampleReader.elsewhere`."""
        return self

    def read(self, sample: Files) -> dict[str, bytes]:
        """The parts of a sample by extension. Raises `SavableError` if its tar changed."""
        tar = self.tars[bisect.bisect(self.tars, sample.record, key=lambda each: each.first) - 1]
        path = Path(self.root, tar.name)
        self._check(path, tar)
        extent = _opened(str(path), tar.written_ns)[sample.record - tar.first]
        places = dict(zip(extent.extensions, extent.members, strict=True))
        found = {}
        with path.open("rb") as file:
            for part in sample.parts:
                file.seek(places[part.extension].payload)
                found[part.extension] = file.read(part.size)
        self._check(path, tar)
        return found

    def _check(self, path: Path, tar: _Tar) -> None:
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (tar.size, tar.written_ns):
            raise changed(path, f"{tar.size} bytes when planned, {stat.st_size} now, written since")


@functools.lru_cache(maxsize=2)
def _opened(path: str, written_ns: int) -> list[Extent]:
    with Path(path).open("rb") as file:
        return linked_samples(path, file.fileno())[0]


def close_tars() -> None:
    """Forget what this process has read of tars."""
    _opened.cache_clear()


def holds_links(path: Path) -> bool:
    """Whether there are links in tars at `path`, as their index says; where it does not, their headers are read."""
    try:
        root, names = find_shards(path)
        for place in index_places(root, INDEX_NAME):
            with contextlib.suppress(OSError, ValueError, KeyError, ShardError):
                index = TarIndex(place)
                if index.links_known:
                    return not index.links.keys().isdisjoint(index.numbers(names).tolist())
        return any(_has_links(root / name) for name in names)
    except (OSError, ShardError):  # told by who reads them
        return False


def _has_links(path: Path) -> bool:
    with path.open("rb") as file:
        return any(each.link and split_name(each.name) for each in members(str(path), file.fileno()))


def read_linked(path: Path) -> Input:
    """The samples of tars at `path`, in their order; links that lead to no file are rejected. Raises `ShardError`."""
    root, names = find_shards(path)
    found = Input(str(root), LinkedReader(str(root), ()))
    digest = hashlib.sha256()
    tars: list[_Tar] = []

    def rows() -> Iterator[Row]:
        first = 0
        for name in names:
            with (root / name).open("rb") as file:
                stat = os.fstat(file.fileno())
                extents, lost = linked_samples(name, file.fileno())
            tars.append(_Tar(name, first, stat.st_size, stat.st_mtime_ns))
            first += len(extents)
            digest.update(repr((name, stat.st_size, extents)).encode("utf-8", "surrogateescape"))
            for link, reason in lost:
                key = "".join(key for _, key, _ in of_samples([link._replace(regular=True)]))
                where = f"{link.name} -> {link.link}: {reason}"
                found.rejected.append(Reject(printable(name), printable(key), "link without a file", printable(where)))
            for extent in extents:
                parts = zip(extent.extensions, extent.members, strict=True)
                yield Row(name, extent.key.removeprefix("./"), [Part(each, name, at.size) for each, at in parts])

    add_rows(found, rows())
    found.digest = digest.hexdigest()
    found.reader = LinkedReader(str(root), tuple(tars))
    return found
