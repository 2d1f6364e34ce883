"""`MediaTable`: headers of a dataset's media, stored next to its index.

    .nv-meta/savable.media.index     an index (see index.py), which has for each shard, in words of 8 bytes:

    samples n │ rows m │ bytes of names │ starts: uint32 (n + 1,) │ rows: ROW (m,) │ names of parts: MessagePack

The rows from starts[i] to starts[i + 1] belong to sample i: one for each of its parts of a kind in `MEDIA_PARTS`. The
file is mapped. Opening it reads no row, and finding a row reads only those of its shard. It has size, samples and
digest of each of its shards, as in the index of the dataset, and is used for no other shards. If a shard may have been
written after the table, some of its headers are read again.

`KnownMedia` looks up a part in the table first. If it is missing there, its headers are read, which yields the same
values. The digest of a table's values is saved in a state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from savable_pipeline.data.media.media_info import MediaInfo, media_info
from savable_pipeline.data.shards.byte_source import FileVersion
from savable_pipeline.data.shards.index import BlobIndex, FileBlob
from savable_pipeline.data.shards.indexing import index_paths, media_table_name
from savable_pipeline.data.shards.shard_list import Rows, ShardList
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import MediaError, ShardError

KIND = "shown media"  # sizes as displayed; in tables of the kind "media", photos were not rotated
BROKEN: Literal["broken"] = "broken"  # entry of a part whose headers cannot be read
HeaderFacts: TypeAlias = MediaInfo | Literal["broken"]

_FLOATS, _INTEGERS = ("duration_s", "fps"), ("frames", "width", "height", "rate", "channels")
ROW = np.dtype(
    [
        *((name, "<f8") for name in _FLOATS),
        *((name, "<i8" if name == "frames" else "<i4") for name in _INTEGERS),
        ("part", "<u4"),  # the number of its name
        ("broken", "<u4"),  # 1: its headers cannot be read
    ]
)
_HEAD_WORDS = 3
_OPEN_SHARDS = 1024  # most shards whose checked rows are in memory


class MediaTable:
    """Open table of some shards, which have these `numbers` in its index.

    Raises `ShardError` if the rows of a shard are damaged.
    """

    field = "media"

    def __init__(self, path: Path, index: BlobIndex, numbers: Rows) -> None:
        self.path, self._index, self._numbers = path, index, numbers
        self._opened: dict[int, _ShardMedia] = {}

    @property
    def digest(self) -> str:
        """Hash of all values, in the order of the shards."""
        return xxh3_128_hexdigest(np.ascontiguousarray(self._index.checks[self._numbers], dtype="<u8").data)

    def first(self, shards: int) -> MediaTable:
        """Return the table of the first `shards` shards."""
        return MediaTable(self.path, self._index, self._numbers[:shards])

    def find(self, store: RecordStore, shard: int, row: int, part: str) -> HeaderFacts | None:
        """Return the headers of a part, or None if the table has none of it.

        `row` is the sample's row in the store. The time that this takes does not depend on the table's size.
        """
        if (media := self._opened.get(shard)) is None:
            if len(self._opened) >= _OPEN_SHARDS:
                self._opened.clear()
            media = self._opened[shard] = self._open_shard(shard)
            # the row of sample 0 of this shard; `rows` has an array of shards and one of their samples
            media.first_row = int(store.rows(np.array([shard]), np.zeros(1, np.int64))[0])
            self._check_rewritten(store, shard, media)
        return media.find(row - media.first_row, part)

    def broken(self) -> Iterator[tuple[int, int, str]]:
        """Yield (shard, sample, name) of each part whose headers cannot be read.

        The shard is a number, and the sample its number in the shard.
        """
        for shard in range(len(self._numbers)):
            media = self._open_shard(shard)
            yield from ((shard, *media.part_of(number)) for number in np.flatnonzero(media.rows["broken"]).tolist())

    def by_part(self) -> dict[str, NDArray[Any]]:
        """Return the rows of each part, ROW (any,), by its name."""
        found: dict[str, list[NDArray[Any]]] = {}
        for shard in range(len(self._numbers)):
            media = self._open_shard(shard)
            for number, name in enumerate(media.names):
                found.setdefault(name, []).append(media.rows[media.rows["part"] == number])
        return {name: np.concatenate(each) for name, each in found.items()}

    def _check_rewritten(self, store: RecordStore, shard: int, media: _ShardMedia) -> None:
        """Raise `ShardError` if a shard was rewritten and its first, middle or last header changed."""
        name = self._index.shards.names[int(self._numbers[shard])]
        if store.root is None or not may_be_newer(store.root / name, self.path):
            return
        numbers = range(len(media.rows))
        for number in {numbers[0], numbers[len(numbers) // 2], numbers[-1]} if numbers else ():
            sample, part = media.part_of(number)
            with contextlib.suppress(ImportError):
                if read_headers(store, shard, media.first_row + sample, part) != _info_of(media.rows[number]):
                    raise _mismatch(self.path, f"{name} was rewritten, or PyAV reads it differently now")

    def _open_shard(self, shard: int) -> _ShardMedia:
        number = int(self._numbers[shard])
        try:
            if self._index.is_whole(number):
                return _ShardMedia(self._index.blob(number).copy(), int(self._index.shards.samples[number]))
        except (ValueError, IndexError, UnicodeDecodeError):  # msgspec's errors are ValueErrors
            pass
        raise _mismatch(self.path, f"its entry of {self._index.shards.names[number]} is damaged")


class _ShardMedia:
    """Rows of the media table for one shard, which has `samples` samples.

    Raises ValueError or IndexError if the blob is inconsistent.
    """

    def __init__(self, blob: FileBlob, samples: int) -> None:
        count, rows, name_bytes = (int(number) for number in blob[:_HEAD_WORDS])
        rows_start = _HEAD_WORDS + -(-4 * (count + 1) // 8)
        names_start = rows_start + rows * ROW.itemsize // 8
        self.starts = blob[_HEAD_WORDS:rows_start].view("<u4")[: count + 1]
        self.rows: NDArray[Any] = blob[rows_start:names_start].view(ROW)
        encoded = blob[names_start:].tobytes()
        self.names = msgspec.msgpack.decode(encoded[:name_bytes], type=list[str])
        self.first_row = 0  # first row of the shard in its store
        self._part_numbers = {name: number for number, name in enumerate(self.names)}
        fits = count == samples and len(self.rows) == rows and len(encoded) == -(-name_bytes // 8) * 8
        ascends = fits and self.starts[0] == 0 and self.starts[-1] == rows and bool((np.diff(self.starts) >= 0).all())
        if not ascends or (rows and int(self.rows["part"].max()) >= len(self.names)):
            raise ValueError(f"{samples} samples")

    def part_of(self, row_number: int) -> tuple[int, str]:
        """Return the sample and the name of the part that a row of the table is about.

        The sample is its number in the shard.
        """
        sample = int(np.searchsorted(self.starts, row_number, side="right")) - 1
        return sample, self.names[int(self.rows["part"][row_number])]

    def find(self, sample: int, part: str) -> HeaderFacts | None:
        """Return the headers of a part of a sample, by its number in the shard, or None."""
        rows = self.rows[self.starts[sample] : self.starts[sample + 1]]
        found = rows[rows["part"] == self._part_numbers.get(part, -1)]
        return _info_of(found[0]) if len(found) else None


def read_headers(store: RecordStore, shard: int, row: int, part: str) -> HeaderFacts:
    """Read the headers of a part, or return `BROKEN`.

    Raises the errors of reading the part, and ImportError without PyAV.
    """
    try:
        with store.open(shard, row, part) as file:
            return media_info(file, part, part)
    except MediaError:
        return BROKEN


def may_be_newer(shard: Path, table: Path) -> bool:
    """Return whether a local shard may have been written after the table."""
    try:
        return FileVersion.of(shard.stat()).newest_ns >= table.stat().st_mtime_ns
    except OSError:
        return False


def _info_of(row: Any) -> HeaderFacts:
    if row["broken"]:
        return BROKEN
    values: dict[str, Any] = {name: None if np.isnan(row[name]) else float(row[name]) for name in _FLOATS}
    return MediaInfo(**values, **{name: None if row[name] == -1 else int(row[name]) for name in _INTEGERS})


def pack_rows(samples: Iterable[Iterable[tuple[str, HeaderFacts]]]) -> bytes:
    """Pack the rows of a shard: names and headers of each sample's media parts."""
    starts, rows, names = [0], bytearray(), dict[str, int]()
    for sample in samples:
        for part, facts in sample:
            row = np.zeros(1, ROW)
            info = MediaInfo() if facts == BROKEN else facts
            for field in (*_FLOATS, *_INTEGERS):
                value = getattr(info, field)
                unknown = np.nan if field in _FLOATS else -1
                row[field] = unknown if value is None else value
            row["part"] = names.setdefault(part, len(names))
            row["broken"] = facts == BROKEN
            rows += row.tobytes()
        starts.append(len(rows) // ROW.itemsize)
    encoded = msgspec.msgpack.encode(list(names))
    head = np.array([len(starts) - 1, starts[-1], len(encoded)], dtype="<u8").tobytes()
    return head + _padded(np.array(starts, dtype="<u4").tobytes()) + bytes(rows) + _padded(encoded)


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 8)


