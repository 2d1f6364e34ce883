"""`Video`: frames of a video by time or index, equal to those of a full decode."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.media.container import (
    LATE,
    MediaStream,
    displayed_frames,
    is_mp4,
    is_quarter_turned,
    media_errors,
    pyav,
    restoring_position,
)
from savable_pipeline.data.shards.byte_source import RangeFile
from savable_pipeline.data.shards.part_types import eight_bits, open_image
from savable_pipeline.errors import MediaError

_MOST_PIXELS = 1 << 26  # most pixels of a frame: 8192 × 8192
_NEAR_S = Fraction(1, 2)  # seconds that are decoded instead of sought, because seeking costs as much
_FORWARD_S = 4  # seconds that are decoded instead of sought, if there is no index of seek points


class Video(MediaStream):
    """Video stream of a seekable file; `sample.video()` opens one.

    Args:
        file: A binary file that can be read and sought, and that stays open.
        name: The file's name in messages.
        begin_s: Where the range starts in the file, in seconds.
        end_s: Where the range ends. None (default): at the end of the file.

    Raises:
        MediaError: The file has no video, or is damaged.
        ImportError: PyAV is not installed.

    Example:
        >>> video = sample.video("mp4")  # doctest: +SKIP
        >>> video.duration_s, video.fps, video.size  # doctest: +SKIP
        (10.0, 30.0, (640, 360))
        >>> video.frames([0.0, 2.5], size=(224, 224)).shape  # doctest: +SKIP
        (2, 3, 224, 224)
    """

    kind = "video"

    def __init__(self, file: BinaryIO, name: str, *, begin_s: float = 0.0, end_s: float | None = None) -> None:
        super().__init__(file, name, begin_s=begin_s, end_s=end_s)
        self.size = display_size(self._container, self._stream, file)
        if not 0 < self.size[0] * self.size[1] <= _MOST_PIXELS:
            self.close()
            raise MediaError(f"{name}: unsupported frames of {self.size[0]} × {self.size[1]} pixels")
        fps = file.fps if isinstance(file, RangeFile) else None
        # For an episode, whose metadata lists each frame. None for other videos.
        self._listed_fps = None if fps is None else Fraction(fps)
        self._current: Any = None  # the frame of the last requested time; None before the first one
        self._next: Any = None  # the frame after it; None at the end
        self._decoder: Iterator[Any] = iter(())
        self._start_entry: int | None = None  # index entry where decoding started; None without a complete index

    @property
    def fps(self) -> float:
        """Average number of frames per second."""
        return float(frame_rate(self._stream) or 0)

    @property
    def frame_count(self) -> int | None:
        """Number of frames that are displayed, by the header, or None.

        For a range of a file, it is None.
        """
        return None if self._is_range else displayed_frames(self._container, self._stream)

    def frames(self, times_s: Sequence[float], *, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """Decode the frame that is on display at each of these times.

        Args:
            times_s: Seconds from the start, in any order. They are decoded in one pass in ascending order.
            size: Width and height to resize to, bicubic. None (default): no resizing.

        Returns:
            uint8 (frames, 3, height, width), RGB.

        Raises:
            ValueError: A time is before 0 or after the end.
            MediaError: The video is damaged, or ends before its header says.
        """
        for time in times_s:
            if not 0 <= time <= self._duration + LATE:
                raise ValueError(f"{self.name}: no frame at {time} s; the video lasts {self.duration_s} s")
        if (rate := self._listed_fps) is not None:
            last = round(self._duration * rate) - 1
            indices = [min(int((Fraction(float(time)) + LATE) * rate), last) for time in times_s]
            return self.frames_by_index(indices, size=size)
        return self._frames_at([self._nearest_tick(float(time)) for time in times_s], size)

    def frames_by_index(self, indices: Sequence[int], *, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """Decode frames by index, from 0.

        Args:
            indices: Indices of frames, in any order. Unless the container's index says that all frames have the same
                duration, all packets are read once to find them.
            size: Width and height to resize to. None (default): no resizing.

        Returns:
            uint8 (frames, 3, height, width), RGB.

        Raises:
            IndexError: There is no such frame.
            MediaError: The video is damaged.
        """
        rate = self._listed_fps
        count = len(self._frame_ticks) if rate is None else round(self._duration * rate)
        if not all(0 <= index < count for index in indices):
            raise IndexError(f"{self.name}: no frame {max(indices)}; there are {count}")
        if rate is None:
            return self._frames_at([self._frame_ticks[index] for index in indices], size)
        # Take the middle of a frame's time, because joined files have times that are early or late.
        return self._frames_at([self._ticks((index + Fraction(1, 2)) / rate) for index in indices], size)

    def frame_times(self) -> NDArray[np.float64]:
        """Return the start of each frame, in ascending seconds.

        Nothing is decoded, but packets may be read.
        """
        return np.array([float(self._time(ticks)) for ticks in self._frame_ticks])

    def keyframe_at(self, time_s: float) -> float:
        """Return the last seek point at or before a time, or the first one.

        Args:
            time_s: Seconds from the start.

        Returns:
            Its time, in seconds; 0 if it is before the start.
        """
        self._seek(self._nearest_tick(float(time_s)))
        return max(0.0, float(self._time(self._current.pts)))

    def restart_at(self, time_s: float) -> None:
        """Decode the next frames as if nothing had been decoded before.

        Whether damage before this time raises an error then does not depend on earlier requests.

        Args:
            time_s: The time of the next frame, in seconds.
        """
        if (entry := self._seek_entry_at(self._nearest_tick(float(time_s)))) is None:
            self._reopen()
        if entry is None or entry != self._start_entry:
            self._decoder, self._current = iter(()), None

    def _seek_entry_at(self, ticks: int) -> int | None:
        """Return the index entry from which decoding starts for a time.

        Without an index of all frames, return None.
        """
        entries = self._stream.index_entries
        is_complete = is_mp4(self._container) and len(entries) == self._stream.frames
        return entries.search_timestamp(ticks) if is_complete else None

    @cached_property
    def _frame_ticks(self) -> Sequence[int]:
        """Return the time of each frame of the range, in ticks."""
        begin = self._first_tick(Fraction(0))
        end = None if self._to_file_end else self._first_tick(self._duration)
        ticks = self._even_ticks() or [time for time, _ in self._packet_times()]
        self._decoder, self._current = iter(()), None
        return [time for time in ticks if time >= begin and (end is None or time < end)]

    def _first_tick(self, time: Fraction) -> int:
        """Return the first tick of a range that starts at this time or a little later."""
        late = LATE if self._counts_frames else max(self._stream.time_base / 2, LATE)
        return ceil((self._origin + time - late) / Fraction(self._stream.time_base))

    def _even_ticks(self) -> Sequence[int] | None:
        """Return the times of all frames, if the index has all of them at equal distances."""
        entries, first = self._stream.index_entries, self._stream.start_time
        if not is_mp4(self._container) or len(entries) < 2 or len(entries) != self._stream.frames or first is None:
            return None
        ticks = np.array([entry.timestamp for entry in entries if not entry.is_discard])
        step = int(ticks[1] - ticks[0])
        if len(ticks) != len(entries) or step <= 0 or (np.diff(ticks) != step).any():
            return None
        return range(first, first + step * len(ticks), step)

    def _frames_at(self, ticks: list[int], size: tuple[int, int] | None) -> NDArray[np.uint8]:
        """Return the frames at these ticks: uint8 (ticks, 3, height, width)."""
        width, height = self.size if size is None else size
        if not (width > 0 and height > 0):
            raise ValueError(f"size must be at least 1 × 1, not {width} × {height}")
        # This is no batch memory, because a frame in a shuffle buffer or a pack would keep a whole batch alive.
        frames = np.empty((len(ticks), 3, height, width), np.uint8)
        converted: Any = None  # the frame converted last
        converted_at = 0  # its position in `frames`
        for position in sorted(range(len(ticks)), key=ticks.__getitem__):
            shown = self._frame_at(ticks[position])
            if shown is not converted:
                with media_errors(self.name, "a frame cannot be converted"):
                    _write_frame(frames[position], shown, self.name, pixels=None if size is None else (width, height))
                converted, converted_at = shown, position
            else:
                frames[position] = frames[converted_at]
        return frames

    def _frame_at(self, ticks: int) -> Any:
        """Return the last frame that starts at or before `ticks`, or the first one."""
        if not self._to_file_end:  # the end of a range shows its last frame, not the first one of the next range
            ticks = min(ticks, self._first_tick(self._duration) - 1)
        if self._current is None or self._current.pts > ticks or self._is_far(ticks):
            self._seek(ticks)
        while self._next is not None and self._next.pts <= ticks:
            self._advance()
        if self._next is None:
            length = max(self._current.duration or 0, 2 / (frame_rate(self._stream) or 1) / self._stream.time_base)
            self._check_end(self._time(self._current.pts + length), self._time(ticks))
        if (rate := self._listed_fps) and self._time(ticks) - self._time(self._current.pts) > 1 / rate:
            listed = f"{round(self._duration * rate)} frames, and the video has {len(self._frame_ticks)}"
            raise MediaError(f"{self.name}: its metadata lists {listed}. Record it again, or drop the episode")
        return self._current

    def _is_far(self, ticks: int) -> bool:
        """Return whether there is a seek point between the next frame and `ticks`."""
        if self._next is None or self._next.pts >= ticks or not self._can_seek:
            return False
        entries = self._stream.index_entries
        found = entries.search_timestamp(ticks) if len(entries) > 1 else -1
        if found >= 0:
            return bool((entries[found].timestamp - self._next.pts) * self._stream.time_base > _NEAR_S)
        return bool((ticks - self._next.pts) * self._stream.time_base > _FORWARD_S)

    def _seek(self, ticks: int) -> None:
        self._current = None  # so that no old frame remains if decoding raises an error
        self._start_entry = self._seek_entry_at(ticks)
        self._decoder = self._frames_from(ticks)
        self._set_current(next(self._decoder))

    def _advance(self) -> None:
        shown, self._current = self._next, None
        self._set_current(shown)

    def _set_current(self, frame: Any) -> None:
        """Set the current frame, and decode the one after it."""
        self._next = next(self._decoder, None)
        if self._next is not None and self._next.pts < frame.pts:  # files may have been joined here
            begin, end = (float(self._time(each.pts)) for each in (frame, self._next))
            raise MediaError(f"{self.name}: frame times go back from {begin:.3f} to {end:.3f} s. Encode it again")
        self._current = frame


def frames_lacking(times: NDArray[np.float64], begin_s: float, count: int, fps: float) -> int:
    """Return how many frames of an episode are missing in a video.

    `times` has the start of each frame of the video, in seconds. The episode starts at `begin_s` and has
    `count` frames.
    """
    middles = begin_s + (np.arange(count) + 0.5) / fps
    count_before = np.searchsorted(times, middles, side="right")
    latest = np.concatenate([[-np.inf], times])[count_before]
    return int((middles - latest > 1 / fps).sum())


def frame_rate(stream: Any) -> Fraction | None:
    """Return the average rate of a stream of video, or None."""
    return stream.average_rate or stream.guessed_rate or None


def display_size(container: Any, stream: Any, file: BinaryIO) -> tuple[int, int]:
    """Return width and height in pixels, as a frame is displayed.

    A rotation is stored separately from the pixels.
    """
    if stream.codec_context is None:  # an unknown codec
        return 0, 0
    width, height = stream.codec_context.width, stream.codec_context.height
    if not is_mp4(container):
        return width, height
    with restoring_position(file):
        return (height, width) if is_quarter_turned(file, stream.id) else (width, height)


def _write_frame(out: NDArray[np.uint8], frame: Any, name: str, *, pixels: tuple[int, int] | None) -> None:
    """Write a frame to `out`, uint8 (3, height, width), rotated for display.

    It is resized to the width and height `pixels`, unless they are None.
    """
    if frame.format.name.startswith("gray") and frame.format.components[0].bits > 8:
        raise MediaError(f"{name}: {frame.format.name} has over 8 bits. Decode sample.open(part) with PyAV")
    quarter_turns = round(frame.rotation / 90) % 4
    width, height = pixels or (None, None)
    if quarter_turns % 2:
        width, height = height, width
    for channel, rows in enumerate(_channels(frame, width, height)):
        turned = np.rot90(rows, quarter_turns)
        if turned.shape != out.shape[1:]:
            found, expected = (f"{width} × {height} pixels" for height, width in (turned.shape, out.shape[1:]))
            raise MediaError(f"{name}: a frame of {found} in a video of {expected}. Pass size=, or drop it")
        out[channel] = turned


def _channels(frame: Any, width: int | None, height: int | None) -> list[NDArray[np.uint8]]:
    """Return red, green and blue of a frame, uint8 (height, width), maybe resized."""
    # Planes need no transposition, and of 8 bits have the numbers of "rgb24". But FFmpeg leaves columns at the right
    # uninitialised if the width is no multiple of 16, unless it resizes.
    interpolation = None if width is None else _bicubic()
    if (width is None and frame.width % 16) or frame.format.components[0].bits > 8:
        packed = frame.reformat(width=width, height=height, format="rgb24", interpolation=interpolation, threads=1)
        pixels = _rows(packed.planes[0], packed.height, 3 * packed.width).reshape(packed.height, packed.width, 3)
        return [pixels[..., channel] for channel in range(3)]
    planar = frame.reformat(width=width, height=height, format="gbrp", interpolation=interpolation, threads=1)
    # The planes are green, blue and red.
    return [_rows(planar.planes[number], planar.height, planar.width) for number in (2, 0, 1)]


def _rows(plane: Any, height: int, width: int) -> NDArray[np.uint8]:
    """Return the bytes of a plane without padding of its lines: uint8 (height, width)."""
    return np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:height, :width]


def _bicubic() -> Any:
    """Return PyAV's flags for bicubic resizing that gives the same pixels on every processor."""
    kinds = pyav().video.reformatter.Interpolation
    return kinds.BICUBIC | kinds.ACCURATE_RND | kinds.BITEXACT


_ZIP_MAGIC = b"PK\3\4"


def is_archive(file: BinaryIO) -> bool:
    """Return whether a file is a ZIP archive with something in it.

    Its position is reset to 0.
    """
    head = file.read(len(_ZIP_MAGIC))
    file.seek(0)
    return head == _ZIP_MAGIC


class ImageFrames(Video):
    """Frames of an archive of images, with the interface of `Video`.

    Raises `MediaError` for a damaged archive.
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
        """See `Video.restart_at`: nothing to do, as each image is decoded alone."""

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
