"""Summary of a run's shards in a state, and comparison with current shards.

    up to 1,024 shards    [[name, samples, digest], …]
    more                  {"shards": 2500, "samples": …, "last": name, "groups": 3 × 16 bytes, in base64}

The second form has a hash of each 1,024 shards in order: 16 kB for a million. Shards that are added at the end leave
earlier groups unchanged, so it still shows whether a dataset starts with the shards of a state.

`pin`: a run reads the shards that it started with, in each process, however late that opens them.

the trainer opens a, b           pinned: a b         (as in a state)
shard c is added
a new worker finds a, b, c       reads a, b          the pinned shards come first; c waits for the next start
a new worker finds a, c          an error            says that a shard is missing
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_128

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.shards.shard_list import Count, ShardList
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

GROUP = 1024
_HASH = 16  # bytes of a hash
_SHOWN = 5  # shards that a message lists before it only counts them

_Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[^\0]*\Z")]
Summary: TypeAlias = "list[list[Any]] | dict[str, Any]"  # plain values, as they are in a state


class _Groups(msgspec.Struct, frozen=True):
    shards: Count
    samples: Count
    last: str  # name of the last shard
    groups: bytes  # a hash of each 1,024 shards, and of the remaining ones

    def __post_init__(self) -> None:
        if len(self.groups) != -(-self.shards // GROUP) * _HASH:
            raise ValueError(f"{len(self.groups)} bytes of hashes of {self.shards} shards")


def summary(shards: ShardList) -> Summary:
    """Return the summary of these shards for a state."""
    if len(shards) <= GROUP:
        return shards.rows()
    found: dict[str, Any] = msgspec.to_builtins(_groups(shards))
    return found


def summary_type(saved: Any) -> Any:
    """Return the type to validate a summary of a state with `msgspec.convert`."""
    return _Groups if isinstance(saved, dict) else list[tuple[_Name, SavedCount, int]]


def count(saved: Summary) -> int:
    """Return the number of shards in a summary."""
    return len(saved) if isinstance(saved, list) else int(saved["shards"])


def sample_count(saved: Summary) -> int:
    """Return the number of samples of the shards in a summary."""
    return sum(int(row[1]) for row in saved) if isinstance(saved, list) else int(saved["samples"])


def starts_with(shards: ShardList, saved: Summary) -> bool:
    """Return whether the first of these shards are the saved ones."""
    if count(saved) > len(shards):
        return False
    return summary(shards.first(count(saved))) == saved


def difference(saved: Summary, shards: ShardList) -> str:
    """Describe how shards differ from the saved ones, as far as known."""
    if isinstance(saved, list):
        return _describe_by_name(saved, shards)
    old, new = count(saved), len(shards)
    if starts_with(shards, saved):
        return f"added: {_listing(shards.names[old : old + _SHOWN], new - old)}"
    if not new:
        return f"removed: all {old:,}"
    before, now = msgspec.convert(saved, _Groups).groups, _groups(shards).groups
    groups = range(len(before) // _HASH)
    hash_of = [slice(group * _HASH, (group + 1) * _HASH) for group in groups]
    first = GROUP * next((group for group in groups if before[hash_of[group]] != now[hash_of[group]]), 0)
    if first >= new:
        return f"removed: {old - new:,} after {shards.names[new - 1]}, up to {saved['last']}"
    last = min(first + GROUP, new) - 1
    return (
        f"of {old:,} saved and {new:,} here, the first that differ are among those from {shards.names[first]} to "
        f"{shards.names[last]}, numbers {first:,} to {last:,}: added, removed or rewritten there, or beside them"
    )


def pin(dataset: Dataset, name: str, pinned: PinnedShards) -> Dataset:
    """Return the dataset `name` with the pinned shards.

    If none are pinned, all its shards are pinned. Shards after all pinned ones are ignored with a warning. Raises
    `ShardError` for any other difference.
    """
    current = msgspec.msgpack.encode(summary(dataset.entries))
    pinned_summary = pinned.setdefault(name, current)
    if current == pinned_summary:
        return _with_pinned_media(dataset, name, pinned)
    known: Summary = msgspec.msgpack.decode(pinned_summary)
    if not starts_with(dataset.entries, known):
        raise ShardError(
            f"{dataset.address}: other shards than the {count(known):,} of this run. Restore them and move new ones "
            f"away\n{difference(known, dataset.entries)}\n"
            'Shards that sort after all old ones may join: allow={"shards"}',
            reason="changed shard",
        )
    known_count = count(known)
    log.warning(
        "%s: %d shards were added since this run started, from %s on, and are not read. To read them, restart and load "
        'the state with allow={"shards"}',
        dataset.address,
        len(dataset.entries) - known_count,
        dataset.entries.names[known_count],
    )
    return _with_pinned_media(dataset.first_shards(known_count), name, pinned)


def _with_pinned_media(dataset: Dataset, name: str, pinned: PinnedShards) -> Dataset:
    """Return the dataset with the media facts of the start of the run.

    Raises `ShardError` if they are gone.
    """
    known = dataset.known_media.settings()
    before = msgspec.msgpack.decode(pinned.setdefault(f"{name} media", msgspec.msgpack.encode(known)))
    if known and not before:  # a table was built after the start, and this run continues without it
        dataset.known_media = dataset.known_media.without_table()
    elif known != before:
        raise ShardError(
            f"{dataset.address}: the table of media was removed or changed during the run. Start again",
            reason="other media table",
        )
    return dataset


def _groups(shards: ShardList) -> _Groups:
    starts = range(0, len(shards), GROUP)
    hashes = b"".join(_hash(shards, start, min(start + GROUP, len(shards))) for start in starts)
    return _Groups(len(shards), int(shards.samples.sum()), shards.names[-1] if len(shards) else "", hashes)


def _hash(shards: ShardList, first: int, end: int) -> bytes:
    """Return a hash of the names, samples and digests of some shards in order."""
    hashed = xxh3_128(shards.names.between(first, end))
    hashed.update(np.ascontiguousarray(shards.samples[first:end], dtype="<i8").data)
    hashed.update(np.ascontiguousarray(shards.digests[first:end], dtype="<u8").data)
    return hashed.digest()


def _describe_by_name(saved: Sequence[Sequence[Any]], shards: ShardList) -> str:
    before = {name: content for name, *content in saved}
    now = {name: content for name, *content in shards.rows()}
    changes = {
        "added": sorted(now.keys() - before.keys()),
        "removed": sorted(before.keys() - now.keys()),
        "rewritten": sorted(name for name in now.keys() & before.keys() if now[name] != before[name]),
    }
    return "; ".join(f"{change}: {_listing(names[:_SHOWN], len(names))}" for change, names in changes.items() if names)


def _listing(names: Sequence[str], total: int) -> str:
    """Format `a, b, c, d, e and 7 more`."""
    return ", ".join(names) + (f" and {total - len(names):,} more" if total > len(names) else "")
