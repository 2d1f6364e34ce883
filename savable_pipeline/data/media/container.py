"""`MediaStream`: one stream of a media file, decoded from any time on: the base of `Video` and `Audio`.

Time 0 is where the container begins, so that audio and video of one file agree; or `begin_s` of a range of a file. What
FFmpeg does not say of a file is read from its bytes:

    MP4     moov ─ trak ─ tkhd   track number u32 │ … │ matrix i32 (3, 3): a, b, u, c, d, v, x, y, w
    MP3     ID3 tags │ first frame: header 4 bytes │ 9 to 34 bytes │ "Xing" or "Info" │ flags u32 │ if 1: frames u32
                     │           or header 4 bytes │ 32 bytes      │ "VBRI" │ 10 bytes │ frames u32 │ …
    Ogg     "OggS" │ version u8 │ flags u8 │ granule u64 │ serial u32 │ number u32 │ CRC u32 │ segments u8 │ their sizes
            │ content

The matrix says how a frame is turned when it is shown: a camera that was held upright writes one that turns by a
quarter. Without the frames of MP3, FFmpeg takes a file's length to be size over first bit rate. A page of Ogg that does
not fit its checksum is left out by FFmpeg, and what was in it is a silence then. Sources: ISO/IEC 14496-12, 8.3.2; the
LAME project's description of the Xing tag; ID3v2.4, 3.1.
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
from typing import Any, BinaryIO, Literal, Self

from savable_pipeline.errors import MediaError

_MOST_BOXES = 10_000  # looked at; a damaged file may have endless ones
_XING = re.compile(rb"\xff[\xe2-\xff].{2,36}?(?:Xing|Info)...(.)(.{4})", re.DOTALL)
_VBRI = re.compile(rb"\xff[\xe2-\xff].{34}VBRI.{10}(.{4})", re.DOTALL)
_HAS_FRAMES = 1
_LOOKED_AT = 4096  # bytes behind the ID3 tags
_MOST_TAGS = 8
_HEAD = struct.Struct("<4sBBQIIIB")
_MAGIC, _LAST = b"OggS", 0x04  # how a page begins; the flag of a stream's last one
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_CRC_AT = 22
# Containers that hold what they name; a playlist or a list of files would have others opened. Nothing but the file is.
_NOT_READ = {b"NIST_1A": "NIST SPHERE", b"DSD ": "DSF"}
_UNSUPPORTED = "is not supported. Convert it, for example by `ffmpeg -i FILE FILE.flac`"
_CONTAINERS = (
    "mov,mp4,matroska,webm,ogg,flac,wav,w64,mp3,aac,ac3,eac3,aiff,au,caf,avi,flv,mpegts,mpeg,mpegvideo,asf,wv,amr,h264,"
    "hevc,ivf,gif,dts,ape,tta"
)
_GUESSED = ("aac", "ac3", "eac3", "amr", "dts", "mpeg", "mpegvideo")  # containers that do not say how long they are
# In these a point to begin from is estimated from bytes, so that times behind it are not those of a full decode.
_UNSOUGHT = ("mp3", *_GUESSED)
_MATROSKA = "matroska,webm"
_MP3_PADDING = 8192  # samples before and behind the sound, which are left out
_READ_BYTES = 1 << 16  # that PyAV asks a file for at once
LATE = Fraction(1, 2000)  # s: what a range of a file may be late by, since tables round seconds
_FLOAT = Fraction(1, 10**9)  # s that floats may be early by; and of float32, a share of the time:
_FLOAT_SHARE = Fraction(1, 1 << 24)
_COUNTS = Fraction(2, 3)  # of a frame that a tick lasts at least where it is the number of one
_CUT_S = Fraction(1, 4)  # that a stream may end before its header says
_EARLIER = (0, 1, 4, 16, 64, 256)  # s before a time from which decoding is tried until a frame comes that is not late


def is_turned(file: BinaryIO, track: int) -> bool:
    """Whether width and height of a track are exchanged when it is shown. Raises the errors of reading the file."""
    end = file.seek(0, 2)
    for moov in _boxes(file, b"moov", 0, end):
        for trak in _boxes(file, b"trak", *moov):
            for begin, stop in _boxes(file, b"tkhd", *trak):
                file.seek(begin)
                found = _matrix(file.read(min(stop - begin, 92)))
                if found is not None and found[0] == track:
                    return abs(found[2]) > abs(found[1])
    return False


def _matrix(tkhd: bytes) -> tuple[int, int, int] | None:
    """Track number, and the matrix's a and b."""
    wide = tkhd[:1] == b"\1"
    if len(tkhd) < (88 if wide else 76):
        return None
    (track,) = struct.unpack_from(">I", tkhd, 20 if wide else 12)
    a, b = struct.unpack_from(">ii", tkhd, 52 if wide else 40)
    return track, a, b


