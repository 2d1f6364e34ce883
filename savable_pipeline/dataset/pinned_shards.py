"""`pin`: a run reads the shards that it began with, in each process that opens them, and however late that opens them.

the trainer opens a, b           pinned: a b         (8 bytes of a hash for each shard)
shard c is added
a new worker finds a, b, c       reads a, b          what was pinned comes first; c waits for the next start
a new worker finds a, c          an error            names c, and says that a shard is gone
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
from xxhash import xxh3_64_digest

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.core.wording import listed
from savable_pipeline.dataset.dataset import Dataset
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_HASH = 8  # bytes for each shard


def pin(dataset: Dataset, name: str, pinned: PinnedShards) -> Dataset:
    """The dataset `name` with the shards that are pinned; pins all that it has if none are.

    Shards that come after all pinned ones are left out, with a warning. Raises `ShardError` for any other difference.
    """
    here = b"".join(_hashes(dataset))
    known = pinned.setdefault(name, here)
    if here == known:
        return dataset
    count = len(known) // _HASH
    if not here.startswith(known):
        raise _differing(dataset, known)
    new = [entry.name for entry in dataset.entries[count:]]
    log.warning(
        "%s: %d shards were added since this run began, from %s on: it goes on without them. To read them, start "
        'again and load the state with allow={"shards"}',
        dataset.address,
        len(new),
        new[0],
    )
    return dataset.first_shards(count)


def _hashes(dataset: Dataset) -> Iterator[bytes]:
    encode = msgspec.msgpack.Encoder().encode
    for shard in dataset.manifest():
        yield xxh3_64_digest(encode(shard))


def _differing(dataset: Dataset, known: bytes) -> ShardError:
    before = {known[at : at + _HASH] for at in range(0, len(known), _HASH)}
    hashes = list(_hashes(dataset))
    new = [entry.name for entry, found in zip(dataset.entries, hashes, strict=True) if found not in before]
    gone = len(before.difference(hashes))
    added = f"{listed(new)} was added or rewritten" if new else "none was added"
    return ShardError(
        f"{dataset.address}: other shards than this run began with: {added}, and of the {len(before)} it began with "
        f"{gone} are not here as they were. Put back what it began with, and move new shards away; or start again: a "
        'state goes on with new shards that come after all old ones (allow={"shards"})',
        reason="changed shard",
    )
