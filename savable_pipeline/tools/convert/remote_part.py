"""`PartReader`: some files behind a URL with what the index says of them, for a machine that has no index of them.

    who plans   the index of all files ── of each job, the files that its samples lie in ──▶ job
    a machine   job ──▶ a cache of its own, dropped with the job ──▶ the store that reads these files anywhere

So no machine makes the index again, and none reads another version of a file than the plan was made from.
"""

from __future__ import annotations

import bisect
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from savable_pipeline.data.remote.lookup import RemoteFolder, check_stamp, held, stamps_of
from savable_pipeline.data.remote.session import Session, scratch
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.tools.convert.model import Files

if TYPE_CHECKING:
    from savable_pipeline.data.dataset.dataset import Dataset


@dataclass(frozen=True, slots=True)
class MemberFile:
    """A file: its name, its stamp on the server, the number of its first sample in the whole, and its index."""

    name: str
    stamp: str
    first: int
    table: bytes  # a `ShardTable`, as MessagePack


@dataclass(frozen=True, slots=True)
class PartReader:
    """A `SampleReader` of these files below `url`: of the kind `form`."""

    url: str
    form: str
    files: tuple[MemberFile, ...]  # in the order of their samples
    settings: tuple[tuple[str, Any], ...] = ()  # of the store

    def expect(self, samples: list[Files]) -> None:
        """See `SampleReader.expect`."""
        dataset = _opened(self)
        dataset.store.prefetch(np.array([self._number(dataset, sample) for sample in samples], dtype=np.int64))

    def elsewhere(self, samples: list[Files]) -> PartReader:
        """See `SampleReader.elsewhere`."""
        return self

    def read(self, sample: Files) -> dict[str, bytes]:
        """The parts of a sample by extension. Raises `ShardError` for a file that was replaced, `RemoteError`."""
        dataset = _opened(self)
        shards, rows = dataset.locate(np.array([self._number(dataset, sample)]))
        shard, row = int(shards[0]), int(rows[0])
        return {part.extension: dataset.read(shard, row, part.extension) for part in sample.parts}

    def _number(self, dataset: Dataset, sample: Files) -> int:
        """The number of a sample among those of these files."""
        place = bisect.bisect(self.files, sample.record, key=lambda file: file.first) - 1
        return int(dataset.firsts[place]) + sample.record - self.files[place].first


class _Opened:
    """The part that this process has open, in a folder of its own."""

    def __init__(self, reader: PartReader) -> None:
        self.reader = reader
        self._stack = contextlib.ExitStack()
        try:
            self.dataset = _dataset(reader, *self._stack.enter_context(scratch()))
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Drop it, with what was downloaded."""
        del self.dataset
        self._stack.close()


_open: _Opened | None = None


def _opened(reader: PartReader) -> Dataset:
    global _open
    if _open is None or _open.reader is not reader:
        close_part()
        _open = _Opened(reader)
    return _open.dataset


def close_part() -> None:
    """Close what this process has open, and remove what was downloaded for it."""
    global _open
    if _open is not None:
        _open.close()
    _open = None


def _dataset(reader: PartReader, folder: Path, session: Session) -> Dataset:
    from savable_pipeline.data.dataset.dataset import Dataset  # imported here: other sources do without
    from savable_pipeline.data.dataset.opening import seen
    from savable_pipeline.data.shards.index import IndexedFiles
    from savable_pipeline.data.stores.source import STORES

    found = stamps_of(reader.url, [file.name for file in reader.files], session)
    for file in reader.files:
        check_stamp(f"{reader.url}/{file.name}", file.stamp, found[file.name][1])
    kind, version = STORES[reader.form], folder / "version"
    form = kind.form
    tables = [msgspec.msgpack.decode(file.table, type=ShardTable) for file in reader.files]
    write_index(version / "index", tables, form)
    place = RemoteFolder(reader.url, held(version), session)
    files = IndexedFiles(form, place.index, place.index_path, None, folder, place)
    given = dict(reader.settings)
    unpacked_bytes = given.get("unpacked_bytes", UNPACKED_BYTES)
    known = {name: value for name, value in given.items() if name in kind.settings}
    return Dataset(seen(files, kind, partial=True, **known), unpacked_bytes=unpacked_bytes)
