"""`KeyIndex`: lookup of samples by key.

It is built once for a dataset, next to its index.

    "SAVKEY01" │ xxh3_64 of the header │ header: 64 bytes │ high │ low │ places

    header   manifest: 16 bytes │ samples u64 │ numbers of two samples that have one key, 2 × u64, or 2⁶⁴-1
             │ xxh3_64 of what follows the header │ zeros
    high     uint64 (samples,)   first half of the 16-byte hash of a key; the hashes ascend
    low      uint64 (samples,)   second half
    places   uint64 (samples,)   the sample's number, and above it 16 bits that check it against damage

All numbers are little-endian. The hash is BLAKE2b, so that no data can be made to have the hash of other data.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.files import replace_file, user_cache, with_handles
from savable_pipeline.core.keyed_random import GAMMA
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.shards.byte_source import WholeFile
from savable_pipeline.data.shards.indexing import in_first_of
from savable_pipeline.data.shards.metadata import META
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_MAGIC = b"SAVKEY01"
_HEADER = struct.Struct("<16sQQQQ16x")
_BEGIN = len(_MAGIC) + 8 + _HEADER.size
_NONE = (1 << 64) - 1
_AT_ONCE = 1 << 16  # keys read at a time
_CHECK = 48  # the bit where the check of a place begins


class KeyIndex:
    """Key index in a file, for the dataset with this manifest digest.

    Raises `ShardError` for another dataset, and OSError.
    """

    def __init__(self, path: Path, manifest: bytes) -> None:
        self.path = path
        self._file = with_handles(partial(WholeFile, path))
        view = self._file.view
        begin = view[:_BEGIN]
        known = begin[:8] == _MAGIC and len(begin) == _BEGIN
        if not known or xxh3_64_intdigest(begin[16:]) != int.from_bytes(begin[8:16], "little"):
            raise ShardError(f"{path}: not an index of keys, or damaged. Remove it and start again")
        found, count, first, second, digest = _HEADER.unpack(begin[16:])
        if found != manifest or len(view) != _BEGIN + 24 * count:
            raise ShardError(f"{path}: truncated, or an index of the keys of other shards. Remove it and start again")
        if not self._file.is_mapped and xxh3_64_intdigest(view[_BEGIN:]) != digest:
            raise ShardError(f"{path}: the index of keys is damaged. Remove it and start again")
        self._count = count
        self.twice: tuple[int, int] | None = None if first == _NONE else (first, second)
        self._high, self._low, self._places = (
            np.frombuffer(view, "<u8", count, _BEGIN + 8 * part * count) for part in range(3)
        )

    def find(self, keys: Sequence[str] | Sequence[bytes]) -> Rows:
        """Return the index of the sample with each key, or -1: int64 (keys,).

        Of several samples with one key it is the first. Raises `ShardError` if the index is damaged there.
        """
        high, low = _halves(b"".join(map(_hashed, keys)))
        found = np.full(len(keys), -1, np.int64)
        wanted, at = np.arange(len(keys)), np.searchsorted(self._high, high)
        while True:  # once, unless hashes of several keys have one first half
            alike = at < self._count
            wanted, at = wanted[alike], at[alike]
            alike = self._high[at] == high[wanted]
            wanted, at = wanted[alike], at[alike]
            if not len(wanted):
                return found
            equal = self._low[at] == low[wanted]
            found[wanted[equal]] = self._numbers(at[equal])
            wanted, at = wanted[~equal], at[~equal] + 1

    def _numbers(self, at: Rows) -> Rows:
        """The numbers of the samples at these places of the index: int64 (places,)."""
        places = self._places[at]
        numbers = places & np.uint64((1 << _CHECK) - 1)
        if (numbers >= self._count).any() or (_checked(self._low[at], numbers) != places).any():
            raise ShardError(f"{self.path}: the index of keys is damaged. Remove it and start again")
        return numbers.astype(np.int64)


def key_index(dataset: Dataset) -> KeyIndex:
    """Open the index of a dataset's keys, built first if there is none.

    Raises `ShardError` if a key cannot be read.
    """
    manifest = dataset.digest()
    name, cache = f"savable.{manifest.hex()}.keys", user_cache()
    with_metadata = [] if dataset.root is None else [dataset.root / META / name]
    paths = [*with_metadata, *([] if cache is None else [cache / "savable_pipeline" / name])]

    def open_or_build(path: Path) -> KeyIndex:
        found = _known(path, manifest)  # another process may have built it while this one waited
        if found is None:
            _write(path, dataset, manifest)
        return found or KeyIndex(path, manifest)

    known = next(filter(None, (_known(path, manifest) for path in paths)), None)
    return known or in_first_of(paths, f"{dataset.address}: no place to write an index of its keys", open_or_build)


def _known(path: Path, manifest: bytes) -> KeyIndex | None:
    with contextlib.suppress(OSError, ValueError, ShardError):
        return KeyIndex(path, manifest)
    return None


def _write(path: Path, dataset: Dataset, manifest: bytes) -> None:
    log.info("%s: indexing the keys of %d samples", dataset.address, dataset.count)
    hashes = bytearray()
    for start in range(0, dataset.count, _AT_ONCE):
        shards, rows = dataset.locate(np.arange(start, min(start + _AT_ONCE, dataset.count)))
        for shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
            hashes += _hashed(dataset.key(shard, row))
    high, low = _halves(hashes)
    order = np.lexsort((low, high))  # stable: of equal keys, the first sample comes first
    high, low = high[order], low[order]
    again = np.flatnonzero((high[1:] == high[:-1]) & (low[1:] == low[:-1]))
    twice = (int(order[again[0]]), int(order[again[0] + 1])) if len(again) else (_NONE, _NONE)
    parts = [part.astype("<u8").tobytes() for part in (high, low, _checked(low, order))]
    header = _HEADER.pack(manifest, dataset.count, *twice, xxh3_64_intdigest(b"".join(parts)))
    replace_file(path, [_MAGIC, xxh3_64_intdigest(header).to_bytes(8, "little"), header, *parts])


def _hashed(key: str | bytes) -> bytes:
    return hashlib.blake2b(key if type(key) is bytes else os.fsencode(key), digest_size=16).digest()


def _halves(hashes: bytes | bytearray) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The two halves of 16-byte hashes: uint64 (hashes,) each."""
    pairs = np.frombuffer(hashes, ">u8").reshape(-1, 2).astype(np.uint64)
    return pairs[:, 0], pairs[:, 1]


def _checked(low: NDArray[np.uint64], numbers: NDArray[Any]) -> NDArray[np.uint64]:
    """Numbers of samples, with 16 bits above them that depend on the number and the hash."""
    plain = numbers.astype(np.uint64)
    mixed = (low ^ (plain * np.uint64(GAMMA))) * np.uint64(GAMMA)
    checked: NDArray[np.uint64] = plain | (mixed >> np.uint64(_CHECK) << np.uint64(_CHECK))
    return checked
