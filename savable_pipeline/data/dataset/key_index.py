"""`KeyIndex`: lookup of samples by key.

It is built once for a dataset, next to its index.

    "SAVKEY01" │ xxh3_64 of the header │ header: 64 bytes │ high │ low │ entries

    header   manifest: 16 bytes │ samples u64 │ indices of two samples with one key, 2 × u64, or 2⁶⁴-1
             │ xxh3_64 of what follows the header │ zeros
    high     uint64 (samples,)   first half of the 16-byte hash of a key; the hashes ascend
    low      uint64 (samples,)   second half
    entries  uint64 (samples,)   the sample's index, and above it 16 bits that check it against damage

All numbers are little-endian. The hash is BLAKE2b, so that no data can be made to have the hash of other data.

`ExcludeFile`: samples that a file excludes from a dataset.

    s000042                                           all samples with this key
    {"shard": "0001.tar", "key": "s000042", …}        only that of this shard: a line of a quarantine file
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import io
import json
import logging
import os
import struct
import time
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.files import read_regular, replace_file, user_cache, with_handles
from savable_pipeline.core.keyed_random import GAMMA
from savable_pipeline.core.wording import NAMES_SHOWN, listed
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.shards.byte_source import FileVersion, WholeFile
from savable_pipeline.data.shards.indexing import first_writable
from savable_pipeline.data.shards.metadata import META
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import SavableError, ShardError

log = logging.getLogger(__name__)

_MAGIC = b"SAVKEY01"
_HEADER = struct.Struct("<16sQQQQ16x")
_HEAD_BYTES = len(_MAGIC) + 8 + _HEADER.size
_NO_SAMPLE = (1 << 64) - 1
_READ_KEYS = 1 << 16  # keys to read at a time
_CHECK_SHIFT = 48  # the lowest of the check bits in an entry


class KeyIndex:
    """Key index in a file, for the dataset with this manifest digest.

    `duplicate` has the indices of two samples with one key, or is None if all keys differ. Raises `ShardError` if the
    file is of another dataset or damaged, and OSError.
    """

    def __init__(self, path: Path, manifest: bytes) -> None:
        self.path = path
        self._file = with_handles(partial(WholeFile, path))
        view = self._file.view
        head = view[:_HEAD_BYTES]
        is_index = head[:8] == _MAGIC and len(head) == _HEAD_BYTES
        if not is_index or xxh3_64_intdigest(head[16:]) != int.from_bytes(head[8:16], "little"):
            raise ShardError(f"{path}: not an index of keys, or damaged. Remove it and start again")
        found_manifest, count, first, second, digest = _HEADER.unpack(head[16:])
        if found_manifest != manifest or len(view) != _HEAD_BYTES + 24 * count:
            raise ShardError(f"{path}: truncated, or an index of the keys of other shards. Remove it and start again")
        if not self._file.is_mapped and xxh3_64_intdigest(view[_HEAD_BYTES:]) != digest:
            raise ShardError(f"{path}: the index of keys is damaged. Remove it and start again")
        self._count = count
        self.duplicate: tuple[int, int] | None = None if first == _NO_SAMPLE else (first, second)
        self._high, self._low, self._entries = (
            np.frombuffer(view, "<u8", count, _HEAD_BYTES + 8 * column * count) for column in range(3)
        )

    def find(self, keys: Sequence[str] | Sequence[bytes]) -> Rows:
        """Return the index of the sample with each key, or -1: int64 (keys,).

        If several samples have one key, it is the first of them. Raises `ShardError` if the index is damaged there.
        """
        high, low = _halves(b"".join(map(_key_hash, keys)))
        found = np.full(len(keys), -1, np.int64)
        unresolved = np.arange(len(keys))  # positions of keys in `keys`
        rows = np.searchsorted(self._high, high)  # for each unresolved key, the row of this index to compare next
        while True:  # usually one iteration, unless hashes share their first half
            may_match = rows < self._count
            unresolved, rows = unresolved[may_match], rows[may_match]
            may_match = self._high[rows] == high[unresolved]
            unresolved, rows = unresolved[may_match], rows[may_match]
            if not len(unresolved):
                return found
            equal = self._low[rows] == low[unresolved]
            found[unresolved[equal]] = self._sample_indices(rows[equal])
            unresolved, rows = unresolved[~equal], rows[~equal] + 1

    def _sample_indices(self, rows: Rows) -> Rows:
        """Return the samples in these rows of the index: int64 (rows,)."""
        entries = self._entries[rows]
        indices = entries & np.uint64((1 << _CHECK_SHIFT) - 1)
        if (indices >= self._count).any() or (_with_check_bits(self._low[rows], indices) != entries).any():
            raise ShardError(f"{self.path}: the index of keys is damaged. Remove it and start again")
        return indices.astype(np.int64)


def key_index(dataset: Dataset) -> KeyIndex:
    """Open the index of a dataset's keys, and build it if it is missing.

    Raises `ShardError` if a key cannot be read.
    """
    manifest = dataset.digest()
    if getattr(dataset.store, "keys_end_last", False):  # the same files with other keys
        manifest = hashlib.blake2b(manifest, digest_size=len(manifest)).digest()
    name, cache = f"savable.{manifest.hex()}.keys", user_cache()
    in_dataset = [] if dataset.root is None else [dataset.root / META / name]
    in_cache = [] if cache is None else [cache / "savable_pipeline" / name]
    # If the index of raw files is in the cache, the keys are written there too.
    has_folder = bool(in_dataset) and in_dataset[0].parent.is_dir()
    paths = [*in_dataset, *in_cache] if has_folder else [*in_cache, *in_dataset]

    def open_or_build(path: Path) -> KeyIndex:
        found = _open_if_valid(path, manifest)  # another process may have built it during the wait
        if found is None:
            _write(path, dataset, manifest)
        return found or KeyIndex(path, manifest)

    found = next(filter(None, (_open_if_valid(path, manifest) for path in paths)), None)
    return found or first_writable(paths, f"{dataset.address}: no place to write an index of its keys", open_or_build)


def _open_if_valid(path: Path, manifest: bytes) -> KeyIndex | None:
    with contextlib.suppress(OSError, ValueError, ShardError):
        return KeyIndex(path, manifest)
    return None


def _write(path: Path, dataset: Dataset, manifest: bytes) -> None:
    log.info("%s: indexing the keys of %d samples", dataset.address, dataset.count)
    hashes = bytearray()
    for start in range(0, dataset.count, _READ_KEYS):
        shards, rows = dataset.locate(np.arange(start, min(start + _READ_KEYS, dataset.count)))
        for shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
            hashes += _key_hash(dataset.key(shard, row))
    high, low = _halves(hashes)
    order = np.lexsort((low, high))  # stable, so that the first sample with a key comes first
    high, low = high[order], low[order]
    repeats = np.flatnonzero((high[1:] == high[:-1]) & (low[1:] == low[:-1]))
    duplicate = (int(order[repeats[0]]), int(order[repeats[0] + 1])) if len(repeats) else (_NO_SAMPLE, _NO_SAMPLE)
    parts = [part.astype("<u8").tobytes() for part in (high, low, _with_check_bits(low, order))]
    header = _HEADER.pack(manifest, dataset.count, *duplicate, xxh3_64_intdigest(b"".join(parts)))
    replace_file(path, [_MAGIC, xxh3_64_intdigest(header).to_bytes(8, "little"), header, *parts])


def _key_hash(key: str | bytes) -> bytes:
    return hashlib.blake2b(key if type(key) is bytes else os.fsencode(key), digest_size=16).digest()


def _halves(hashes: bytes | bytearray) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the two halves of 16-byte hashes: uint64 (hashes,) each."""
    pairs = np.frombuffer(hashes, ">u8").reshape(-1, 2).astype(np.uint64)
    return pairs[:, 0], pairs[:, 1]


