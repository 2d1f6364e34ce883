"""`MediaStream`: one stream of a media file, decoded from any time.

It is the base class of `Video` and `Audio`. Time 0 is the start of the container, so audio and video of one file agree.
In a range of a file, time 0 is its `begin_s`. Facts that FFmpeg does not report are read from the bytes of the file:

    MP4     moov ─ trak ─ tkhd   track number u32 │ … │ matrix i32 (3, 3): a, b, u, c, d, v, x, y, w
    MP3     ID3 tags │ first frame: header 4 bytes │ 9 to 34 bytes │ "Xing" or "Info" │ flags u32 │ if 1: frames u32
                     │           or header 4 bytes │ 32 bytes      │ "VBRI" │ 10 bytes │ frames u32 │ …
    Ogg     "OggS" │ version u8 │ flags u8 │ granule u64 │ serial u32 │ number u32 │ CRC u32 │ segments u8 │ their sizes
            │ content

The matrix says how a frame is rotated for display. An upright camera writes a rotation by a quarter turn. Without the
number of frames of an MP3, FFmpeg estimates its length from the size and the first bit rate. FFmpeg skips a page of Ogg
with a wrong checksum, which becomes silence. Sources: ISO/IEC 14496-12, 8.3.2; the LAME project's description of the
Xing tag; ID3v2.4, 3.1.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from math import ceil, gcd
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.errors import MediaError

_MOST_BOXES = 10_000  # most boxes to read, because a damaged file may have endlessly many
_XING = re.compile(rb"\xff[\xe2-\xff].{2,36}?(?:Xing|Info)...(.)(.{4})", re.DOTALL)
_VBRI = re.compile(rb"\xff[\xe2-\xff].{34}VBRI.{10}(.{4})", re.DOTALL)
_HAS_FRAMES = 1  # flag of a Xing tag that has the number of frames
_HEAD_BYTES = 4096  # bytes to read after the ID3 tags
_MOST_TAGS = 8  # most ID3 tags that are skipped
_OGG_HEADER = struct.Struct("<4sBBQIIIB")
_OGG_MAGIC = b"OggS"  # the start of a page
_OGG_LAST = 0x04  # the flag of a stream's last page
_BITS_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_OGG_CRC_OFFSET = 22
_UNSUPPORTED_FILES = {b"NIST_1A": "NIST SPHERE", b"DSD ": "DSF"}
_UNSUPPORTED = "is not supported. Convert it, for example by `ffmpeg -i FILE FILE.flac`"
# Only containers with their media inside. A playlist could name other files, which must not be read.
_CONTAINERS = (
    "mov,mp4,matroska,webm,ogg,flac,wav,w64,mp3,aac,ac3,eac3,aiff,au,caf,avi,flv,mpegts,mpeg,mpegvideo,asf,wv,amr,h264,"
    "hevc,ivf,gif,dts,ape,tta"
)
_WITHOUT_LENGTH = ("aac", "ac3", "eac3", "amr", "dts", "mpeg", "mpegvideo")  # containers without a length in the header
# In these, a seek estimates a position from bytes, so the times after it differ from those of a full decode.
_INEXACT_SEEK = ("mp3", *_WITHOUT_LENGTH)
_MATROSKA = "matroska,webm"
_MP3_PADDING = 8192  # samples before and after the audio, which are skipped
_READ_BYTES = 1 << 16  # bytes of one read by PyAV
LATE = Fraction(1, 2000)  # seconds by which a range of a file may be late, because tables round times
_FLOAT_ERROR_S = Fraction(1, 10**9)  # seconds by which a float may be early
_FLOAT32_ERROR = Fraction(1, 1 << 24)  # fraction of a time by which a float32 may be early
_LEAST_TICK = Fraction(2, 3)  # least length of a tick, in frames, if ticks count frames
_EARLY_END_S = Fraction(1, 4)  # seconds by which a stream may end before the time in its header
_SEEK_EARLIER_S = (0, 1, 4, 16, 64, 256)  # seconds to seek before a time, until the first decoded frame is early enough


def is_quarter_turned(file: BinaryIO, track: int) -> bool:
    """Return whether a track of an MP4 is displayed rotated by 90° or 270°.

    Width and height are then exchanged. Raises errors of reading the file.
    """
    end = file.seek(0, 2)
    for moov in _boxes(file, b"moov", 0, end):
        for trak in _boxes(file, b"trak", *moov):
            for begin, stop in _boxes(file, b"tkhd", *trak):
                file.seek(begin)
                found, a, b = _track_matrix(file.read(min(stop - begin, 92))) or (None, 0, 0)
                if found == track:
                    return abs(b) > abs(a)
    return False


def _track_matrix(tkhd: bytes) -> tuple[int, int, int] | None:
    """Return the track number in a `tkhd` box and a and b of its matrix, or None."""
    wide = tkhd[:1] == b"\1"
    if len(tkhd) < (88 if wide else 76):
        return None
    (track,) = struct.unpack_from(">I", tkhd, 20 if wide else 12)
    a, b = struct.unpack_from(">ii", tkhd, 52 if wide else 40)
    return track, a, b


def _boxes(file: BinaryIO, kind: bytes, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield for each box of a kind the offsets where its content starts and ends."""
    for _ in range(_MOST_BOXES):
        if begin + 8 > end:
            return
        file.seek(begin)
        header = file.read(16)
        if len(header) < 8:
            return
        size, header_bytes = int.from_bytes(header[:4], "big"), 8
        if size == 1:
            size, header_bytes = int.from_bytes(header[8:16], "big"), 16
        stop = end if size == 0 else begin + size
        if stop < begin + header_bytes or stop > end:
            return
        if header[4:8] == kind:
            yield begin + header_bytes, stop
        begin = stop


