"""`Ref` and `Sample`: where an item comes from, and a sample's parts, read when they are asked for."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from savable_pipeline.dataset import Dataset
    from savable_pipeline.nv_meta import FieldMap
    from savable_pipeline.on_error import Quarantine

# A ref before a sample is made of it: 12 bytes, so that a large buffer stays small in memory and in a state.
REF = np.dtype([("index", "<u8"), ("epoch", "<u4")])
RefArray: TypeAlias = NDArray[np.void]
# The upper bits of an index are the tag of its source in a `Blend`: 15 of them, so that it fits a signed integer.
TAG_SHIFT = 48
TAGS = 1 << 15

IMAGE_PARTS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff", "tif", "ppm")
TEXT_PARTS = ("txt", "text", "caption", "md")


class Ref(NamedTuple):
    """Where an item comes from: enough to make it again, identically.

    `source` is a stable hash of the source's name, `index` counts the samples of the whole dataset, `part` counts
    what a fan-out encoder makes of one sample.
    """

    source: int
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no one needs here
    part: int = 0


def tag_of(index: int) -> int:
    """The tag of the source in the index of a ref; 0 where there is no `Blend`."""
    return index >> TAG_SHIFT


def untagged(index: int) -> int:
    """The index of a ref in its own dataset."""
    return index & ((1 << TAG_SHIFT) - 1)


class Sample(msgspec.Struct, gc=False, eq=False):
    """A read-only mapping from extension ("jpg", "json") to bytes; each part is read when it is asked for.

    Look-up minds no case. `.image()`, `.text()` and `.json()` decode the usual parts.
    """

    _dataset: Dataset | DetachedSample
    _shard: int
    _row: int
    _index: int
    _epoch: int

    @property
    def key(self) -> str:
        """The name of the sample in its shard: what its members' names share before their first dot."""
        return self._dataset.key(self._shard, self._row)

    @property
    def shard(self) -> str:
        """The name of the shard, relative to the root of the dataset."""
        return self._dataset.shard_name(self._shard)

    @property
    def offset(self) -> int:
        """The offset in bytes of the sample's first header in its shard."""
        return self._dataset.offset(self._row)

    @property
    def ref(self) -> Ref:
        """Where the sample comes from."""
        return Ref(self._dataset.source ^ tag_of(self._index) << TAG_SHIFT, self._epoch, untagged(self._index))

    def __getitem__(self, extension: str) -> bytes:
        return self._dataset.read(self._shard, self._row, extension)

    def __iter__(self) -> Iterator[str]:
        return iter(self._dataset.extensions(self._row))

    def __len__(self) -> int:
        return len(self._dataset.extensions(self._row))

    def __contains__(self, extension: object) -> bool:
        return any(str(extension).lower() == known.lower() for known in self)

    def keys(self) -> list[str]:
        """The extensions, in the order of the tar."""
        return list(self)

    def values(self) -> list[bytes]:
        """The bytes of each part."""
        return [self[extension] for extension in self]

    def items(self) -> list[tuple[str, bytes]]:
        """Extension and bytes of each part."""
        return [(extension, self[extension]) for extension in self]

    def get(self, extension: str, default: Any = None) -> Any:
        """The bytes of a part, or `default` where there is none."""
        return self[extension] if extension in self else default  # noqa: SIM401

    def field(self, name: str) -> Any:
        """What the dataset's `field_map`, in `.nv-meta/dataset.yaml`, calls `name`: bytes, or a value in some JSON."""
        options = self._dataset.field_map.get(name)
        if options is None:
            known = ", ".join(self._dataset.field_map) or "none; it has no field_map"
            raise KeyError(f"no field {name!r}; the dataset has {known}")
        for part, *path in options:
            if part in self:
                value: Any = decoded_json(self[part]) if path else self[part]
                for step in path:
                    value = value[int(step)] if isinstance(value, list) else value[step]
                return value
        raise KeyError(f"the field {name!r} lies in {[part for part, *_ in options]}; the sample has {list(self)}")

    def array(self, extension: str) -> NDArray[np.uint8]:
        """The bytes of a part as a writable array, uint8 (bytes,), for raw data that needs no decoding.

        In a worker it is read straight to where batches are made, and `sp.stack` of such arrays as tensors
        (`torch.from_numpy`) need not copy them, if their size in bytes is a multiple of 64.
        """
        return self._dataset.array(self._shard, self._row, extension)

    def json(self, extension: str = "json") -> Any:
        """The part decoded as JSON: what `json.loads` gives, and raises, in a sixth of its time."""
        return decoded_json(self[extension])

    def text(self, extension: str | None = None) -> str:
        """The part decoded as UTF-8; by default the first of txt, text, caption and md that is there."""
        return self[extension or self._first(TEXT_PARTS)].decode()

    def image(self, extension: str | None = None, mode: str = "RGB") -> Image.Image:
        """The part decoded as an image of this mode; by default the first image part that is there."""
        return Image.open(io.BytesIO(self[extension or self._first(IMAGE_PARTS)])).convert(mode)

    def _first(self, extensions: tuple[str, ...]) -> str:
        for extension in extensions:
            if extension in self:
                return extension
        raise KeyError(f"sample {self.key!r} of {self.shard} has none of {', '.join(extensions)}; it has {list(self)}")

    def __repr__(self) -> str:
        index = untagged(self._index)
        return f"Sample({self.key!r}, {list(self)}, shard={self.shard!r}, epoch={self._epoch}, index={index})"

    def __reduce__(self) -> Any:
        data = self._dataset
        detached = DetachedSample(data.source, self.key, self.shard, self.offset, dict(self.items()), data.field_map)
        return Sample, (detached, 0, 0, self._index, self._epoch)


Mapping.register(Sample)


class DetachedSample(msgspec.Struct, eq=False):
    """Stands in for the dataset under a sample that left its process: the parts themselves."""

    source: int
    _key: str
    _shard: str
    _offset: int
    parts: dict[str, bytes]
    field_map: FieldMap = {}
    on_error: ClassVar[Literal["raise"]] = "raise"
    quarantine: ClassVar[Quarantine | None] = None

    def key(self, shard: int, row: int) -> str:
        return self._key

    def shard_name(self, shard: int) -> str:
        return self._shard

    def offset(self, row: int) -> int:
        return self._offset

    def extensions(self, row: int) -> list[str]:
        return list(self.parts)

    def read(self, shard: int, row: int, extension: str) -> bytes:
        return self.parts[matching(extension, self.parts)]

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.uint8]:
        return np.frombuffer(bytearray(self.read(shard, row, extension)), np.uint8)

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        data = self.read(shard, row, extension)
        return data[:limit], len(data)


_decoded = msgspec.json.Decoder().decode


def decoded_json(raw: bytes) -> Any:
    """What `json.loads` makes of it. What msgspec refuses, such as NaN and lone surrogates, is left to that."""
    try:
        return _decoded(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(raw)


def matching(extension: str, known: Mapping[str, Any]) -> str:
    """The one of `known` that equals `extension` but for case. Raises KeyError that lists what there is."""
    for candidate in known:
        if candidate.lower() == extension.lower():
            return candidate
    raise KeyError(f"no part {extension!r}; the sample has {', '.join(known)}")
