"""`Sample`: mapping from extension to bytes that are read on access.

`JoinedParts`: the parts of a joined sample, from its own dataset and from samples of others, by name.

own sample      jpg, json                       sample["jpg"]
"captions"      txt                             sample["captions.txt"]
"latents"       npy                             sample["latents.npy"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray

from savable_pipeline.core.json_values import decoded_json
from savable_pipeline.data.dataset.decoding import (
    Box,
    Colour,
    PixelSize,
    convert_image,
    decode_part,
    decompress_part,
    field_value,
    image_region,
    npy_array,
)
from savable_pipeline.data.dataset.ref import TAG_SHIFT, Ref, tag_of, untagged
from savable_pipeline.data.dataset.sample_source import DetachedSample, SampleSource
from savable_pipeline.data.shards.byte_source import RangeFile, seconds_of
from savable_pipeline.data.shards.orientation import turned, with_orientation
from savable_pipeline.data.shards.part_types import (
    AUDIO_PARTS,
    IMAGE_PARTS,
    TEXT_PARTS,
    VIDEO_PARTS,
    open_image,
    part_type,
)
from savable_pipeline.errors import SavableError, ShardError

if TYPE_CHECKING:
    from PIL import Image

    from savable_pipeline.core.on_error import OnError, Quarantine
    from savable_pipeline.data.media.container import Audio
    from savable_pipeline.data.media.media_info import MediaInfo
    from savable_pipeline.data.media.video import Video
    from savable_pipeline.data.shards.metadata import FieldMap


OpenMedia = TypeVar("OpenMedia", "Video", "Audio")


class Sample(msgspec.Struct, gc=False, eq=False):
    """Read-only mapping from extension ("jpg") to bytes, read on access.

    The parts are the members of a tar, the columns of a table, or `json` and the fields of a line of JSONL. A null is
    not a part. Iteration names each part once. `[]` and `in` ignore the case of an extension, and also accept the
    column's name of an image. `.image()`, `.text()` and `.json()` decode the usual parts. `Sample.KINDS` has the
    extensions of an "image", a "video" and "audio". A missing part is a KeyError, an unreadable shard a `ShardError`,
    and a server that fails a `RemoteError`.

    Attributes:
        origin: The dataset that the parts are read from.
        index: The number of the sample in its dataset. The upper bits are the tag of its source in a `Blend`.
        epoch: The epoch in which the sample is read.

    Example:
        >>> sample = next(sp.TarShardReader("shards/", sp.Lane(), shuffle=False))
        >>> (sample.key, list(sample), sample["txt"])
        ('s000000', ['json', 'txt', 'png'], b'picture 0')
        >>> (sample.json(), sample.text(), sample.image().size)
        ({'id': 0}, 'picture 0', (8, 8))
    """

    KINDS: ClassVar[Mapping[str, tuple[str, ...]]] = {"image": IMAGE_PARTS, "video": VIDEO_PARTS, "audio": AUDIO_PARTS}

    origin: SampleSource
    _shard: int
    _row: int
    index: int
    epoch: int

    @property
    def key(self) -> str:
        """The name of the sample in its shard: its members' names up to their first dot."""
        return self.origin.key(self._shard, self._row)

    @property
    def shard(self) -> str:
        """The name of the shard, relative to the root of the dataset."""
        return self.origin.shard_name(self._shard)

    @property
    def offset(self) -> int:
        """Offset of the sample in its shard, in a tar of its first header in bytes.

        See `location` for the unit.
        """
        return self.origin.offset(self._shard, self._row)

    @property
    def location(self) -> str:
        """Offset of the sample with its unit: `byte offset 1024`, `row 17`."""
        return f"{self.origin.unit} {self.offset}"

    @property
    def ref(self) -> Ref:
        """ID of the sample, by which a resumed run reads it again."""
        return Ref(self.origin.source ^ tag_of(self.index) << TAG_SHIFT, self.epoch, untagged(self.index))

    @property
    def source(self) -> str:
        """Name of the sample's source in a `Blend`.

        It is "web", or "text/web" in nested ones, and "" without a blend.

        Example:
            >>> next(sp.Blend({"web": sp.TarShardReader("shards/", sp.Lane())})).source
            'web'
        """
        return self.origin.source_names.get(tag_of(self.index), "")

    def __getitem__(self, extension: str) -> bytes:
        return self.origin.read(self._shard, self._row, extension)

    def __iter__(self) -> Iterator[str]:
        return iter(self.origin.extensions(self._shard, self._row))

    def __len__(self) -> int:
        return len(self.origin.extensions(self._shard, self._row))

    def __contains__(self, extension: object) -> bool:
        return self.origin.has_part(self._shard, self._row, str(extension))

    def keys(self) -> list[str]:
        """Return the extensions, in the order of the tar."""
        return list(self)

    def values(self) -> list[bytes]:
        """Return the bytes of each part."""
        return [self[extension] for extension in self]

    def items(self) -> list[tuple[str, bytes]]:
        """Return extension and bytes of each part."""
        return [(extension, self[extension]) for extension in self]

    def get(self, extension: str, default: Any = None) -> Any:
        """Return the bytes of a part, or a default.

        Args:
            extension: The name of the part.
            default: Returned if the sample has no such part.
        """
        return self[extension] if extension in self else default  # noqa: SIM401

    def field(self, name: str) -> Any:
        """Return a field of the dataset's `field_map`.

        It is bytes, or a value inside JSON. The map is in `.nv-meta/dataset.yaml`.

        Args:
            name: The name of the field.

        Raises:
            KeyError: There is no such field, or the sample lacks its parts.
        """
        return field_value(self, self.origin.field_map, name)

    def array(self, extension: str) -> NDArray[Any]:
        """Return a part as a writable array: that of an `npy`, or raw uint8 (bytes,).

        Numbers have their own type: tokens of a `TokenReader` are (tokens,), a number of a column is (), and a list of
        numbers is (any, …). In a worker, the part is read directly into the memory of the batch. `sp.stack` of such
        arrays as tensors (`torch.from_numpy`) then copies nothing if their size in bytes is a multiple of 64.

        Args:
            extension: The name of the part.

        Raises:
            TypeError: The part is a column of other values, or of lists of different lengths. Use `json` for it.
            ValueError: The part is an `npy` of Python objects, which are never unpickled, or is truncated.
        """
        try:
            found = self.origin.array(self._shard, self._row, extension)
            is_npy = part_type(extension) == "npy" and found.dtype == np.uint8 and found[:6].tobytes() == MAGIC_PREFIX
            return npy_array(found.data) if is_npy else found
        except (ValueError, OSError) as error:
            self._add_note(error, extension)
            raise

    def open(self, part: str) -> BinaryIO:
        """Open a part as a seekable, read-only file.

        PyAV, torchcodec, soundfile and Pillow read such files.

        From a tar, only requested bytes are read. Other parts are read whole. One thread at a time may read the file.

        Args:
            part: The name of the part.

        Raises:
            KeyError: The sample has no such part.

        Example:
            >>> sample = next(sp.TarShardReader("shards/", sp.Lane(), shuffle=False))
            >>> with sample.open("png") as file:
            ...     (file.seek(1), file.read(3), file.seek(0, 2) == len(sample["png"]))
            (1, b'PNG', True)
        """
        return self.origin.open(self._shard, self._row, part)

    def head(self, extension: str, limit: int) -> tuple[bytes, int]:
        """Return the first bytes of a part, and the size of the part in bytes.

        Args:
            extension: The name of the part.
            limit: The largest number of bytes to return.
        """
        return self.origin.head(self._shard, self._row, extension, limit)

    def json(self, extension: str = "json") -> Any:
        """Decode a part as JSON.

        It has the results and errors of `json.loads`, at six times the speed.

        Args:
            extension: The name of the part; if it ends in `gz`, the part is decompressed first.
        """
        try:
            return decoded_json(decompress_part(extension, self[extension], self.origin.unpacked_bytes))
        except (ValueError, OSError) as error:
            self._add_note(error, extension)
            raise

    def text(self, extension: str | None = None) -> str:
        """Decode a part as UTF-8, without a byte order mark (U+FEFF).

        Args:
            extension: The name of the part; if it ends in `gz`, such as "txt.gz", the part is decompressed first. None:
                the first of txt, text, caption and md that the sample has.
        """
        part = extension or self._first_of(TEXT_PARTS)
        try:
            return decompress_part(part, self[part], self.origin.unpacked_bytes).decode("utf-8-sig")
        except (ValueError, OSError) as error:
            self._add_note(error, part)
            raise

    def image(
        self,
        part: str | None = None,
        *,
        mode: str | None = None,
        bits: int | None = None,
        at_least: PixelSize | Callable[[int, int], PixelSize] | None = None,
        box: Box | Callable[[int, int], Box] | None = None,
        background: Colour = "white",
        exif: bool = True,
    ) -> Image.Image:
        """Decode a part as an image, in full or only as much as needed.

        Photos are rotated according to EXIF.

        Args:
            part: The name of the part. None: the first of `Sample.KINDS["image"]` that the sample has.
            mode: Pillow's mode of the image. None: "RGB", but a gray image of 16 bits, 32 bits or floats is unchanged.
            bits: 8 reduces 16 bits per channel to 8, by v >> 8.
            at_least: Width and height that suffice for the box, or a function of the full image's width and height that
                returns them. A JPEG is then decoded at 1/2, 1/4 or 1/8 of its size if that is large enough.
            box: The region to return, (left, upper, right, lower) in pixels of the full image, or a function as above.
            background: The color behind an image with alpha, unless the mode has alpha, like "RGBA".
            exif: Turn and mirror the image by its EXIF orientation, as `PIL.ImageOps.exif_transpose` does. Sizes and
                boxes are then those of the turned image. False: the pixels as stored.

        Returns:
            The image. With `at_least` or `box`, it is the smallest image of whole pixels that covers the box, and
            `image.info["box"]` is the box in it: `image.resize(size, box=image.info["box"])`.

        Raises:
            ValueError: The box is empty or reaches beyond the image; or a `mode` of 8 bits would lose bits without
                `bits=8`, or is requested for floats.
            OSError: The image is damaged.
        """
        if bits not in (None, 8):
            raise ValueError(f"bits={bits!r}. Pass 8, or None to lose no bits")
        name = part or self._first_of(IMAGE_PARTS)
        try:
            opened = open_image(self[name], name)
            if at_least is None and box is None:
                return convert_image(turned(*with_orientation(opened, exif=exif)), mode, background, bits)
            return image_region(opened, mode, background, bits, at_least=at_least, box=box, exif=exif)
        except (ValueError, OSError) as error:
            self._add_note(error, name)
            raise

    def video(self, part: str | None = None) -> Video:
        """Open a part as a video, which reads and decodes only requested frames.

        Args:
            part: The name of the part, or of a range (`ranges=` of `custom.ParquetReader`), or of an archive of images,
                as in an episode of LeRobot without videos. None: the first video.

        Raises:
            MediaError: The part is damaged, or not a video.
            ImportError: PyAV, of the extra `media`, is not installed.
        """
        from savable_pipeline.data.media.video import ImageFrames, Video, is_archive

        name = part or self._first_of(VIDEO_PARTS)
        is_video = part_type(name) in VIDEO_PARTS
        if not is_video and not isinstance(file := self.open(name), RangeFile) and is_archive(file):
            return ImageFrames(file, self._name_of(name))
        return self._open_media(Video, name)

    def audio(self, part: str | None = None) -> Audio:
        """Open a part as audio, which reads and decodes only requested ranges.

        Args:
            part: The name of the part, which may be a range, or a video. None: the first audio part, or else video.

        Raises:
            MediaError: The part is damaged, or has no audio.
            ImportError: PyAV, of the extra `media`, is not installed.
        """
        from savable_pipeline.data.media.container import Audio

        return self._open_media(Audio, part or self._first_of((*AUDIO_PARTS, *VIDEO_PARTS)))

    def media(self, part: str | None = None) -> MediaInfo:
        """Return facts about a media part from its headers, without decoding.

        Width and height are those of the rotated image.

        If a table of `savable index --media` or Energon has the part, its headers are not read either.

        Args:
            part: The name of the part. None: the first video, audio or image.

        Raises:
            MediaError: The part is damaged, or not media.
            ShardError: The table is of other shards than the current ones.
            ImportError: PyAV, of the extra `media`, is not installed, and the part is not an image.

        Example:
            >>> info = next(sp.TarShardReader("shards/", sp.Lane(), shuffle=False)).media("png")
            >>> (info.width, info.height, info.duration_s)
            (8, 8, None)
        """
        name = part or self._first_of((*VIDEO_PARTS, *AUDIO_PARTS, *IMAGE_PARTS))
        return self.origin.media(self._shard, self._row, name, self._name_of(name))

    def decoded(self, *, exif: bool = True) -> dict[str, Any]:
        """Decode all parts, by the last component of their extension, and add `__key__`.

        json: as JSON; txt, text, caption, md, srt, vtt: str; an image: uint8 (height, width, 3), or a gray one of 16
        bits, 32 bits or floats (height, width); npy: an array; npz: a dict of arrays; any other: bytes. Nothing is
        unpickled. A malformed part raises the error of its decoder.

        Args:
            exif: Turn images by their EXIF orientation, as `image` does.

        Example:
            >>> sample = next(sp.TarShardReader("shards/", sp.Lane(), shuffle=False))
            >>> {name: getattr(value, "shape", value) for name, value in sample.decoded().items()}
            {'__key__': 's000000', 'json': {'id': 0}, 'txt': 'picture 0', 'png': (8, 8, 3)}
        """
        max_bytes = self.origin.unpacked_bytes
        values = {name: decode_part(name, data, max_bytes, exif=exif) for name, data in self.items()}
        return {"__key__": self.key, **values}

    def read_from(self, origin: SampleSource) -> Sample:
        """Return the same sample, which reads its parts from another origin.

        Stages that add parts use it.

        Args:
            origin: The object to read the parts from.
        """
        return Sample(origin, self._shard, self._row, self.index, self.epoch)

    def _open_media(self, kind: type[OpenMedia], part: str) -> OpenMedia:
        file = self.open(part)
        begin_s, end_s = seconds_of(file)
        return kind(file, self._name_of(part), begin_s=begin_s, end_s=end_s)

    def _name_of(self, part: str) -> str:
        return f"part {part!r} of {sample_name(self)}"

    def _add_note(self, error: ValueError | OSError, part: str) -> None:
        """Add a note that names the part to an error of decoding, as the last line of its traceback."""
        if getattr(error, "errno", None) is None:  # an error of the disk would fail again when the key is read
            error.add_note(f"in {self._name_of(part)}")

    def _first_of(self, extensions: tuple[str, ...]) -> str:
        for extension in extensions:
            if extension in self:
                return extension
        raise KeyError(f"{sample_name(self)} has none of {', '.join(extensions)}; it has {list(self)}")

    def __repr__(self) -> str:
        index = untagged(self.index)
        return f"Sample({self.key!r}, {list(self)}, shard={self.shard!r}, epoch={self.epoch}, index={index})"

    def __reduce__(self) -> Any:
        origin, names, parts = self.origin, {tag_of(self.index): self.source}, dict(self.items())
        facts = self.key, self.shard, self.offset, parts, origin.field_map, origin.unit, names, origin.unpacked_bytes
        # a `DetachedSample` ignores the numbers of shard and row, which are 0 here
        return Sample, (DetachedSample(origin.source, *facts), 0, 0, self.index, self.epoch)