def open_table(root: Path, shards: ShardList, kind: str) -> MediaTable | None:
    """Open the table of these shards below `root`, or return None.

    Raises `ShardError` if the only table is of other shards.
    """
    fault: ShardError | None = None
    for path in index_paths(root, media_table_name(kind)):
        try:
            index = BlobIndex(path, KIND)
            return MediaTable(path, index, _shard_numbers(index, shards))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except OSError as error:
            fault = fault or ShardError(f"{path}: {error.strerror}")
        except (ValueError, ShardError) as error:
            fault = fault or _mismatch(path, str(error).removeprefix(f"{path}: "))
    if fault is not None:
        raise fault
    return None


def _shard_numbers(index: BlobIndex, shards: ShardList) -> Rows:
    """Return the numbers of these shards in a table's index.

    Raises ValueError if one is missing or has changed.
    """
    try:
        numbers = index.numbers(shards.names)
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is not in it") from None
    indexed = index.shards
    same = (indexed.sizes[numbers] == shards.sizes) & (indexed.samples[numbers] == shards.samples)
    changed = np.flatnonzero(~(same & (indexed.digests[numbers] == shards.digests)))
    if len(changed):
        raise ValueError(f"{shards.names[int(changed[0])]} was rewritten")
    faulty = next((number for number in numbers.tolist() if number in indexed.faults), None) if indexed.faults else None
    if faulty is not None:
        raise ValueError(f"{indexed.names[faulty]} could not be read at that time")
    return numbers