def _boxes(file: BinaryIO, kind: bytes, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """First byte and end of what each box of a kind holds, among those between two bytes."""
    for _ in range(_MOST_BOXES):
        if begin + 8 > end:
            return
        file.seek(begin)
        header = file.read(16)
        if len(header) < 8:
            return
        size, head = int.from_bytes(header[:4], "big"), 8
        if size == 1:
            size, head = int.from_bytes(header[8:16], "big"), 16
        stop = end if size == 0 else begin + size
        if stop < begin + head or stop > end:
            return
        if header[4:8] == kind:
            yield begin + head, stop
        begin = stop


def said_frames(file: BinaryIO) -> int | None:
    """The number of frames, each of 1,152 samples, or of 576 at less than 32 kHz. Raises the errors of reading."""
    head = _behind_id3(file)
    if (found := _XING.search(head)) is not None and found[1][0] & _HAS_FRAMES:
        return int.from_bytes(found[2], "big")
    return None if (found := _VBRI.search(head)) is None else int.from_bytes(found[1], "big")


def _behind_id3(file: BinaryIO) -> bytes:
    begin = 0
    for _ in range(_MOST_TAGS):
        file.seek(begin)
        head = file.read(_LOOKED_AT)
        if head[:3] != b"ID3" or len(head) < 10:
            return head
        size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        begin += 10 + size + (10 if head[5] & 16 else 0)  # a footer
    return b""


def ogg_fault(file: BinaryIO) -> str:
    """Why the pages of a file cannot be right, "" if they can; all of it is read."""
    with kept_place(file):
        file.seek(0)
        offset, flags = 0, 0
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size or not head.startswith(_MAGIC):
                is_end = flags & _LAST and _MAGIC not in head + file.read()  # tags, behind all pages
                return "" if is_end else f"no page of Ogg at byte {offset}"
            _, _, flags, _, _, _, crc, count = _HEAD.unpack(head)
            sizes = file.read(count)
            content = file.read(sum(sizes))
            page = head[:_CRC_AT] + bytes(4) + head[_CRC_AT + 4 :] + sizes + content
            if len(content) < sum(sizes) or _crc(page) != crc:
                return f"the page of Ogg at byte {offset} has another checksum than its own"
            offset += len(page)
    return ""


def _crc(page: bytes) -> int:
    """CRC-32 with the bits of each byte from the highest on; zlib's takes them from the lowest."""
    found = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{found:032b}"[::-1], 2)


def pyav() -> Any:
    """The module `av`. Raises ImportError that says what to install."""
    try:
        import av
    except ImportError as error:
        raise ImportError("audio and video need PyAV. Run `pip install av`") from error
    return av


@contextlib.contextmanager
def media_errors(name: str, doing: str) -> Iterator[None]:
    """Make PyAV's errors a `MediaError`; those of reading the file pass."""
    error_type = pyav().error.FFmpegError
    try:
        yield
    except error_type as error:
        reason = error.strerror or type(error).__name__
        raise MediaError(f"{name}: {doing}: {reason}. The bytes are damaged or of an unsupported format") from error
    except (UnicodeDecodeError, OverflowError) as error:
        raise MediaError(f"{name}: {doing}: {error}. The header is damaged") from error


def open_container(file: BinaryIO, name: str) -> Any:
    """A file as PyAV's container; nothing of it is decoded. Raises `MediaError`, ImportError without PyAV."""
    with kept_place(file):
        head = file.read(16)
    if kind := next((kind for magic, kind in _NOT_READ.items() if head.startswith(magic)), ""):
        raise MediaError(f"{name}: {kind} {_UNSUPPORTED}")
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}
    with media_errors(name, "cannot be opened"):
        return pyav().open(file, container_options=options, buffer_size=_READ_BYTES, metadata_errors="replace")


