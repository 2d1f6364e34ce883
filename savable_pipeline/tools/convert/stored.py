"""Sources that are read in place: a `Dataset` counts and finds their samples; nothing here knows their bytes.

Each process that writes shards opens the dataset for itself.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from savable_pipeline.core.wording import listed
from savable_pipeline.data.remote.remote_files import stamps_of
from savable_pipeline.data.remote.scratch import job_session
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.tools.convert.model import Files, Input, Part, Reject, SampleReader
from savable_pipeline.tools.convert.named_files import RowColumns
from savable_pipeline.tools.convert.names import name_fault, printable
from savable_pipeline.tools.convert.remote_part import MemberFile, PartReader
from savable_pipeline.tools.convert.source_file import place_behind
from savable_pipeline.tools.convert.stretches import changed

if TYPE_CHECKING:
    from savable_pipeline.data.dataset.dataset import Dataset


@dataclass(frozen=True, slots=True)
class StoreReader:
    """A `SampleReader` of the files at `path`, of any kind that is read in place, with this digest of their entries.

    Behind a URL they have `stamps`, one a file; of files on a disk there are none, and `newest_ns` is when any of them
    was changed last when the conversion was planned.
    """

    path: str
    digest: str
    stamps: tuple[str, ...] = ()
    newest_ns: int = 0
    unpacked_bytes: int = UNPACKED_BYTES

    def expect(self, samples: list[Files]) -> None:
        """See `SampleReader.expect`."""
        self._dataset().store.prefetch(np.array([sample.record for sample in samples], dtype=np.int64))

    def elsewhere(self, samples: list[Files]) -> SampleReader:
        """See `SampleReader.elsewhere`: behind a URL, with what the index says of the files with these samples."""
        if not self.stamps:
            return self
        from savable_pipeline.data.dataset.source import recognize

        dataset, form = self._dataset(), recognize(self.path).kind.form
        shards = np.unique(dataset.locate(np.array([sample.record for sample in samples]))[0]).tolist()
        table: Any = dataset.store.table  # type: ignore[attr-defined]  # as all stores have that are read here
        files = (
            MemberFile(
                dataset.entries[shard].name,
                self.stamps[shard],
                int(dataset.firsts[shard]),
                msgspec.msgpack.encode(table(shard)),
            )
            for shard in shards
        )
        return PartReader(dataset.address, form.name, tuple(files), self.unpacked_bytes)

    def read(self, sample: Files) -> dict[str, bytes]:
        """The parts of a sample by extension. Raises `SavableError` if the files changed."""
        dataset = self._dataset()
        shards, rows = dataset.locate(np.array([sample.record]))
        shard, row = int(shards[0]), int(rows[0])
        file = Path(dataset.address, dataset.entries[shard].name)
        self._check(file, dataset.entries[shard].size)  # before, since a map of a file that was cut ends the process
        parts = {part.extension: dataset.read(shard, row, part.extension) for part in sample.parts}
        self._check(file, dataset.entries[shard].size)
        return parts

    def _check(self, file: Path, size: int) -> None:
        if self.stamps:  # with which each byte is asked for
            return
        stat = file.stat()
        if stat.st_size != size or stat.st_mtime_ns > self.newest_ns:
            raise changed(file, f"{size} bytes when planned, {stat.st_size} now, written since")

    def _dataset(self) -> Dataset:
        dataset, digest = _opened(self.path, self.unpacked_bytes)
        if digest != self.digest:
            raise changed(self.path, "it holds other files, or other samples in them, than when planned")
        return dataset


@functools.lru_cache(maxsize=1)
def _opened(path: str, unpacked_bytes: int) -> tuple[Dataset, str]:
    """The dataset there, and a digest of its entries."""
    from savable_pipeline.data.dataset.kinds import open_any  # imported here: other sources do without

    dataset = open_any(path, partial=True, unpacked_bytes=unpacked_bytes)
    entries = [(entry.name, entry.size, entry.digest) for entry in dataset.entries]
    return dataset, hashlib.sha256(repr(entries).encode()).hexdigest()


def close_stores() -> None:
    """Close what was opened last in this process."""
    _opened.cache_clear()


def opened_input(path: Path | str, unpacked_bytes: int = UNPACKED_BYTES) -> tuple[Dataset, Input]:
    """The dataset of files that are read in place, and an input without samples that reads from it."""
    place = str(path.resolve()) if isinstance(path, Path) else path
    close_stores()  # what was opened before may have changed since
    dataset, digest = _opened(place, unpacked_bytes)
    stamps = () if isinstance(path, Path) else _stamps(dataset)
    reader = StoreReader(place, digest, stamps, _newest_ns(dataset, path), unpacked_bytes)
    found = Input(dataset.address, reader, digest=digest)
    found.place = place_behind(dataset.address, stamps) if stamps else ""
    return dataset, found


def read_stored(
    path: Path | str,
    only: tuple[str, ...] = (),
    files: Path | None = None,
    unpacked_bytes: int = UNPACKED_BYTES,
) -> Input:
    """The samples of files that are read in place, in their order; files that rows name are those below `files`.

    A key that occurs again gets the name of its shard before it. Raises ValueError for links in tars, and for rows that
    name files without their bytes, where no folder is given, unless their parts are not among those taken, `only`.
    """
    dataset, found = opened_input(path, unpacked_bytes)
    if text := dataset.store.left_out():
        raise ValueError(text)
    columns = RowColumns(dataset.store, only, files)

    def rows() -> Iterator[Row]:
        for shard, row in zip(*(a.tolist() for a in dataset.locate(np.arange(dataset.count))), strict=True):
            name = dataset.entries[shard].name
            parts, fault = columns.parts_of(shard, row)
            yield Row(name, _key(dataset.key(shard, row), name), [*_parts(dataset, name, shard, row), *parts], fault)

    add_rows(found, rows())
    columns.tell(found, dataset)
    return found


class Row(NamedTuple):
    """A sample as a shard has it, and why it cannot be taken; its number is its place among all."""

    shard: str
    key: str
    parts: list[Part]
    fault: str = ""


def add_rows(found: Input, rows: Iterable[Row]) -> None:
    """Add these samples, all of a source. A key that occurs again gets the name of its shard before it."""
    seen: set[str] = set()
    again: list[str] = []
    for number, (shard, key, parts, fault) in enumerate(rows):
        if key in seen:
            again.append(key)
            key = f"{shard.rpartition('.')[0].replace('.', '_')}/{key}"
        fault = fault or ("duplicate key: twice in one shard" if key in seen else "")
        parts.sort(key=lambda part: part.extension)
        _add(found, Files(key, tuple(parts), number), shard, fault)
        seen.add(key)
    if again:
        found.warnings.append(
            f"{len(again)} keys occur again, and got the name of their shard before them: {listed(again)}"
        )


def _newest_ns(dataset: Dataset, path: Path | str) -> int:
    """When a file on a disk was changed last."""
    if isinstance(path, str):
        return 0
    return max((Path(dataset.address, entry.name).stat().st_mtime_ns for entry in dataset.entries), default=0)


def _stamps(dataset: Dataset) -> tuple[str, ...]:
    names = [entry.name for entry in dataset.entries]
    found = stamps_of(dataset.address, names, job_session())
    return tuple(found[name][1] for name in names)


def _key(key: str, shard: str) -> str:
    """The key as a tar may have it; a row that has none, "web/0.parquet:17", becomes "web/0/17"."""
    if shard.endswith(".tar"):
        return key.removeprefix("./")
    if key.startswith(f"{shard}:"):
        key = f"{shard.rpartition('.')[0]}/{key[len(shard) + 1 :]}"
    return key.replace(".", "_")


def _parts(dataset: Dataset, name: str, shard: int, row: int) -> list[Part]:
    return [Part(extension, name, size) for extension, size in dataset.store.sizes(shard, row).items()]


def _add(found: Input, sample: Files, shard: str, fault: str) -> None:
    if not sample.parts:
        fault = fault or "no part: every field of it is null"
    for part in sample.parts:
        fault = fault or name_fault(sample.key, part.extension)
    if fault:
        reason, _, detail = fault.partition(": ")
        where = f"{shard}, record {sample.record}"
        found.rejected.append(Reject(printable(where), printable(sample.key), reason, printable(detail)))
    else:
        found.samples.append(sample)