def mp3_frame_count(file: BinaryIO) -> int | None:
    """Return the number of frames of an MP3 by its header, or None.

    Each frame has 1,152 samples, or 576 below 32 kHz. Raises errors of reading the file.
    """
    head = _bytes_after_id3(file)
    if (found := _XING.search(head)) is not None and found[1][0] & _HAS_FRAMES:
        return int.from_bytes(found[2], "big")
    return None if (found := _VBRI.search(head)) is None else int.from_bytes(found[1], "big")


def _bytes_after_id3(file: BinaryIO) -> bytes:
    """Return the first bytes after the ID3 tags of a file."""
    offset = 0
    for _ in range(_MOST_TAGS):
        file.seek(offset)
        start = file.read(_HEAD_BYTES)
        if start[:3] != b"ID3" or len(start) < 10:
            return start
        # the size has 7 bits in each of 4 bytes
        size = start[6] << 21 | start[7] << 14 | start[8] << 7 | start[9]
        offset += 10 + size + (10 if start[5] & 16 else 0)  # with a footer
    return b""


def ogg_fault(file: BinaryIO) -> str:
    """Return what is wrong with the pages of an Ogg file, or "". It reads all of it."""
    with restoring_position(file):
        file.seek(0)
        offset, flags = 0, 0
        while head := file.read(_OGG_HEADER.size):
            if len(head) < _OGG_HEADER.size or not head.startswith(_OGG_MAGIC):
                has_ended = flags & _OGG_LAST and _OGG_MAGIC not in head + file.read()  # tags after all pages
                return "" if has_ended else f"no page of Ogg at byte {offset}"
            _, _, flags, _, _, _, crc, count = _OGG_HEADER.unpack(head)
            sizes = file.read(count)
            content = file.read(sum(sizes))
            page = head[:_OGG_CRC_OFFSET] + bytes(4) + head[_OGG_CRC_OFFSET + 4 :] + sizes + content
            if len(content) < sum(sizes) or _crc(page) != crc:
                return f"the page of Ogg at byte {offset} has another checksum than its own"
            offset += len(page)
    return ""


