"""`Audio`: samples of an audio file by time, at any rate."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from math import ceil, gcd
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.data.media.container import MediaStream, media_errors, ogg_fault, pyav
from savable_pipeline.errors import MediaError

_BEFORE_S = Fraction(1, 4)  # decoded before the start, because a decoder's first frames depend on earlier ones
_AROUND = 64  # periods of the common clock of two rates to resample around the range, because the filter uses them
_GAP_S = Fraction(1, 500)  # most by which a container's clock rounds a frame's time
_MOST_SAMPLES = 1 << 30
_MOST_HZ = 1 << 22  # above any real rate; a damaged header with more would take gigabytes to resample a moment
_MOST_PLANES = 7  # channels that PyAV passes on in separate memory; with more, it reads beyond the end of a list
_OGG_S = 30  # of Ogg, decoded from the start, because seeking near it estimates positions from bytes


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
        self._ended: int | None = None  # the sample at which the audio ended, if the last range reached it
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
            float32 (channels, samples), from -1 to 1: `round((stop_s - start_s) * rate)` samples, zeros after the end
                and in
            pauses between two packets. Without `stop_s`, it ends at the last decoded sample, because headers round. The
                start is
            exact to one sample; in Matroska and WebM, whose clocks count milliseconds, to one of these.

        Raises:
            ValueError: The range starts before 0, or ends before it starts.
            MediaError: The audio is damaged.
        """
        start_s, stop = float(start_s), self._duration if stop_s is None else Fraction(float(stop_s))
        if not 0 <= start_s <= stop:
            raise ValueError(f"{self.name}: invalid range from {start_s} to {stop_s} s")
        if rate is not None and rate <= 0:
            raise ValueError(f"rate must be above 0 Hz, not {rate}")
        wanted = rate or self.rate
        count = round((stop - Fraction(start_s)) * wanted)
        if count * self.channels > _MOST_SAMPLES:
            raise ValueError(f"{self.name}: {count} samples at once. Read shorter ranges")
        first = round(Fraction(start_s) * self.rate)
        more = ceil(_GAP_S * wanted) if stop_s is None and self._whole else 0
        decode = self._native if wanted == self.rate else partial(self._resampled, rate=wanted)
        found = decode(first, count + more)
        if more:  # to the last decoded sample, unless the audio continues after the end in the header
            end = round((Fraction(self._ended or 0, self.rate) - Fraction(start_s)) * wanted)
            found = found[:, : count if self._ended is None or end > count + more else max(end, 0)]
        return found.mean(0, keepdims=True) if mono and len(found) > 1 else found

    def _resampled(self, first: int, count: int, rate: int) -> NDArray[np.float32]:
        """Return `count` samples at `rate`, starting at the stream's own sample `first`."""
        common = gcd(rate, self.rate)
        period, new_period = self.rate // common, rate // common
        around = -(-_AROUND // period) if period < _AROUND else 1
        before = around * period
        native = self._native(first - before, -(-count * self.rate // rate) + 2 * before)
        resampled = resample(native, self.rate, rate, self.name)[:, around * new_period :][:, :count]
        found = np.zeros((self.channels, count), np.float32)
        found[:, : resampled.shape[1]] = resampled
        return found

    def _native(self, first: int, count: int) -> NDArray[np.float32]:
        """Return the samples from number `first`, which may be negative.

        float32 (channels, count).
        """
        found = np.zeros((self.channels, count), np.float32)
        end = first + count if self._whole else round(self._duration * self.rate)
        expected: int | None = None
        self._ended = None
        for frame in self._frames_before(Fraction(first, self.rate)) if count else ():
            position = round(self._time(frame.pts) * self.rate)
            if expected is not None and abs(position - expected) <= _GAP_S * self.rate:
                position = expected  # frames are adjacent, even if a coarse clock differs
            elif expected is not None and self._is_counted:  # a damaged frame was skipped
                raise MediaError(f"{self.name}: damaged audio at {expected / self.rate:.3f} s")
            if position >= first + count:
                break
            block = self._floats(frame)
            expected = position + block.shape[1]
            low, high = max(position, first, 0), min(expected, first + count, end)
            if low < high:
                found[:, low - first : high - first] = block[:, low - position : high - position]
        else:
            self._ended = expected
            if count and self._is_ogg and Fraction(first, self.rate) <= _OGG_S and (fault := ogg_fault(self._file)):
                raise MediaError(f"{self.name}: damaged audio: {fault}")
            if count:
                self._check_end(Fraction(expected or 0, self.rate), Fraction(first + count, self.rate))
        return found

    @property
    def _is_counted(self) -> bool:
        """Whether times count samples without gaps, and damaged frames are skipped."""
        return self.codec == "flac" and self._container.format.name in ("flac", "ogg")

    @property
    def _is_ogg(self) -> bool:
        return bool(self._container.format.name == "ogg")

    def _frames_before(self, time: Fraction) -> Any:
        """Return the frames from some time before `time`."""
        if time <= (_OGG_S if self._is_ogg else 0):
            return self._from_start()
        # Reopen, because results could depend on earlier ranges: a demuxer learns seek points, and AAC decoders draw
        # noise from a generator.
        self._reopen()
        return self._decoded_from(self._ticks(max(time, Fraction(0)) - _BEFORE_S))

    def _floats(self, frame: Any) -> NDArray[np.float32]:
        """Convert a frame to float32 (channels, samples)."""
        if frame.layout.nb_channels != self.channels or frame.sample_rate != self.rate:
            raise MediaError(f"{self.name}: its audio changes from {self.channels} channels at {self.rate} Hz")
        if frame.format.is_planar and self.channels > _MOST_PLANES:
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
        """Return the same samples with those of all channels interleaved."""
        with media_errors(self.name, f"its {self.channels} channels cannot be read"):
            if self._packer is None:
                self._packer = pyav().AudioResampler(frame.format.packed.name, frame.layout, self.rate)
            (packed,) = self._packer.resample(frame)
        return packed


def resample(samples: NDArray[np.float32], rate: int, new_rate: int, name: str) -> NDArray[np.float32]:
    """Resample float32 (channels, samples) by FFmpeg's windowed sinc filter.

    The result has about the same duration.
    """
    groups = [samples[first : first + _MOST_PLANES] for first in range(0, len(samples), _MOST_PLANES)]
    return np.concatenate([_resampled(group, rate, new_rate, name) for group in groups])


def _resampled(samples: NDArray[np.float32], rate: int, new_rate: int, name: str) -> NDArray[np.float32]:
    """Resample few channels."""
    av = pyav()
    layout = f"{len(samples)}c"
    with media_errors(name, f"cannot be resampled from {rate} to {new_rate} Hz"):
        resampler = av.AudioResampler("fltp", layout, new_rate)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        frames = [*resampler.resample(frame), *resampler.resample(None)]
        return np.concatenate([one.to_ndarray() for one in frames], 1) if frames else samples[:, :0]