@contextlib.contextmanager
def kept_place(file: BinaryIO) -> Iterator[None]:
    """Go on afterwards where a file is being read: an open container does not seek before each read."""
    place = file.tell()
    try:
        yield
    finally:
        file.seek(place)


def is_mp4(container: Any) -> bool:
    """Whether a container is MP4 or QuickTime."""
    return "mov" in container.format.name.split(",")


def first_stream(container: Any, kind: Literal["video", "audio"]) -> Any | None:
    """The first stream of a kind; no picture that is attached to a sound. None without one."""
    found = getattr(container.streams, kind)
    return next((one for one in found if not one.disposition & one.disposition.__class__.attached_pic), None)


def check_sums(stream: Any) -> None:
    """Have FLAC's decoder compare each frame with its checksum."""
    if stream.codec_context.name == "flac":
        stream.codec_context.options = {"err_detect": "crccheck+explode"}


def header_duration(container: Any, stream: Any, file: BinaryIO, origin: Fraction) -> tuple[Fraction | None, bool]:
    """The time at which a stream of a file ends by the headers, in seconds from `origin`, None where they do not say
    it; and whether it is this stream's, not that of the longest one.
    """
    if _is_guessed(container, stream, file):
        return None, False
    skipped = _opus_skip(container, stream)
    if stream.duration is not None:
        start = stream.start_time * stream.time_base if stream.start_time is not None and not skipped else 0
        begin = origin if stream.start_time is not None else 0
        return Fraction(start + stream.duration * stream.time_base) - skipped - begin, True
    if told := re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d{1,9})?)\d*", stream.metadata.get("DURATION", "")):  # Matroska's
        return int(told[1]) * 3600 + int(told[2]) * 60 + Fraction(told[3]) - skipped, True
    if container.duration is None:
        return None, False
    return Fraction(container.duration, 1_000_000) - skipped, len(container.streams) == 1


def _opus_skip(container: Any, stream: Any) -> Fraction:
    """The seconds that Opus decodes before its sound begins, and that lengths in Ogg and Matroska count; else 0.

    Its header: "OpusHead" │ version u8 │ channels u8 │ samples at 48,000 Hz to skip u16, little-endian (RFC 7845, 5.1).
    """
    context = stream.codec_context
    if container.format.name not in ("ogg", _MATROSKA) or context is None or "opus" not in context.name:
        return Fraction(0)
    return Fraction(int.from_bytes((context.extradata or b"")[10:12], "little"), 48_000)


def range_fault(container: Any, stream: Any, file: BinaryIO, begin_s: float, end_s: float | None) -> str:
    """Why there is no such range in a file, as far as its headers say; "" if there may be."""
    asked = f"a range from {begin_s} to {'its end' if end_s is None else f'{end_s} s'}"
    if not 0 <= begin_s < (float("inf") if end_s is None else end_s):
        return asked
    if container.duration is None or _is_guessed(container, stream, file):
        return ""
    lasts = Fraction(container.duration, 1_000_000)
    if begin_s < lasts and (end_s is None or end_s <= lasts + _CUT_S):
        return ""
    return f"{asked}, but the file ends at {float(lasts):.3f} s"


def _is_guessed(container: Any, stream: Any, file: BinaryIO) -> bool:
    """Whether FFmpeg takes a length from the first bit rate, or from a few times, which may be too short by far."""
    name = container.format.name
    if name == _MATROSKA and origin_of(container) > 0:
        return True  # some programs count from 0 on, and others from the first packet
    if name != "mp3" or stream.duration is None:
        return name in (*_GUESSED, "mpegts")
    with kept_place(file):
        frames = said_frames(file)
    rate = stream.codec_context.sample_rate
    told = stream.duration * stream.time_base * rate
    return frames is None or abs(frames * (1152 if rate >= 32_000 else 576) - told) > _MP3_PADDING


def origin_of(container: Any) -> Fraction:
    """The time at which a container begins, in seconds of its own clock."""
    begin = Fraction(container.start_time or 0, 1_000_000)
    starts = [each.start_time * each.time_base for each in container.streams if each.start_time is not None]
    return min((start for start in starts if abs(start - begin) < Fraction(1, 1_000_000)), default=begin)


