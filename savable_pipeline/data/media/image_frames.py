"""`ImageFrames`: frames that are images in a ZIP archive, read as a video.

000000.png, 000001.png, …      in the order of the frames, not compressed
comment of the archive "10"    frames per second
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from fractions import Fraction
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.media.container import LATE
from savable_pipeline.data.media.video import Video
from savable_pipeline.data.shards.part_types import eight_bits, open_image
from savable_pipeline.errors import MediaError

_MAGIC = b"PK\3\4"


def is_archive(file: BinaryIO) -> bool:
    """Return whether a file is a ZIP archive with something in it.

    Its position is reset to 0.
    """
    head = file.read(len(_MAGIC))
    file.seek(0)
    return head == _MAGIC


class ImageFrames(Video):
    """Frames of an archive of images, with the interface of `Video`.

    Raises `MediaError` for a damaged archive.

    Raises `MediaError` for an archive that is damaged.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name, self.codec = name, "images"
        try:
            self._images = zipfile.ZipFile(file)
            self._rate = Fraction(self._images.comment.decode() or "1")
            self._names = self._images.namelist()
            with open_image(self._images.read(self._names[0])) as first:
                self.size = first.size
        except (ValueError, OSError, zipfile.BadZipFile, IndexError) as error:
            raise MediaError(f"{name}: not an archive of images ({error}). Write it again") from error

    @property
    def fps(self) -> float:
        """Number of frames per second."""
        return float(self._rate)

    @property
    def frame_count(self) -> int:
        """Number of frames."""
        return len(self._names)

    @property
    def duration_s(self) -> float:
        """Number of frames divided by their rate, in seconds."""
        return float(len(self._names) / self._rate)

    def frames(self, times_s: Sequence[float], *, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """See `Video.frames`; resized by Pillow, bicubic."""
        for time in times_s:
            if not 0 <= time <= self.duration_s + LATE:
                raise ValueError(f"{self.name}: no frame at {time} s; the images last {self.duration_s} s")
        return self.frames_by_index([self._index_at(time) for time in times_s], size=size)

    def frames_by_index(self, indices: Sequence[int], *, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """See `Video.frames_by_index`."""
        width, height = size or self.size
        frames = np.empty((len(indices), 3, height, width), np.uint8)
        for position, index in enumerate(indices):
            if not 0 <= index < len(self._names):
                raise IndexError(f"{self.name}: no frame {index}; there are {len(self._names)}")
            frames[position] = self._decoded(index, size)
        return frames

    def keyframe_at(self, time_s: float) -> float:
        """See `Video.keyframe_at`: each image is a keyframe."""
        return float(self._index_at(time_s) / self._rate)

    def restart_at(self, time_s: float) -> None:
        """See `Video.restart_at`: no image needs another one."""

    def close(self) -> None:
        """Close the archive. The file stays open."""
        self._images.close()

    def _index_at(self, time_s: float) -> int:
        return min(int((Fraction(float(time_s)) + LATE) * self._rate), len(self._names) - 1)

    def _decoded(self, index: int, size: tuple[int, int] | None) -> NDArray[np.uint8]:
        """Decode one image to uint8 (3, height, width)."""
        try:
            with open_image(self._images.read(self._names[index])) as image:
                shown = eight_bits(image, None).convert("RGB")
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise MediaError(f"{self.name}: its frame {index} cannot be decoded: {error}") from error
        if size is None and shown.size != self.size:
            found, first = (f"{width} × {height} pixels" for width, height in (shown.size, self.size))
            raise MediaError(f"{self.name}: a frame of {found} in a video of {first}. Pass size=, or drop it")
        return np.array(shown if size is None else shown.resize(size)).transpose(2, 0, 1)
