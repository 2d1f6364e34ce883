"""A part on its way into a shard: its bytes, or a long file of sound or film that is never in memory as a whole."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from savable_pipeline.data.media.media_info import media_info
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, VIDEO_PARTS, decode_error, part_type
from savable_pipeline.errors import MediaError, SavableError

_MEDIA = frozenset((*VIDEO_PARTS, *AUDIO_PARTS))
_LONG = 8 << 20  # bytes of sound or film that are read in pieces
_PIECE = 1 << 20


@dataclass(frozen=True, eq=False)
class LongPart:
    """`size` bytes from `offset` on of what `open` gives, read in pieces. Equal to another with the same bytes."""

    open: Callable[[], BinaryIO]
    offset: int
    size: int
    name: str  # of the file, for messages

    def __len__(self) -> int:
        return self.size

    def chunks(self) -> Iterator[bytes]:
        """The bytes in order. Raises `SavableError` if the file ends before them."""
        with self.open() as file:
            file.seek(self.offset)
            for begin in range(0, self.size, _PIECE):
                wanted = min(_PIECE, self.size - begin)
                piece = file.read(wanted)
                if len(piece) != wanted:
                    raise changed(self.name, f"expected {self.size} bytes, found {begin + len(piece)}")
                yield piece

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LongPart) or self.size != other.size:
            return False
        return all(one == another for one, another in zip(self.chunks(), other.chunks(), strict=True))

    __hash__ = None  # type: ignore[assignment]


PartData: TypeAlias = bytes | LongPart
Parts: TypeAlias = Mapping[str, PartData]


def changed(path: Path | str, found: str) -> SavableError:
    """The error for a file that is not what the plan was made from."""
    return SavableError(
        f"{path}: {found}: it changed during the conversion. Do not change the input, and convert into another folder"
    )


def file_data(path: Path, extension: str, size: int) -> PartData:
    """A file of this size as a part. Raises `SavableError` if it has another, OSError."""
    with path.open("rb", buffering=0) as file:
        if is_long(extension, size) and os.fstat(file.fileno()).st_size == size:
            return LongPart(lambda: path.open("rb"), 0, size, str(path))
        data = file.read()
    if len(data) != size:
        raise changed(path, f"expected {size} bytes, found {len(data)}")
    return data


def is_long(extension: str, size: int) -> bool:
    """Whether a part of this size is read in pieces."""
    return size > _LONG and part_type(extension) in _MEDIA


def data_fault(extension: str, data: PartData, *, check_images: bool) -> str:
    """Why a part is not of the type that its extension says, as `reason: detail`; empty if it is.

    With `check_images` images are decoded, and the headers of sounds and films read where PyAV is installed.
    """
    if isinstance(data, bytes) and (fault := decode_error(extension, data, check_images=check_images)):
        return fault
    if not check_images or part_type(extension) not in _MEDIA or importlib.util.find_spec("av") is None:
        return ""
    try:
        with _opened(data) as file:
            media_info(file, "", extension)
    except MediaError as error:
        return f"unreadable media: {str(error).removeprefix(': ')}"
    return ""


def _opened(data: PartData) -> BinaryIO:
    return io.BytesIO(data) if isinstance(data, bytes) else data.open()