def has_no_pts(container: Any, stream: Any) -> bool:
    """Whether a file does not say when frames are shown: AVI, where a frame is shown as long as its chunk lasts."""
    return bool(container.format.name == "avi" and stream.type == "video")


def is_reordered(container: Any, stream: Any) -> bool:
    """Whether chunks without times are in another order than the frames that they hold."""
    return has_no_pts(container, stream) and bool(stream.codec_context.has_b_frames)


def decoded_frames(container: Any, packet: Any, chunks: deque[int] | None) -> list[Any]:
    """The frames that come out of a packet, with their times.

    Without times in the file, those of its chunks, the empty ones counted. `chunks` has the times of chunks that went
    in whose frames are still to come: the nth frame shown has the nth time. None: chunks are in the order of frames.
    """
    if not has_no_pts(container, packet.stream):
        found: list[Any] = packet.decode()
    elif chunks is None:  # FFmpeg guesses for H.264 that each is shown one chunk later
        packet.pts = packet.dts
        found = packet.decode()
    else:
        if packet.size:
            chunks.append(packet.dts)
        found = packet.decode()
        for frame in found:
            frame.pts = chunks.popleft() if chunks else None
    return found


class MediaStream:
    """One stream of a file, decoded by one thread. Closes itself when it is freed; a context manager.

    Attributes:
        name: The file's name in messages.
        codec: The name of the codec, as FFmpeg has it.
    """

    kind: Literal["video", "audio"]
    codec: str

    def __init__(self, file: BinaryIO, name: str, *, begin_s: float = 0.0, end_s: float | None = None) -> None:
        self.name, self._file = name, file
        self._open()
        self._origin = origin_of(self._container) + Fraction(begin_s)
        self._end = None if end_s is None else Fraction(end_s) - Fraction(begin_s)
        self._is_range = end_s is not None or begin_s > 0
        self._whole = end_s is None  # else what follows in the file is of another range
        if fault := range_fault(self._container, self._stream, file, begin_s, end_s):
            self.close()
            raise MediaError(f"{name}: {fault}")

    def _open(self) -> None:
        """Open the file at its begin, and its stream of this kind."""
        self._container = open_container(self._file, self.name)
        stream = first_stream(self._container, self.kind)
        if stream is None or stream.codec_context is None:
            found = ", ".join(one.type for one in self._container.streams) or "nothing"
            self.close()
            raise MediaError(f"{self.name}: no {self.kind} that can be decoded (streams: {found})")
        for other in self._container.streams:
            if other is not stream:
                other.discard = type(other.discard).all
        check_sums(stream)
        stream.codec_context.thread_count, stream.codec_context.thread_type = 1, "NONE"
        self._stream, self.codec = stream, stream.codec_context.name
        if self.codec.startswith("wma"):
            self.close()
            raise MediaError(f"{self.name}: Windows Media audio {_UNSUPPORTED}")
        self._at_start = True  # nothing was decoded so far

    @property
    def duration_s(self) -> float:
        """The time from 0 to the end, in seconds: as the headers say, or where they do not, by reading all packets."""
        return float(self._duration)

    @property
    def _duration(self) -> Fraction:
        if self._end is None:
            origin = origin_of(self._container)
            told = header_duration(self._container, self._stream, self._file, origin)[0]
            self._end = self._packets_end() if told is None else told + origin - self._origin
            if self._end < 0:
                raise MediaError(f"{self.name}: its range starts {-float(self._end):.3f} s after the end of the file")
        return self._end

    def _check_end(self, reached: Fraction, wanted: Fraction) -> None:
        """Raise `MediaError` if a stream that was decoded to its end has less than its header says, up to `wanted`."""
        told, own = header_duration(self._container, self._stream, self._file, origin_of(self._container))
        begin, by = self._origin - origin_of(self._container), "its header (it was cut short)"
        if told is None and self._end is not None and not self._whole:
            told, own, by = self._end + begin, len(self._container.streams) == 1, "its range"
        if told is not None and own and min(wanted + begin, told) > reached + begin + _CUT_S:
            raise MediaError(
                f"{self.name}: its {self.kind} ends at {float(reached):.3f} s, not {float(told - begin):.3f} s by {by}"
            )

    def close(self) -> None:
        """Free the decoder; the file stays open."""
        self._container.close()

    def __del__(self) -> None:
        """Close it: PyAV's own objects refer to each other, and would keep megabytes until the next collection."""
        if hasattr(self, "_container"):
            self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _nearest_tick(self, time_s: float) -> int:
        """The tick that a time means: a clock of milliseconds says 501 for 12 frames at 24000/1001 Hz, or 500.5 ms.

        Where a range begins, a table says, which may be a sum of rounded lengths.
        """
        tick, time = self._stream.time_base, Fraction(time_s)
        late = LATE if self._counts_frames else max(tick / 2, LATE if self._is_range else 0)
        return self._ticks(time + late + min(_FLOAT + time * _FLOAT_SHARE, tick / 4))

    @property
    def _counts_frames(self) -> bool:
        """Whether a tick is the number of a frame, as in AVI: such a clock rounds no times."""
        rate: Fraction | None = self._stream.average_rate
        return bool(rate is not None and rate * self._stream.time_base > _COUNTS)

    def _ticks(self, time_s: float | Fraction) -> int:
        """A time on the stream's own clock, rounded down."""
        return int((self._origin + Fraction(time_s)) // self._stream.time_base)

    def _time(self, ticks: int) -> Fraction:
        """The time of a tick of the stream's clock."""
        return Fraction(ticks * self._stream.time_base) - self._origin

    def _decoded_from(self, ticks: int) -> Iterator[Any]:
        """The frames from the last one at or before `ticks` from which decoding can begin; else from the first."""
        begin = self._stream.start_time
        for earlier in _EARLIER if self._is_sought else ():
            target = ticks - int(earlier / self._stream.time_base)
            if begin is None or target <= begin:
                break
            frames = self._sought(target)
            first = next(frames, None)
            if first is not None and first.pts <= ticks:
                return itertools.chain((first,), frames)
        frames = self._from_start()
        first = next(frames, None)
        if first is None:
            raise MediaError(f"{self.name}: no frame of its {self.kind} can be decoded")
        return itertools.chain((first,), frames)

    @property
    def _is_sought(self) -> bool:
        """Whether the frames behind a point that is sought are those of a full decode."""
        return self._container.format.name not in _UNSOUGHT and not is_reordered(self._container, self._stream)

    def _sought(self, ticks: int) -> Iterator[Any]:
        """The frames from a point at or before `ticks`, as far as the container knows such points; else none."""
        self._at_start = False
        try:
            self._container.seek(ticks, stream=self._stream)
        except pyav().error.FFmpegError:  # as behind the begin of the last block of FLAC, which is whole
            self._open_anew()
            return iter(())
        return self._frames()

    def _from_start(self) -> Iterator[Any]:
        """The frames from the first one on; not every container can be sought to it."""
        self._open_anew()
        self._at_start = False
        return self._frames()

    def _open_anew(self) -> None:
        """Be as if nothing had been decoded so far."""
        if not self._at_start:
            self.close()
            self._file.seek(0)
            self._open()

    def _frames(self) -> Iterator[Any]:
        """The frames from here on, each with a time. Raises `MediaError` for a damaged one."""
        return _frames(self._container, self._stream, self.name, self.kind)

    def _packet_times(self) -> list[tuple[int, int]]:
        """Time and duration of each packet, in ticks, ascending; nothing is decoded. The file is read to its end."""
        with kept_place(self._file), media_errors(self.name, "its packets cannot be read"):
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
        times = self._packet_times()
        if not times:
            raise MediaError(
                f"{self.name}: its {self.kind} (raw {self.codec}) has no times. Run ffmpeg -i FILE -c copy FILE.mkv"
            )
        rate = getattr(self._stream, "average_rate", None)  # of video, whose last packet may have no length
        return self._time(times[-1][0] + times[-1][1]) + (1 / rate if rate and not times[-1][1] else 0)


def _frames(container: Any, stream: Any, name: str, kind: str) -> Iterator[Any]:
    """No method, so that who holds it is not held by it: decoders are freed at once, not by the next collection."""
    chunks: deque[int] | None = deque() if is_reordered(container, stream) else None
    decoded = (frame for packet in container.demux(stream) for frame in decoded_frames(container, packet, chunks))
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