def _crc(page: bytes) -> int:
    """Return the CRC-32 of Ogg, which takes each byte's highest bit first. zlib takes the lowest bit first."""
    found = zlib.crc32(page.translate(_BITS_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{found:032b}"[::-1], 2)


def pyav() -> Any:
    """Import `av`, or raise ImportError with the command to install it."""
    try:
        import av
    except ImportError as error:
        raise ImportError("audio and video need PyAV. Run `pip install av`") from error
    return av


@contextlib.contextmanager
def media_errors(name: str, failure: str) -> Iterator[None]:
    """Turn PyAV's errors into `MediaError`, but not errors of reading the file."""
    error_type = pyav().error.FFmpegError
    try:
        yield
    except error_type as error:
        reason = error.strerror or type(error).__name__
        raise MediaError(f"{name}: {failure}: {reason}. The bytes are damaged or of an unsupported format") from error
    except (UnicodeDecodeError, OverflowError) as error:
        raise MediaError(f"{name}: {failure}: {error}. The header is damaged") from error


def open_container(file: BinaryIO, name: str) -> Any:
    """Open a file as PyAV's container without decoding anything.

    Raises `MediaError`, ImportError without PyAV.
    """
    with restoring_position(file):
        head = file.read(16)
    if kind := next((kind for magic, kind in _UNSUPPORTED_FILES.items() if head.startswith(magic)), ""):
        raise MediaError(f"{name}: {kind} {_UNSUPPORTED}")
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}
    with media_errors(name, "cannot be opened"):
        return pyav().open(file, container_options=options, buffer_size=_READ_BYTES, metadata_errors="replace")


@contextlib.contextmanager
def restoring_position(file: BinaryIO) -> Iterator[None]:
    """Restore the position of a file at the end of the context.

    An open container reads on from where its last read ended, so other reads must not move the position.
    """
    position = file.tell()
    try:
        yield
    finally:
        file.seek(position)


def is_mp4(container: Any) -> bool:
    """Return whether a container is MP4 or QuickTime."""
    return "mov" in container.format.name.split(",")


def displayed_frames(container: Any, stream: Any) -> int | None:
    """Return how many frames of a video are displayed, by its header, or None.

    The number in a header also counts frames that the edit list of an MP4 hides, and empty chunks of an AVI.
    """
    indexed = is_mp4(container) or "avi" in container.format.name.split(",")
    displayed = sum(entry.size > 0 and not entry.is_discard for entry in stream.index_entries) if indexed else 0
    return min(displayed or stream.frames, stream.frames) or None


def first_stream(container: Any, kind: Literal["video", "audio"]) -> Any | None:
    """Return the first stream of a kind, or None.

    An image attached to audio does not count as video.
    """
    found = getattr(container.streams, kind)
    return next((one for one in found if not one.disposition & one.disposition.__class__.attached_pic), None)


def enable_checksums(stream: Any) -> None:
    """Let FLAC's decoder compare each frame with its checksum."""
    if stream.codec_context.name == "flac":
        stream.codec_context.options = {"err_detect": "crccheck+explode"}


def header_duration(container: Any, stream: Any, file: BinaryIO, origin: Fraction) -> tuple[Fraction | None, bool]:
    """Return where a stream ends by the headers, in seconds from `origin`, or None.

    The second value says whether that is the end of this stream, and not of the longest one.
    """
    if _is_estimated(container, stream, file):
        return None, False
    skipped = _opus_skip(container, stream)
    if stream.duration is not None:
        start = stream.start_time * stream.time_base if stream.start_time is not None and not skipped else 0
        clock_start = origin if stream.start_time is not None else 0
        return Fraction(start + stream.duration * stream.time_base) - skipped - clock_start, True
    if text := re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d{1,9})?)\d*", stream.metadata.get("DURATION", "")):  # Matroska's
        return int(text[1]) * 3600 + int(text[2]) * 60 + Fraction(text[3]) - skipped, True
    if container.duration is None:
        return None, False
    return Fraction(container.duration, 1_000_000) - skipped, len(container.streams) == 1


def _opus_skip(container: Any, stream: Any) -> Fraction:
    """Return the seconds that Opus decodes before its audio starts; 0 for others.

    Lengths in Ogg and Matroska include them.

    Its header: "OpusHead" │ version u8 │ channels u8 │ samples at 48,000 Hz to skip u16, little-endian (RFC 7845, 5.1).
    """
    context = stream.codec_context
    if container.format.name not in ("ogg", _MATROSKA) or context is None or "opus" not in context.name:
        return Fraction(0)
    return Fraction(int.from_bytes((context.extradata or b"")[10:12], "little"), 48_000)


def range_fault(container: Any, stream: Any, file: BinaryIO, begin_s: float, end_s: float | None) -> str:
    """Return why the headers of a file rule out this range, or ""."""
    wanted = f"a range from {begin_s} to {'its end' if end_s is None else f'{end_s} s'}"
    if not 0 <= begin_s < (float("inf") if end_s is None else end_s):
        return wanted
    if container.duration is None or _is_estimated(container, stream, file):
        return ""
    duration = Fraction(container.duration, 1_000_000)
    if begin_s < duration and (end_s is None or end_s <= duration + _EARLY_END_S):
        return ""
    return f"{wanted}, but the file ends at {float(duration):.3f} s"


