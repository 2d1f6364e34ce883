"""`check_same_data`: whether this rank reads the same shards as the others; none waits for another.

Ranks of an endless run do not communicate, so that one which opened the folder later, when a shard had been added,
would deal its lanes differently, unnoticed. The first rank to arrive writes its shards into the store of
torch.distributed; each other rank compares.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import msgspec
from xxhash import xxh3_128_hexdigest

from savable_pipeline.data.dataset.shard_digests import count
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.state.fingerprint import FingerprintHere

_DATA = ("shards", "joins", "exclude")  # settings of what is read, and what is left out


def check_same_data(ranks: Ranks, found: FingerprintHere) -> None:
    """Raise `CheckpointMismatchError` if an earlier rank of the same run reads other shards, or excludes others.

    Runs are distinguished by stages, seed and lanes, the last names of their folders, and how many such runs a rank
    began in its group. Raises what torch.distributed does where its store does not answer.
    """
    names = sorted(PurePosixPath(address).name for address in found.addresses.values())
    key = _digest([found.fields[name] for name in ("stages", "seed", "lanes")] + names)
    data = {name: value for name, value in sorted(found.fields.items()) if name.endswith(_DATA)}
    shards = sum(count(found.fields[name]) for name in found.shards)
    first = ranks.first_said(f"savable_pipeline/{key}", f"{_digest(data)} {ranks.rank} {shards}")
    digest, other, there = first.split()
    if digest != _digest(data):
        raise CheckpointMismatchError(
            f"rank {ranks.rank} found other shards than rank {other}, or another list to exclude: {shards} here, "
            f"{there} there, in {', '.join(sorted(set(found.addresses.values())))}: were some added, removed or "
            "rewritten between the starts of the ranks, or the list? Start all ranks again"
        )


def _digest(value: Any) -> str:
    return xxh3_128_hexdigest(msgspec.msgpack.encode(value))
