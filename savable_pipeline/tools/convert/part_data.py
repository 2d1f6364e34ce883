"""Bytes of a part.

Those of long audio and video are read in pieces, and never in memory whole.
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.data.media.media_info import media_info
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, VIDEO_PARTS, decode_error, part_type
from savable_pipeline.errors import MediaError
from savable_pipeline.tools.convert.source import changed

_MEDIA = frozenset((*VIDEO_PARTS, *AUDIO_PARTS))
_LONG = 8 << 20  # bytes; longer audio or video is read in pieces
_PIECE = 1 << 20  # bytes


@dataclass
class LongPart:
    """The `size` bytes of the file that `open` opens, read in pieces."""

    open: Callable[[], BinaryIO]
    size: int
    name: str  # name of the file, for messages
    digest: int | None = None  # hash of the bytes, once they were read

    def __len__(self) -> int:
        return self.size

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in order. Raises `SavableError` if the file is shorter."""
        digest = xxh3_64()
        with self.open() as file:
            for start in range(0, self.size, _PIECE):
                wanted = min(_PIECE, self.size - start)
                piece = file.read(wanted)
                if len(piece) != wanted:
                    raise changed(self.name, f"expected {self.size} bytes, found {start + len(piece)}")
                digest.update(piece)
                yield piece
        self.digest = digest.intdigest()


PartData: TypeAlias = bytes | LongPart


def content_hash(data: PartData) -> int:
    """Return a hash of the bytes of a part. It reads a `LongPart` that was not read."""
    if isinstance(data, bytes):
        return xxh3_64_intdigest(data)
    if data.digest is None:
        deque(data.chunks(), maxlen=0)
    return data.digest or 0


def file_data(path: Path, extension: str, size: int) -> PartData:
    """Return a file of this size as a part.

    Raises `SavableError` if it has another size, OSError.
    """
    with path.open("rb", buffering=0) as file:
        if is_long(extension, size) and os.fstat(file.fileno()).st_size == size:
            return LongPart(lambda: path.open("rb"), size, str(path))
        data = file.read()
    if len(data) != size:
        raise changed(path, f"expected {size} bytes, found {len(data)}")
    return data


def is_long(extension: str, size: float = float("inf")) -> bool:
    """Return whether a part of this size in bytes is read in pieces.

    Without a size, it is whether a part of any size is.
    """
    return size > _LONG and part_type(extension) in _MEDIA


def data_fault(extension: str, data: PartData, *, check_images: bool) -> str:
    """Return why the bytes of a part do not fit its extension, or "".

    The form is `reason: detail`. With `check_images`, images are decoded, and the headers of audio and video are read
    if PyAV is installed.
    """
    if isinstance(data, bytes) and (fault := decode_error(extension, data, check_images=check_images)):
        return fault
    if not check_images or part_type(extension) not in _MEDIA or importlib.util.find_spec("av") is None:
        return ""
    try:
        with io.BytesIO(data) if isinstance(data, bytes) else data.open() as file:
            media_info(file, "", extension)
    except MediaError as error:
        return f"unreadable media: {str(error).removeprefix(': ')}"
    return ""