def _with_check_bits(low: NDArray[np.uint64], indices: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the entries of these samples: each index, and above it 16 bits that depend on it and on the hash."""
    plain = indices.astype(np.uint64)
    mixed = (low ^ (plain * np.uint64(GAMMA))) * np.uint64(GAMMA)
    checked: NDArray[np.uint64] = plain | (mixed >> np.uint64(_CHECK_SHIFT) << np.uint64(_CHECK_SHIFT))
    return checked


_CHECK_INTERVAL_S = 1.0  # seconds between two checks of the file
_MOST_BYTES = 1 << 40  # largest file that is read
_LOOKUP_KEYS = 1 << 14  # keys to look up at a time


class ExcludeFile:
    """Samples of `dataset` that the file at `path` names.

    `indices` has their indices. A warning counts keys that no sample has, and lines without a key. Raises ValueError
    for a line that is neither a key nor JSON, `SavableError` if the file cannot be read, `ShardError` if the keys of
    the samples cannot.
    """

    def __init__(self, path: str | os.PathLike[str], dataset: Dataset) -> None:
        self.path = Path(path).absolute()
        # These are set before the file is read, so later changes are noticed.
        self._version, self._checked_at = self._current_version(), time.monotonic()
        content = self._read()
        self._content = _digest(content)
        keys_by_shard: dict[str, set[str]] = {}
        unnamed: set[int] = set()
        found: set[int] = set()
        unknown = _UnknownKeys()
        read_keys = partial(_keys_in, self.path, content, keys_by_shard, unnamed)
        _find_keys(dataset, read_keys, found, unknown.add)  # this also fills `keys_by_shard` and `unnamed`
        unknown.add([os.fsencode(text) for text in _find_in_shards(dataset, keys_by_shard, found)])
        self.indices = frozenset(found)
        if unknown.count:
            log.warning(
                "%s: exclude=%s names %d unknown samples: %s",
                dataset.address,
                self.path,
                unknown.count,
                unknown.listed(),
            )
        if unnamed:
            log.warning("exclude=%s: %d lines name a shard without a key and exclude nothing", self.path, len(unnamed))

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that depend only on the excluded samples.

        The order of lines and unknown keys do not matter.
        """
        return _digest(np.array(sorted(self.indices), dtype="<u8").tobytes())

    def verify(self) -> None:
        """Raise `SavableError` if the file has changed since it was read.

        It checks at most once a second.
        """
        now = time.monotonic()
        if now - self._checked_at < _CHECK_INTERVAL_S:
            return
        self._checked_at, version = now, self._current_version()
        if version != self._version and _digest(self._read()) != self._content:
            raise SavableError(
                f'exclude={self.path} changed during the run. Save the state and load it with allow={{"exclude"}}'
            )
        self._version = version

    def _current_version(self) -> FileVersion:
        try:
            return FileVersion.of(self.path.stat())
        except OSError as error:
            raise self._unreadable(error) from error

    def _read(self) -> bytes:
        try:
            return read_regular(self.path, _MOST_BYTES)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> SavableError:
        return SavableError(f"exclude={self.path}: {error.strerror}. Restore the file to keep its samples out")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class _UnknownKeys:
    """Number of distinct keys that no sample has, and the first five.

    There may be millions, so only their hashes are stored.
    """

    def __init__(self) -> None:
        self._hashes = array("Q")
        self._first: list[bytes] = []

    def add(self, keys: Sequence[bytes]) -> None:
        """Count keys that no sample has."""
        self._hashes.extend(map(xxh3_64_intdigest, keys))
        self._first = sorted({*self._first, *heapq.nsmallest(2 * NAMES_SHOWN, set(keys))})[:NAMES_SHOWN]

    @cached_property
    def count(self) -> int:
        """Return the number of distinct keys, once all were added."""
        ordered = np.sort(np.frombuffer(self._hashes, np.uint64))  # np.unique takes ten times as long
        return len(ordered) and 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))

    def listed(self) -> str:
        """Format the first five, sorted, and the number of the others."""
        return listed(map(os.fsdecode, self._first), self.count)