def _is_estimated(container: Any, stream: Any, file: BinaryIO) -> bool:
    """Return whether FFmpeg only estimates the length of a stream.

    The estimate, from the first bit rate or a few times, may be far too short.
    """
    name = container.format.name
    if name == _MATROSKA and origin_of(container) > 0:
        return True  # some programs count from 0, others from the first packet
    if name != "mp3" or stream.duration is None:
        return name in (*_WITHOUT_LENGTH, "mpegts")
    with restoring_position(file):
        frames = mp3_frame_count(file)
    rate = stream.codec_context.sample_rate
    estimate = stream.duration * stream.time_base * rate
    return frames is None or abs(frames * (1152 if rate >= 32_000 else 576) - estimate) > _MP3_PADDING


def origin_of(container: Any) -> Fraction:
    """Return the start of a container, in seconds of its own clock."""
    begin = Fraction(container.start_time or 0, 1_000_000)
    starts = [each.start_time * each.time_base for each in container.streams if each.start_time is not None]
    return min((start for start in starts if abs(start - begin) < Fraction(1, 1_000_000)), default=begin)


def has_no_pts(container: Any, stream: Any) -> bool:
    """Return whether a file has no display times, as AVI.

    There, a frame is shown as long as its chunk lasts.
    """
    return bool(container.format.name == "avi" and stream.type == "video")


def is_reordered(container: Any, stream: Any) -> bool:
    """Return whether chunks without times are in another order than their frames."""
    return has_no_pts(container, stream) and bool(stream.codec_context.has_b_frames)


def decoded_frames(container: Any, packet: Any, chunk_times: deque[int] | None) -> list[Any]:
    """Return the frames that a packet completes, with their times.

    A file without display times has one for each chunk, including empty ones. If chunks are in another order than their
    frames, `chunk_times` has the times of chunks whose frames are not decoded yet, because the nth frame shown has the
    nth time. Otherwise it is None.
    """
    if not has_no_pts(container, packet.stream):
        found: list[Any] = packet.decode()
        is_adpcm = packet.stream.codec_context.name.startswith("adpcm")  # FFmpeg reads several blocks as one packet
        for previous, frame in itertools.pairwise(found if is_adpcm else []):
            if frame.pts is None and previous.pts is not None:
                frame.pts = previous.pts + round(previous.samples / (previous.sample_rate * previous.time_base))
    elif chunk_times is None:  # FFmpeg assumes for H.264 that each frame is shown one chunk later
        packet.pts = packet.dts
        found = packet.decode()
    else:
        if packet.size:
            chunk_times.append(packet.dts)
        found = packet.decode()
        for frame in found:
            frame.pts = chunk_times.popleft() if chunk_times else None
    return found


