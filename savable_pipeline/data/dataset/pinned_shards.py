"""`pin`: a run reads the shards that it began with, in each process that opens them, and however late that opens them.

the trainer opens a, b           pinned: a b         (as a state keeps them, see shard_digests.py)
shard c is added
a new worker finds a, b, c       reads a, b          what was pinned comes first; c waits for the next start
a new worker finds a, c          an error            names c, and says that a shard is gone
"""

from __future__ import annotations

import logging

import msgspec

from savable_pipeline.core.lane import PinnedShards
from savable_pipeline.data.dataset import shard_digests
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)


def pin(dataset: Dataset, name: str, pinned: PinnedShards) -> Dataset:
    """The dataset `name` with the shards that are pinned; pins all that it has if none are.

    Shards that come after all pinned ones are left out, with a warning. Raises `ShardError` for any other difference.
    """
    here = msgspec.msgpack.encode(shard_digests.summary(dataset.entries))
    packed = pinned.setdefault(name, here)
    if here == packed:
        return _with_media(dataset, name, pinned)
    known: shard_digests.Summary = msgspec.msgpack.decode(packed)
    if not shard_digests.begin_with(dataset.entries, known):
        raise _differing(dataset, known)
    count = shard_digests.count(known)
    log.warning(
        "%s: %d shards were added since this run began, from %s on: it goes on without them. To read them, start "
        'again and load the state with allow={"shards"}',
        dataset.address,
        len(dataset.entries) - count,
        dataset.entries.names[count],
    )
    return _with_media(dataset.first_shards(count), name, pinned)


def _with_media(dataset: Dataset, name: str, pinned: PinnedShards) -> Dataset:
    """The dataset with what was known of its media when the run began. Raises `ShardError` where that is gone."""
    known = dataset.known_media.settings()
    before = msgspec.msgpack.decode(pinned.setdefault(f"{name} media", msgspec.msgpack.encode(known)))
    if known and not before:  # a table was made since: this run goes on without it
        dataset.known_media = dataset.known_media.untabled()
    elif known != before:
        raise ShardError(
            f"{dataset.address}: the table of media was removed or changed since this run began: start again",
            reason="other media table",
        )
    return dataset


def _differing(dataset: Dataset, known: shard_digests.Summary) -> ShardError:
    return ShardError(
        f"{dataset.address}: other shards than the {shard_digests.count(known):,} that this run began with: "
        f"{shard_digests.difference(known, dataset.entries)}. Put back what it began with, and move new shards away; "
        'or start again: a state goes on with new shards that come after all old ones (allow={"shards"})',
        reason="changed shard",
    )
