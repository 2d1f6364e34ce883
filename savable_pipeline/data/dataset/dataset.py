"""`Dataset`: opens samples of a record store by ref, which is a sample's ID.

It also has the splits, the field names and the error policy of the data.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.on_error import OnError, Quarantine
from savable_pipeline.core.wording import clean_address, listed
from savable_pipeline.data.dataset.ref import TAG_SHIFT, RefArray
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.shards.metadata import FieldMap, read_field_map, read_split
from savable_pipeline.data.shards.part_types import find_part
from savable_pipeline.data.shards.selection import Selection, Subset, without_ending
from savable_pipeline.data.shards.shard_list import Rows, ShardList
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import CheckpointMismatchError, ShardError

if TYPE_CHECKING:
    from savable_pipeline.data.media.media_info import MediaInfo
    from savable_pipeline.data.media.media_table import KnownMedia

log = logging.getLogger(__name__)

_UNNAMED_SOURCE = derive_key("source", "")
MISSING_FILE = "missing file"  # reason of the error for a row that names a missing file
_EXAMINED = 1000  # number of samples to examine for the sizes of parts
_INDEX_BITS = np.uint64((1 << TAG_SHIFT) - 1)  # the bits of an index below the tag


class Dataset:
    """Samples of a store, shared by the lanes of a process.

    `open_dataset` opens one.

    `source` is the name of the dataset, whose hash is in refs. `on_error` and `quarantine` are for the stages that read
    it: what to do about an error, and the file that lists skipped samples. `faults` are errors of the whole dataset,
    such as a folder that cannot be listed, as pairs of a name ("") and a message. `unpacked_bytes` is the most that a
    compressed part may decompress to.
    """

    def __init__(
        self,
        store: RecordStore,
        *,
        source: str = "",
        on_error: OnError = "raise",
        quarantine: str | os.PathLike[str] | None = None,
        faults: Iterable[tuple[str, str]] = (),
        unpacked_bytes: int = UNPACKED_BYTES,
    ) -> None:
        self.store, self.unpacked_bytes = store, unpacked_bytes
        self.source = derive_key("source", source) if source else _UNNAMED_SOURCE
        self.on_error = on_error
        self._faults = list(faults)
        self.source_names: dict[int, str] = {}  # of the `Blend` sources that read it, by tag
        self.quarantine = None if quarantine is None else Quarantine(quarantine)
        self.address = clean_address(store.address) if "://" in store.address else store.address
        self.entries = ShardList.of(store.entries)
        # int64 (shards + 1,): the index of each shard's first sample, then the number of all
        self.firsts = np.concatenate([[0], np.cumsum(self.entries.samples)])
        self.count = int(self.firsts[-1])
        if not self.count:
            message = f"{self.address}: no sample in {listed(self.entries.names[:5], len(self.entries))}"
            raise ShardError(store.rejects_warning() or message)
        # Methods that samples call are bound here, because a wrapper around `read` would cost a tenth of it.
        self.read, self.array, self.head, self.key = store.read, store.array, store.head, store.key
        self.open = store.open
        self.offset, self.extensions, self.verify = store.offset, store.extensions, store.verify
        self.has_part = store.has_part
        self.unit, self.root, self.key_column = store.unit, store.root, store.key_column

    @contextlib.contextmanager
    def observe_reads(self, note: Callable[[int, int], None]) -> Iterator[None]:
        """Call `note(bytes, nanoseconds)` after each read of a part.

        It applies to samples of this dataset within the context.
        """
        read, array = self.read, self.array

        def timed(method: Callable[..., Any], size_of: Callable[[Any], int]) -> Callable[..., Any]:
            def call(*address: Any) -> Any:
                start = time.perf_counter_ns()
                data = method(*address)
                note(size_of(data), time.perf_counter_ns() - start)
                return data

            return call

        self.read, self.array = timed(read, len), timed(array, lambda data: data.nbytes)
        try:
            yield
        finally:
            self.read, self.array = read, array

    def first_shards(self, shards: int) -> Dataset:
        """Return the dataset of the first `shards` shards, with the same store."""
        subset = copy.copy(self)
        subset.entries = self.entries.first(shards)
        subset.firsts = self.firsts[: shards + 1]
        subset.count = int(subset.firsts[-1])
        vars(subset).pop("known_media", None)
        return subset

    @cached_property
    def known_media(self) -> KnownMedia:
        """Cached facts about media, known without opening the files.

        Raises `ShardError` for a table of other shards.
        """
        # imported here, because most datasets need no media facts
        from savable_pipeline.data.media.media_table import KnownMedia

        return KnownMedia(self.store, self.entries)

    def media(self, shard: int, row: int, part: str, name: str) -> MediaInfo:
        """Return the facts in the headers of a part. See `KnownMedia.media`."""
        return self.known_media.media(shard, row, find_part(part, self.extensions(shard, row)), name)

    @property
    def prefetch_refs(self) -> int:
        """Number of refs to pass to `prefetch` ahead of their use.

        0 means only the next ones.
        """
        return self.store.prefetch_refs

    def prefetch(self, refs: RefArray) -> None:
        """Announce that the samples of these refs will be read."""
        self.store.prefetch(self._indices(refs))

    def open_samples(self, refs: RefArray, *, request: bool = True) -> list[Sample]:
        """Return the samples of these refs, without reading them.

        `request` downloads those of a remote dataset.

        Raises `CheckpointMismatchError` for a ref that is not in the dataset.
        """
        shards, rows = self.locate(self._indices(refs))
        self.store.request(rows if request else rows[:0])
        parts = shards.tolist(), rows.tolist(), refs["index"].tolist(), refs["epoch"].tolist()
        return list(map(Sample, repeat(self), *parts))

    def locate(self, indices: Rows) -> tuple[Rows, Rows]:
        """Return the shard numbers of samples, and their rows in the store."""
        shards = self.firsts.searchsorted(indices, "right") - 1
        return shards, self.store.rows(shards, indices - self.firsts[shards])

    def _indices(self, refs: RefArray) -> Rows:
        """Return the sample indices in these refs, without the tags."""
        indices = (refs["index"] & _INDEX_BITS).view(np.int64)
        if len(indices) and indices.max() >= self.count:
            raise CheckpointMismatchError(
                f"{self.address}: the state names sample {int(indices.max())} of {self.count}. Load it with its dataset"
            )
        return indices

    def manifest(self) -> list[list[Any]]:
        """Return name, number of samples and hash of each shard."""
        return self.entries.rows()

    def digest(self) -> bytes:
        """Hash the dataset to 16 bytes.

        The hash covers names, sample counts and digests of the shards, and the key column.
        """
        rows = [*self.manifest(), *([] if self.key_column is None else [self.key_column])]
        return hashlib.blake2b(msgspec.msgpack.encode(rows), digest_size=16).digest()

    @property
    def faults(self) -> list[tuple[str, str]]:
        """Return name and error of each shard that could not be fully indexed.

        An error of the whole dataset has no name.
        """
        return self._faults + [(self.entries.names[n], fault) for n, fault in sorted(self.entries.faults.items())]

    @cached_property
    def field_map(self) -> FieldMap:
        """Return the names that `dataset.yaml` gives to parts.

        Raises `ShardError` if the file is invalid.
        """
        return {} if self.root is None else read_field_map(self.root)

    def part_sizes(
        self, *, in_rows: bool = False, unread: list[ShardError] | None = None
    ) -> tuple[dict[str, Rows], int]:
        """Return the sizes of parts by extension, and the number of examined samples.

        All samples are examined if the index has the sizes. Otherwise, or with `in_rows`, about 1,000 evenly spread
        samples are read. Raises `ShardError`. If `unread` is passed, errors of samples with a missing file are added to
        it instead.
        """
        sizes = None if in_rows else self.store.part_sizes()
        if sizes is not None:
            return sizes, self.count
        found: dict[str, list[int]] = {}
        for shard, row in self.spread_rows():
            try:
                sizes_of_row = self.store.sizes(shard, row)
            except ShardError as error:
                if unread is None or error.reason != MISSING_FILE:
                    raise
                unread.append(error)
                continue
            for extension, size in sizes_of_row.items():
                found.setdefault(extension, []).append(size)
        return {extension: np.array(each, dtype=np.int64) for extension, each in found.items()}, len(self.spread_rows())

    def spread_rows(self) -> list[tuple[int, int]]:
        """Return shard and row of about 1,000 evenly spread samples, or of all."""
        examined = min(self.count, _EXAMINED)
        shards, rows = self.locate(np.arange(examined) * self.count // examined)
        return list(zip(shards.tolist(), rows.tolist(), strict=True))

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard relative to the root."""
        return self.entries.names[shard]

    def select(self, split: str | None, subset: Subset | None, *, in_order: bool = False) -> Selection | None:
        """Return the samples of a split and a subset, or None for all.

        Raises `ShardError`.

        `in_order` numbers them in the order in which the split lists its shards. Otherwise shards are sorted by name.
        """
        if split is None and subset is None:
            return None
        names = list(self.entries.names)
        endings = self.store.endings
        keys = [without_ending(name, endings) for name in names] if endings and subset is not None else names
        if split is None:
            return Selection(names, self.firsts, subset=subset, keys=keys)
        if self.root is None:
            raise ShardError(f"{self.address}: split={split!r}, but this dataset has no splits. Leave out split=")
        listing = read_split(self.root, split, names)
        excluded = self._rows_with(listing.excluded)
        if listing.unknown:
            log.warning("%s: not found, but named by `exclude`: %s", self.address, listed(listing.unknown))
        shards = listing.shards if in_order else sorted(listing.shards)
        return Selection(names, self.firsts, shards=shards, excluded=excluded, subset=subset, keys=keys)

    def all_keys(self) -> Iterator[str]:
        """Yield the key of each sample in order."""
        for shard in range(len(self.entries)):
            yield from self.keys_of(shard)

    def keys_of(self, shard: int) -> Iterator[str]:
        """Yield the key of each sample of one shard."""
        rows = self.locate(np.arange(self.firsts[shard], self.firsts[shard + 1]))[1]
        return (self.key(shard, row) for row in rows.tolist())

    def _rows_with(self, keys: Mapping[str, set[str]]) -> dict[str, Rows]:
        """Return the rows in each shard of the samples with these keys.

        The name of a shard maps to its keys, and in the result to its rows.
        """
        found: dict[str, Rows] = {}
        for shard, name in enumerate(self.entries.names if keys else ()):
            wanted = keys.get(name)
            if wanted:
                shard_keys = list(self.keys_of(shard))
                rows = [row for row, key in enumerate(shard_keys) if key in wanted]
                found[name] = np.array(rows, dtype=np.int64)
                if unknown := wanted.difference(shard_keys):
                    log.warning("%s: not found in %s, but named by `exclude`: %s", self.address, name, listed(unknown))
        return found