class MediaStream:
    """One stream of a file, decoded by one thread. It is a context manager.

    It also closes itself when it is freed.

    Attributes:
        name: The file's name in messages.
        codec: FFmpeg's name of the codec.
    """

    kind: Literal["video", "audio"]
    codec: str

    def __init__(self, file: BinaryIO, name: str, *, begin_s: float = 0.0, end_s: float | None = None) -> None:
        self.name, self._file = name, file
        self._open()
        self._origin = origin_of(self._container) + Fraction(begin_s)
        self._end = None if end_s is None else Fraction(end_s) - Fraction(begin_s)
        self._is_range = end_s is not None or begin_s > 0
        self._to_file_end = end_s is None  # otherwise another range may follow in the file
        if fault := range_fault(self._container, self._stream, file, begin_s, end_s):
            self.close()
            raise MediaError(f"{name}: {fault}")

    def _open(self) -> None:
        """Open the file from its start, and its stream of this kind."""
        self._container = open_container(self._file, self.name)
        stream = first_stream(self._container, self.kind)
        if stream is None or stream.codec_context is None:
            found = ", ".join(one.type for one in self._container.streams) or "nothing"
            self.close()
            raise MediaError(f"{self.name}: no {self.kind} that can be decoded (streams: {found})")
        for other in self._container.streams:
            if other is not stream:
                other.discard = type(other.discard).all
        enable_checksums(stream)
        stream.codec_context.thread_count, stream.codec_context.thread_type = 1, "NONE"
        self._stream, self.codec = stream, stream.codec_context.name
        if self.codec.startswith("wma"):
            self.close()
            raise MediaError(f"{self.name}: Windows Media audio {_UNSUPPORTED}")
        self._has_decoded = False

    @property
    def duration_s(self) -> float:
        """The time from 0 to the end, in seconds.

        It comes from the headers, or else from reading all packets.
        """
        return float(self._duration)

    @property
    def _duration(self) -> Fraction:
        if self._end is None:
            file_origin = origin_of(self._container)
            end, _ = header_duration(self._container, self._stream, self._file, file_origin)
            self._end = self._packets_end() if end is None else end + file_origin - self._origin
            if self._end < 0:
                raise MediaError(f"{self.name}: its range starts {-float(self._end):.3f} s after the end of the file")
        return self._end

    def _check_end(self, reached: Fraction, wanted: Fraction) -> None:
        """Raise `MediaError` if the stream ended at `reached`, before its end by the header.

        A time after that end may be `wanted`. Both are in seconds.
        """
        file_origin = origin_of(self._container)
        end, is_own = header_duration(self._container, self._stream, self._file, file_origin)
        begin, source = self._origin - file_origin, "its header (it was cut short)"
        if end is None and self._end is not None and not self._to_file_end:
            end, is_own, source = self._end + begin, len(self._container.streams) == 1, "its range"
        if end is not None and is_own and min(wanted + begin, end) > reached + begin + _EARLY_END_S:
            times = f"{float(reached):.3f} s, not {float(end - begin):.3f} s"
            raise MediaError(f"{self.name}: its {self.kind} ends at {times} by {source}")

    def close(self) -> None:
        """Free the decoder. The file stays open."""
        self._container.close()

    def __del__(self) -> None:
        """Close the file at once.

        PyAV's objects refer to each other, and would occupy megabytes until the next garbage collection.
        """
        if hasattr(self, "_container"):
            self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _nearest_tick(self, time_s: float) -> int:
        """Return the tick of a time in seconds, which may have been rounded down.

        Example: on a clock of milliseconds, 12 frames at 24000/1001 Hz are 500.5 ms, which a file may round to 500 or
        501. The start of a range in a table may be a sum of rounded lengths.
        """
        tick, time = self._stream.time_base, Fraction(time_s)
        late = LATE if self._counts_frames else max(tick / 2, LATE if self._is_range else 0)
        return self._ticks(time + late + min(_FLOAT_ERROR_S + time * _FLOAT32_ERROR, tick / 4))

    @property
    def _counts_frames(self) -> bool:
        """Return whether ticks count frames, as in AVI. Such a clock rounds no times."""
        rate: Fraction | None = self._stream.average_rate
        return bool(rate is not None and rate * self._stream.time_base > _LEAST_TICK)

    def _ticks(self, time_s: float | Fraction) -> int:
        """Convert a time to ticks of the stream's own clock, rounded down."""
        return int((self._origin + Fraction(time_s)) // self._stream.time_base)

    def _time(self, ticks: int) -> Fraction:
        """Convert ticks of the stream's own clock to a time in seconds."""
        return Fraction(ticks * self._stream.time_base) - self._origin

    def _frames_from(self, ticks: int) -> Iterator[Any]:
        """Return the frames from the last seek point at or before `ticks`, or else from the first frame."""
        begin = self._stream.start_time
        for earlier in _SEEK_EARLIER_S if self._can_seek else ():
            target = ticks - int(earlier / self._stream.time_base)
            if begin is None or target <= begin:
                break
            frames = self._seek_frames(target)
            if (first := next(frames, None)) is not None and first.pts <= ticks:
                return itertools.chain((first,), frames)
        frames = self._frames_from_start()
        if (first := next(frames, None)) is None:
            raise MediaError(f"{self.name}: no frame of its {self.kind} can be decoded")
        return itertools.chain((first,), frames)

    @property
    def _can_seek(self) -> bool:
        """Return whether the frames after a seek equal those of a full decode."""
        return self._container.format.name not in _INEXACT_SEEK and not is_reordered(self._container, self._stream)

    def _seek_frames(self, ticks: int) -> Iterator[Any]:
        """Return the frames from a seek point at or before `ticks`, or none."""
        self._has_decoded = True
        try:
            self._container.seek(ticks, stream=self._stream)
        except pyav().error.FFmpegError:  # for example beyond the start of the last block of an intact FLAC file
            self._reopen()
            return iter(())
        return self._frames()

    def _frames_from_start(self) -> Iterator[Any]:
        """Return the frames from the first one.

        Not every container can seek to it.
        """
        self._reopen()
        self._has_decoded = True
        return self._frames()

    def _reopen(self) -> None:
        """Reopen the file, so that earlier decoding has no effect."""
        if self._has_decoded:
            self.close()
            self._file.seek(0)
            self._open()

    def _frames(self) -> Iterator[Any]:
        """Return the frames from the current position, each with a time.

        Raises `MediaError` for a damaged frame.
        """
        return _frames(self._container, self._stream, self.name, self.kind)

    def _packet_times(self) -> list[tuple[int, int]]:
        """Return time and duration of each packet in ticks, in ascending order, undecoded.

        It reads the file to its end.
        """
        with restoring_position(self._file), media_errors(self.name, "its packets cannot be read"):
            self._file.seek(0)
            with open_container(self._file, self.name) as container:
                stream = container.streams[self._stream.index]
                packets = (packet for packet in container.demux(stream) if packet.size and not packet.is_discard)
                by_count = has_no_pts(container, stream)
                times = [
                    (packet.dts if by_count or packet.pts is None else packet.pts, packet.duration or 0)
                    for packet in packets
                ]
        return sorted(time for time in times if time[0] is not None)

    def _packets_end(self) -> Fraction:
        """Return the end of the last packet, in seconds."""
        times = self._packet_times()
        if not times:
            raise MediaError(
                f"{self.name}: its {self.kind} (raw {self.codec}) has no times. Run ffmpeg -i FILE -c copy FILE.mkv"
            )
        rate = getattr(self._stream, "average_rate", None)  # the last packet of a video may have no length
        ticks, duration = times[-1]
        return self._time(ticks + duration) + (1 / rate if rate and not duration else 0)


def _frames(container: Any, stream: Any, name: str, kind: str) -> Iterator[Any]:
    """Yield frames. A method would keep the `MediaStream` and its decoder alive."""
    chunk_times: deque[int] | None = deque() if is_reordered(container, stream) else None
    decoded = (frame for packet in container.demux(stream) for frame in decoded_frames(container, packet, chunk_times))
    while True:
        with media_errors(name, f"its {kind} cannot be decoded"):
            frame = next(decoded, None)
        if frame is None:
            return
        if frame.pts is None:
            frame.pts = frame.dts
        if frame.pts is None or frame.is_corrupt:
            raise MediaError(f"{name}: a frame of its {kind} is damaged or has no time")
        yield frame


_PREROLL_S = Fraction(1, 4)  # seconds decoded before the start, because a decoder's first frames depend on earlier ones
_FILTER_SAMPLES = 64  # samples to resample before and after a range, at least, because the filter uses them
_CLOCK_ERROR_S = Fraction(1, 500)  # most by which a container's clock rounds a frame's time
_MOST_SAMPLES = 1 << 30
_MOST_HZ = 1 << 22  # above any real rate; a damaged header with more would take gigabytes to resample a moment
# Most channels of audio that has each channel in memory of its own (a plane). With more, PyAV reads beyond a list.
_MOST_PLANAR_CHANNELS = 7
_OGG_S = 30  # seconds of Ogg that are decoded from the start, because seeking near it estimates positions from bytes


class Audio(MediaStream):
    """Audio stream of a seekable file; `sample.audio()` opens one.

    Args:
        file: A binary file that can be read and sought, and that stays open.
        name: The file's name in messages.
        begin_s: Where the range starts in the file, in seconds.
        end_s: Where the range ends. None (default): at the end of the file.

    Attributes:
        rate: Samples per second, in Hz.
        channels: The number of channels.

    Raises:
        MediaError: The file has no audio, or is damaged.
        ImportError: PyAV is not installed.

    Example:
        >>> audio = sample.audio("flac")  # doctest: +SKIP
        >>> audio.duration_s, audio.rate, audio.channels  # doctest: +SKIP
        (12.5, 44100, 2)
        >>> audio.samples(1.0, 3.0, rate=16_000, mono=True).shape  # doctest: +SKIP
        (1, 32000)
    """

    kind = "audio"

    def __init__(self, file: BinaryIO, name: str, *, begin_s: float = 0.0, end_s: float | None = None) -> None:
        super().__init__(file, name, begin_s=begin_s, end_s=end_s)
        self.rate: int = self._stream.codec_context.sample_rate
        self.channels: int = self._stream.codec_context.channels
        self._packer: Any = None
        self._end_sample: int | None = None  # where the audio ends, if the last range reached its end
        if not 0 < self.rate <= _MOST_HZ or self.channels <= 0:
            self.close()
            raise MediaError(f"{name}: unsupported audio: {self.channels} channels at {self.rate} Hz")

    def samples(
        self, start_s: float = 0.0, stop_s: float | None = None, *, rate: int | None = None, mono: bool = False
    ) -> NDArray[np.float32]:
        """Decode the audio between two times.

        Args:
            start_s: Seconds from the start of the audio (default 0).
            stop_s: Where to stop. None (default): at the end.
            rate: Samples per second to resample to. None (default): no resampling.
            mono: Whether to return the mean of the channels (default False).

        Returns:
            float32 (channels, samples), from -1 to 1. There are `round((stop_s - start_s) * rate)` samples, zeros after
            the end and in pauses between two packets. Without `stop_s`, the result ends with the last decoded sample,
            because the duration in a header is rounded. The start is exact to one sample, or to 1 ms in Matroska and
            WebM, whose clocks count milliseconds.

        Raises:
            ValueError: The range starts before 0, or ends before it starts.
            MediaError: The audio is damaged.
        """
        start_s, stop = float(start_s), self._duration if stop_s is None else Fraction(float(stop_s))
        if not 0 <= start_s <= stop:
            raise ValueError(f"{self.name}: invalid range from {start_s} to {stop_s} s")
        if rate is not None and rate <= 0:
            raise ValueError(f"rate must be above 0 Hz, not {rate}")
        new_rate = rate or self.rate
        count = round((stop - Fraction(start_s)) * new_rate)
        if count * self.channels > _MOST_SAMPLES:
            raise ValueError(f"{self.name}: {count} samples at once. Read shorter ranges")
        first = round(Fraction(start_s) * self.rate)
        extra = ceil(_CLOCK_ERROR_S * new_rate) if stop_s is None and self._to_file_end else 0
        decode = self._decode_native if new_rate == self.rate else partial(self._decode_resampled, rate=new_rate)
        found = decode(first, count + extra)
        if extra:  # read to the last decoded sample, unless the audio continues after the end in the header
            end = round((Fraction(self._end_sample or 0, self.rate) - Fraction(start_s)) * new_rate)
            continues_past_header = self._end_sample is None or end > count + extra
            found = found[:, : count if continues_past_header else max(end, 0)]
        return found.mean(0, keepdims=True) if mono and len(found) > 1 else found

    def _decode_resampled(self, first: int, count: int, rate: int) -> NDArray[np.float32]:
        """Return `count` samples at `rate`, starting at the stream's own sample `first`."""
        common = gcd(rate, self.rate)
        period, new_period = self.rate // common, rate // common  # samples after which both clocks agree again
        margin_periods = -(-_FILTER_SAMPLES // period) if period < _FILTER_SAMPLES else 1
        margin = margin_periods * period
        native = self._decode_native(first - margin, -(-count * self.rate // rate) + 2 * margin)
        resampled = resample(native, self.rate, rate, self.name)[:, margin_periods * new_period :][:, :count]
        found = np.zeros((self.channels, count), np.float32)
        found[:, : resampled.shape[1]] = resampled
        return found

    def _decode_native(self, first: int, count: int) -> NDArray[np.float32]:
        """Return `count` samples from number `first`, which may be negative, at the stream's own rate.

        The result is float32 (channels, count), with zeros where there is no audio.
        """
        found = np.zeros((self.channels, count), np.float32)
        end = first + count if self._to_file_end else round(self._duration * self.rate)
        expected: int | None = None
        self._end_sample = None
        for frame in self._frames_before(Fraction(first, self.rate)) if count else ():
            position = round(self._time(frame.pts) * self.rate)
            if expected is not None and abs(position - expected) <= _CLOCK_ERROR_S * self.rate:
                position = expected  # frames are adjacent, even if a coarse clock differs
            elif expected is not None and self._counts_samples:  # a damaged frame was skipped
                raise MediaError(f"{self.name}: damaged audio at {expected / self.rate:.3f} s")
            if position >= first + count:
                break
            block = self._floats(frame)
            expected = position + block.shape[1]  # position of the next frame
            start, stop = max(position, first, 0), min(expected, first + count, end)
            if start < stop:
                found[:, start - first : stop - first] = block[:, start - position : stop - position]
        else:
            self._end_sample = expected
            if count and self._is_ogg and Fraction(first, self.rate) <= _OGG_S and (fault := ogg_fault(self._file)):
                raise MediaError(f"{self.name}: damaged audio: {fault}")
            if count:
                self._check_end(Fraction(expected or 0, self.rate), Fraction(first + count, self.rate))
        return found

    @property
    def _counts_samples(self) -> bool:
        """Return whether times count samples without gaps, so a gap shows a damaged frame."""
        return self.codec == "flac" and self._container.format.name in ("flac", "ogg")

    @property
    def _is_ogg(self) -> bool:
        return bool(self._container.format.name == "ogg")

    def _frames_before(self, time: Fraction) -> Any:
        """Return frames from a seek point before `time`, in seconds, or from the start."""
        if time <= (_OGG_S if self._is_ogg else 0):
            return self._frames_from_start()
        # Reopen, because results could depend on earlier ranges: a demuxer learns seek points, and AAC decoders draw
        # noise from a generator.
        self._reopen()
        return self._frames_from(self._ticks(max(time, Fraction(0)) - _PREROLL_S))

    def _floats(self, frame: Any) -> NDArray[np.float32]:
        """Convert a frame to float32 (channels, samples)."""
        if frame.layout.nb_channels != self.channels or frame.sample_rate != self.rate:
            raise MediaError(f"{self.name}: its audio changes from {self.channels} channels at {self.rate} Hz")
        if frame.format.is_planar and self.channels > _MOST_PLANAR_CHANNELS:
            frame = self._packed(frame)
        data: NDArray[Any] = frame.to_ndarray()
        if not frame.format.is_planar:
            data = data.reshape(-1, self.channels).T
        if self.codec.startswith("pcm_f") and not np.isfinite(data).all():
            raise MediaError(f"{self.name}: NaN or infinite audio at {float(self._time(frame.pts)):.3f} s")
        if data.dtype == np.uint8:
            data = (data - 128.0) / 128
        elif data.dtype.kind == "i":
            data = data / -float(np.iinfo(data.dtype).min)
        return data.astype(np.float32, copy=False)

    def _packed(self, frame: Any) -> Any:
        """Return the frame with the samples of all channels interleaved."""
        with media_errors(self.name, f"its {self.channels} channels cannot be read"):
            if self._packer is None:
                self._packer = pyav().AudioResampler(frame.format.packed.name, frame.layout, self.rate)
            (packed,) = self._packer.resample(frame)
        return packed


def resample(samples: NDArray[np.float32], rate: int, new_rate: int, name: str) -> NDArray[np.float32]:
    """Resample float32 (channels, samples) by FFmpeg's windowed sinc filter.

    The result has about the same duration.
    """
    groups = [samples[first : first + _MOST_PLANAR_CHANNELS] for first in range(0, len(samples), _MOST_PLANAR_CHANNELS)]
    return np.concatenate([_resample_group(group, rate, new_rate, name) for group in groups])


def _resample_group(samples: NDArray[np.float32], rate: int, new_rate: int, name: str) -> NDArray[np.float32]:
    """Resample at most `_MOST_PLANAR_CHANNELS` channels."""
    av = pyav()
    layout = f"{len(samples)}c"
    with media_errors(name, f"cannot be resampled from {rate} to {new_rate} Hz"):
        resampler = av.AudioResampler("fltp", layout, new_rate)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        frames = [*resampler.resample(frame), *resampler.resample(None)]
        return np.concatenate([one.to_ndarray() for one in frames], 1) if frames else samples[:, :0]