Mapping.register(Sample)


class _JoinedPart(NamedTuple):
    """Part of a joined sample, by its name in that sample."""

    sample: Sample
    name: str


class JoinedParts(msgspec.Struct, eq=False):
    """Parts of one sample, its own ones, and of samples joined to it by key.

    `own` is the origin of its own parts. `others` has the joined samples by name of their dataset, and None for a
    dataset without this key.

    `fault` is the error of reading the sample's key. It is raised when a joined part is requested. `skips` says whether
    samples that lack a joined sample are skipped.
    """

    own: SampleSource
    others: Mapping[str, Sample | None]
    fault: SavableError | None = None
    skips: bool = False

    @property
    def absent(self) -> str:
        """Reason to skip the sample, because a dataset lacks its key, or ""."""
        lacking = [name for name, other in self.others.items() if other is None]
        if lacking and self.skips and self.fault is None:
            return f"no such key in {lacking[0]}"
        return self.own.absent if isinstance(self.own, JoinedParts) else ""

    @property
    def source(self) -> int:
        return self.own.source

    @property
    def source_names(self) -> Mapping[int, str]:
        return self.own.source_names

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
        """Return the sample's own extensions, then those of joined samples.

        The latter have the name of the joined dataset as prefix.
        """
        if self.fault is not None:
            raise self.fault
        joined = [f"{name}.{part}" for name, other in self.others.items() if other is not None for part in other]
        return [*self.own.extensions(shard, row), *joined]

    def has_part(self, shard: int, row: int, extension: str) -> bool:
        try:
            found = self._find_joined(shard, row, extension)
        except KeyError:
            return False
        return self.own.has_part(shard, row, extension) if found is None else found.name in found.sample

    def read(self, shard: int, row: int, extension: str) -> bytes:
        found = self._find_joined(shard, row, extension)
        return self.own.read(shard, row, extension) if found is None else found.sample[found.name]

    def array(self, shard: int, row: int, extension: str) -> NDArray[np.uint8]:
        found = self._find_joined(shard, row, extension)
        return self.own.array(shard, row, extension) if found is None else found.sample.array(found.name)

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        found = self._find_joined(shard, row, extension)
        return self.own.open(shard, row, extension) if found is None else found.sample.open(found.name)

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        found = self._find_joined(shard, row, extension)
        return self.own.head(shard, row, extension, limit) if found is None else found.sample.head(found.name, limit)

    def media(self, shard: int, row: int, part: str, name: str) -> MediaInfo:
        found = self._find_joined(shard, row, part)
        return self.own.media(shard, row, part, name) if found is None else found.sample.media(found.name)

    def _find_joined(self, shard: int, row: int, extension: str) -> _JoinedPart | None:
        """Return the joined part that `extension` names, such as "captions.txt", or None for an own part.

        Raises KeyError if there is no joined sample, and `ShardError` if the sample also has an own part of that name.
        """
        name, dot, part = extension.partition(".")
        if not dot or name not in self.others:
            return None
        if self.fault is not None:
            raise self.fault
        if any(extension.lower() == own.lower() for own in self.own.extensions(shard, row)):
            raise ShardError(
                f"the sample has a part {extension!r}, as the joined store has. Rename the store in custom.Join",
                reason="joined part of the same name",
            )
        if (other := self.others[name]) is None:
            raise KeyError(f"no part {extension!r}: {name!r} has no sample with this key")
        return _JoinedPart(other, part)


def sample_name(sample: Sample) -> str:
    """Return a sample's key and, except in a folder, its shard, for messages."""
    try:
        key = repr(sample.key)
    except (SavableError, OSError):  # the header with the key may be unreadable too
        key = "?"
    return f"sample {key}" + (f" of {sample.shard}" if sample.shard != "." else "")
