"""`JoinedParts`: where a joined sample reads from: its own dataset, and beside it samples of others, by name.

own sample      jpg, json                       sample["jpg"]
"captions"      txt                             sample["captions.txt"]
"latents"       npy                             sample["latents.npy"]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.dataset.sample_source import SampleSource
from savable_pipeline.errors import SavableError, ShardError

if TYPE_CHECKING:
    from savable_pipeline.core.on_error import OnError, Quarantine
    from savable_pipeline.data.media.media_info import MediaInfo
    from savable_pipeline.data.shards.metadata import FieldMap


class JoinedParts(msgspec.Struct, eq=False):
    """The parts of one sample. `others` has the joined samples by name; None: there is none with this key.

    `fault` is what kept the key from being read: raised where a joined part is asked for.
    """

    own: SampleSource
    others: Mapping[str, Sample | None]
    fault: SavableError | None = None

    @property
    def source(self) -> int:
        return self.own.source

    @property
    def names(self) -> Mapping[int, str]:
        return self.own.names

    @property
    def field_map(self) -> FieldMap:
        return self.own.field_map

    @property
    def on_error(self) -> OnError:
        return self.own.on_error

    @property
    def quarantine(self) -> Quarantine | None:
        return self.own.quarantine

    @property
    def unpacked_bytes(self) -> int:
        return self.own.unpacked_bytes

    def key(self, shard: int, row: int) -> str:
        return self.own.key(shard, row)

    def shard_name(self, shard: int) -> str:
        return self.own.shard_name(shard)

    @property
    def unit(self) -> str:
        return self.own.unit

    def offset(self, shard: int, row: int) -> int:
        return self.own.offset(shard, row)

    def extensions(self, shard: int, row: int) -> list[str]:
        """The sample's own, then those of each joined one behind its name."""
        if self.fault is not None:
            raise self.fault
        joined = [f"{name}.{part}" for name, other in self.others.items() if other is not None for part in other]
        return [*self.own.extensions(shard, row), *joined]

    def has_part(self, shard: int, row: int, extension: str) -> bool:
        try:
            found = self._joined(shard, row, extension)
        except KeyError:
            return False
        return self.own.has_part(shard, row, extension) if found is None else found[1] in found[0]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        found = self._joined(shard, row, extension)
        return self.own.read(shard, row, extension) if found is None else found[0][found[1]]

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.uint8]:
        found = self._joined(shard, row, extension)
        return self.own.array(shard, row, extension) if found is None else found[0].array(found[1])

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        found = self._joined(shard, row, extension)
        return self.own.open(shard, row, extension) if found is None else found[0].open(found[1])

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        found = self._joined(shard, row, extension)
        return self.own.head(shard, row, extension, limit) if found is None else found[0].head(found[1], limit)

    def media(self, shard: int, row: int, part: str, name: str) -> MediaInfo:
        found = self._joined(shard, row, part)
        return self.own.media(shard, row, part, name) if found is None else found[0].media(found[1])

    def _joined(self, shard: int, row: int, extension: str) -> tuple[Sample, str] | None:
        """The joined sample that has this part, and the part's name in it; None for a part of the sample's own.

        Raises KeyError if no joined sample has it, `ShardError` if the sample has a part of that name itself.
        """
        name, dot, part = extension.partition(".")
        if not dot or name not in self.others:
            return None
        if self.fault is not None:
            raise self.fault
        if any(extension.lower() == own.lower() for own in self.own.extensions(shard, row)):
            raise ShardError(
                f"the sample has a part {extension!r} of its own, which is also the name of a joined one: give the "
                "store another name in custom.Join",
                reason="joined part of the same name",
            )
        other = self.others[name]
        if other is None:
            raise KeyError(f"no part {extension!r}: {name!r} has no sample with this key")
        return other, part