def _keys_in(path: Path, content: bytes, keys_by_shard: dict[str, set[str]], unnamed: set[int]) -> Iterator[bytes]:
    """Yield the keys in a file, line by line.

    Keys for a single shard are added to `keys_by_shard` instead, by its name. The numbers of lines without a key are
    added to `unnamed`.
    """
    for number, raw in enumerate(io.BytesIO(content.removeprefix(BOM_UTF8)), 1):
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        if not line.startswith(b"{"):
            if line:
                yield line
            continue
        shard, key = _parse_entry(path, number, os.fsdecode(line))
        if key is None:
            unnamed.add(number)
        elif shard is None:
            yield os.fsencode(key)
        else:
            keys_by_shard.setdefault(shard, set()).add(key)


def _parse_entry(path: Path, number: int, line: str) -> tuple[str | None, str | None]:
    """Return shard and key in a line of JSON, each None if missing."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'exclude={path}, line {number}: invalid JSON ({error}). Write a key, or JSON with "shard" and "key"'
        ) from error
    shard, key = found.get("shard"), found.get("key")
    if not isinstance(shard, str | None) or not isinstance(key, str | None):
        raise ValueError(f'exclude={path}, line {number}: "shard" and "key" must be strings: {line[:100]}')
    return shard, key


def sample_indices_of(dataset: Dataset, keys: Sequence[str]) -> tuple[list[int], set[str]]:
    """Return the indices of all samples with these keys, and unknown keys."""
    found: set[int] = set()
    unknown: list[bytes] = []
    _find_keys(dataset, lambda: map(os.fsencode, keys), found, unknown.extend)
    return sorted(found), set(map(os.fsdecode, unknown))


def _find_keys(
    dataset: Dataset, read_keys: Callable[[], Iterator[bytes]], found: set[int], report: Callable[[list[bytes]], None]
) -> None:
    """Add to `found` the indices of all samples with the keys that `read_keys` returns.

    `report` is called with lists of the keys that no sample has.
    """
    keys = read_keys()
    if (first := next(keys, None)) is None:
        return
    # An index belongs to shards. The key of a table depends on a setting of the reader, so it has no index.
    index = key_index(dataset) if dataset.store.keys_in_shards else None
    if index is None or index.duplicate is not None:
        _find_by_reading(dataset, read_keys, found, report)
        return
    for chunk in _chunks(chain([first], keys)):
        indices = index.find(chunk)
        found.update(indices[indices >= 0].tolist())
        report([chunk[i] for i in np.flatnonzero(indices < 0).tolist()])


def _find_by_reading(
    dataset: Dataset, read_keys: Callable[[], Iterator[bytes]], found: set[int], report: Callable[[list[bytes]], None]
) -> None:
    """Do the same as `_find_keys` without an index.

    All keys of the dataset are read. Memory has a hash of 8 bytes of each key that `read_keys` returns.
    """
    wanted = np.sort(np.frombuffer(array("Q", map(xxh3_64_intdigest, read_keys())), np.uint64))
    candidates: dict[int, bytes] = {}  # keys of the dataset that may be among these, by sample index
    start = 0
    for chunk in _chunks(map(os.fsencode, dataset.all_keys())):
        hashes = np.fromiter(map(xxh3_64_intdigest, chunk), np.uint64, len(chunk))
        nearest = wanted[np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)]
        candidates |= {start + i: chunk[i] for i in np.flatnonzero(nearest == hashes).tolist()}
        start += len(chunk)
    present = set(candidates.values())
    matched: set[bytes] = set()  # not all of `present`, because different keys may have the same hash
    for chunk in _chunks(read_keys()):
        matched |= present.intersection(chunk)
        report([key for key in chunk if key not in present])
    found.update(index for index, key in candidates.items() if key in matched)


def _chunks(keys: Iterator[bytes]) -> Iterator[list[bytes]]:
    while chunk := list(islice(keys, _LOOKUP_KEYS)):
        yield chunk


def _find_in_shards(dataset: Dataset, keys_by_shard: dict[str, set[str]], found: set[int]) -> Iterator[str]:
    """Add to `found` the indices of samples by shard name and key. Yield the keys that were not found."""
    shard_numbers = {entry.name: shard for shard, entry in enumerate(dataset.entries)}
    for name, keys in keys_by_shard.items():
        missing = set(keys)
        if name in shard_numbers:
            first = int(dataset.firsts[shard_numbers[name]])
            rows = {first + row: key for row, key in enumerate(dataset.keys_of(shard_numbers[name])) if key in keys}
            found.update(rows)
            missing -= set(rows.values())
        yield from (f"{name}: {key}" for key in missing)