def _mismatch(path: Path, why: str) -> ShardError:
    return ShardError(
        f"{path}: not the table of media of these shards ({why}). Run `savable index --media`, or remove the table",
        reason="other media table",
    )


class KnownMedia:
    """Facts about the media of some shards, from a table or from the headers.

    Raises `ShardError` for a table of other shards.
    """

    def __init__(self, store: RecordStore, shards: ShardList, *, tables: bool = True) -> None:
        self._store, self._shards = store, shards
        self.table: MediaTable | None = None
        if tables and store.found is not None:
            self.table = open_table(store.found.root, shards, store.found.form.index_kind)

    def without_table(self) -> KnownMedia:
        """Return the same media without a table, so that headers are read."""
        return KnownMedia(self._store, self._shards, tables=False)

    def settings(self) -> dict[str, str]:
        """Return the digest of the table for a state, or {} without a table."""
        return {} if self.table is None else {self.table.field: self.table.digest}

    def media(self, shard: int, row: int, part: str, name: str) -> MediaInfo:
        """Return the facts about a part, which messages call `name`.

        Raises `MediaError`, and the errors of reading it.
        """
        known = None if self.table is None else self.table.find(self._store, shard, row, part)
        if isinstance(known, MediaInfo):
            return known
        with self._store.open(shard, row, part) as file:
            read = media_info(file, name, part)
        if known == BROKEN:  # even if this release of PyAV can read it, because all releases must agree in a run
            raise MediaError(f"{name}: its headers could not be read by `savable index --media`. Run it again")
        return read


@dataclass(frozen=True, slots=True)
class MediaTotals:
    """Totals of the media of one part.

    `size`, `fps` and `rate` are the most frequent ones, with their fraction; "" if there are none.
    """

    parts: int
    hours: float
    broken: int  # parts whose headers cannot be read
    size: str
    fps: str
    rate: str

    @classmethod
    def of(cls, rows: NDArray[Any]) -> MediaTotals:
        """Return the totals of the rows of a table: ROW (any,)."""
        hours = float(np.nansum(rows["duration_s"])) / 3600
        sized = rows[rows["width"] >= 0]
        return cls(
            len(rows),
            hours,
            int(np.count_nonzero(rows["broken"])),
            _most_frequent(
                sized["width"].astype(np.int64) << 32 | sized["height"], lambda size: f"{size >> 32}×{size % (1 << 32)}"
            ),
            _most_frequent(rows["fps"][~np.isnan(rows["fps"])].round(2), lambda fps: f"{fps:g}"),
            _most_frequent(rows["rate"][rows["rate"] >= 0], lambda rate: f"{rate:,} Hz"),
        )


def _most_frequent(values: NDArray[Any], format_value: Any) -> str:
    """Format the most frequent value and its fraction, or return "" without values."""
    if not len(values):
        return ""
    distinct, counts = np.unique(values, return_counts=True)
    best = int(counts.argmax())
    fraction = f" ({counts[best] / len(values):.0%})" if len(distinct) > 1 else ""
    return f"{format_value(distinct[best].item())}{fraction}"
