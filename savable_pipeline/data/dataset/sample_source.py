"""`SampleSource`: what a sample reads its parts from.

A pickled sample reads them from a `DetachedSample`, which has copies of them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.shards.part_types import find_part, is_part
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES

if TYPE_CHECKING:
    from savable_pipeline.core.on_error import OnError, Quarantine
    from savable_pipeline.data.media.media_info import MediaInfo
    from savable_pipeline.data.shards.metadata import FieldMap


class SampleSource(Protocol):
    """Object that a sample reads its parts from.

    It is a `Dataset`, a `DetachedSample`, or `JoinedParts`. `source_names` has the names of the sources of a `Blend` by
    tag, for `Sample.source`.
    """

    @property
    def source(self) -> int: ...
    @property
    def unit(self) -> str: ...
    @property
    def source_names(self) -> Mapping[int, str]: ...
    @property
    def field_map(self) -> FieldMap: ...
    @property
    def on_error(self) -> OnError: ...
    @property
    def quarantine(self) -> Quarantine | None: ...
    @property
    def unpacked_bytes(self) -> int: ...
    def key(self, shard: int, row: int) -> str: ...
    def shard_name(self, shard: int) -> str: ...
    def offset(self, shard: int, row: int) -> int: ...
    def extensions(self, shard: int, row: int) -> list[str]: ...
    def has_part(self, shard: int, row: int, extension: str) -> bool: ...
    def read(self, shard: int, row: int, extension: str) -> bytes: ...
    def array(self, shard: int, row: int, extension: str) -> NDArray[Any]: ...
    def open(self, shard: int, row: int, extension: str) -> BinaryIO: ...
    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]: ...
    def media(self, shard: int, row: int, part: str, name: str) -> MediaInfo: ...


class DetachedSample(msgspec.Struct, eq=False):
    """Parts of a pickled sample, which it reads instead of its dataset."""

    source: int
    _key: str
    _shard: str
    _offset: int
    parts: dict[str, bytes]
    field_map: FieldMap = {}
    unit: str = "byte offset"
    source_names: dict[int, str] = {}
    unpacked_bytes: int = UNPACKED_BYTES
    on_error: ClassVar[Literal["raise"]] = "raise"
    quarantine: ClassVar[Quarantine | None] = None

    def key(self, shard: int, row: int) -> str:
        return self._key

    def shard_name(self, shard: int) -> str:
        return self._shard

    def offset(self, shard: int, row: int) -> int:
        return self._offset

    def extensions(self, shard: int, row: int) -> list[str]:
        return list(self.parts)

    def has_part(self, shard: int, row: int, extension: str) -> bool:
        return is_part(extension, self.parts)

    def read(self, shard: int, row: int, extension: str) -> bytes:
        return self.parts[find_part(extension, self.parts)]

    def array(self, shard: int, row: int, extension: str) -> NDArray[Any]:
        return np.frombuffer(bytearray(self.read(shard, row, extension)), np.uint8)

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        return io.BytesIO(self.read(shard, row, extension))

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        data = self.read(shard, row, extension)
        return data[:limit], len(data)

    def media(self, shard: int, row: int, part: str, name: str) -> MediaInfo:
        # imported here, because most samples need no media facts
        from savable_pipeline.data.media.media_info import media_info

        return media_info(self.open(shard, row, part), name, part)
