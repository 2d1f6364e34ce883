"""Audio as a waveform (SVG) and a spectrogram.

Arrays of a batch may be audio or features:

    audio     float (clips, channels, samples)   samples from -1 to 1
    features  float (clips, bins, frames)        log-mel features of encoders, or (frames, bins) of all clips

The spectrogram is the power of short pieces of the audio under a Hann window, in decibels below the greatest:

    S[f, t] = 10 log10 |Σ_n w[n] x[n + t·hop] e^(-2πi·f·n/N)|²,   w[n] = sin²(πn/N),   N = 512
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from savable_pipeline.tools.preview.image_entries import Pixels, describe_array, stretched
from savable_pipeline.tools.preview.page import Budget, CardEntry, Sound

Waveform = NDArray[np.float32]  # (samples,), from -1 to 1

WAVE_WIDTH, WAVE_HEIGHT = 240, 48  # size of the waveform's `viewBox`
_WINDOW = 512  # samples: N
_ROWS, _COLUMNS = 128, 480  # pixels of a spectrogram, at most
_LEAST_HOP = 64  # samples
_RANGE_DB = 80.0  # decibels below the greatest that are shown
_SILENCE_DB = -40.0  # about the noise of rounding to 16 bits; quieter audio is shown dark
_COLOURS = np.array([(8, 8, 24), (76, 20, 112), (196, 54, 88), (250, 148, 48), (252, 244, 190)], float)  # RGB


def waveform(samples: Waveform) -> str:
    """Return a closed SVG path of the range of the samples in each column.

    Returns "" if there are no samples.
    """
    if not len(samples):
        return ""
    columns = np.array_split(samples, min(WAVE_WIDTH, len(samples)))
    heights = np.array([(column.max(), column.min()) for column in columns]).clip(-1, 1)  # (columns, 2)
    middle = WAVE_HEIGHT / 2
    upper = (middle - 0.5 - middle * heights[:, 0]).clip(0)
    lower = middle + 0.5 - middle * heights[:, 1]
    xs = np.linspace(0, WAVE_WIDTH, len(columns))
    points = [*zip(xs, upper, strict=True), *reversed([*zip(xs, lower, strict=True)])]
    return "M" + "L".join(f"{x:.0f} {y:.1f}" for x, y in points) + "Z"


def spectrogram(samples: Waveform) -> NDArray[np.float64]:
    """Return decibels relative to the loudest, -80 to 0: float64 (frequencies, times).

    Frequencies are from 0 Hz to half the sample rate.
    """
    padded = np.pad(samples, (0, max(0, _WINDOW - len(samples)))).astype(np.float64)
    hop = max(_LEAST_HOP, -(-(len(padded) - _WINDOW) // (_COLUMNS - 1)))
    pieces = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::hop]
    window = np.sin(np.pi * np.arange(_WINDOW) / _WINDOW) ** 2
    power = np.abs(np.fft.rfft(pieces * window, axis=1).T) ** 2
    decibels = 10 * np.log10(np.maximum(power, 1e-20))
    below: NDArray[np.float64] = np.maximum(decibels - max(decibels.max(), _SILENCE_DB), -_RANGE_DB)
    return below


def spectrogram_pixels(samples: Waveform) -> Pixels:
    """Return the spectrogram as colours: uint8 (128, times, 3).

    Low frequencies are at the bottom.
    """
    decibels = spectrogram(samples)
    return coloured(decibels[1:].reshape(_ROWS, -1, decibels.shape[1]).max(axis=1) / _RANGE_DB + 1)


def coloured(values: NDArray[np.floating[Any]]) -> Pixels:
    """Return numbers from 0 (dark) to 1 (bright) as colours.

    `values` is (frequencies, times). The result is uint8 (frequencies, times, 3) with the first row at the bottom.
    """
    scaled = values[::-1] * (len(_COLOURS) - 1)
    channels = [np.interp(scaled, np.arange(len(_COLOURS)), channel) for channel in _COLOURS.T]
    return np.stack(channels, axis=-1).astype(np.uint8)


def embed_spectrogram(pixels: Pixels, budget: Budget) -> str:
    """Return a spectrogram as a data URI, or "" if the budget does not allow it."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "JPEG", quality=85)
    return budget.embed("image/jpeg", file.getvalue())


_AUDIO_NAMES = ("audio", "sound", "wave", "speech")  # words in the names of fields that are audio
_FEATURE_NAMES = ("mel", "features", "spectrogram")
_FEATURE_BINS = (40, 64, 80, 96, 128)
_MOST_CHANNELS = 8
_LEAST_SAMPLES = 400  # of an array that may be audio
_MOST_CLIPS = 4  # clips of a field that are shown
_MOST_SAMPLES = 480_000  # samples of a clip that are shown
_MOST_FRAMES = 3_000


def sound_entry(name: str, value: Any, array: NDArray[Any], budget: Budget) -> CardEntry | None:
    """Return the entry of an array of audio or features.

    The field's name tells which of them it is. Returns None for other arrays.
    """
    if array.dtype.kind != "f" or not array.size or not 1 <= array.ndim <= 3:
        return None
    field = name.lower().rpartition(".")[2]
    if any(word in field for word in _FEATURE_NAMES):
        return _features_entry(name, describe_array(value, array), array, budget)
    if any(word in field for word in _AUDIO_NAMES) and array.shape[-1] >= _LEAST_SAMPLES:
        return _sounds_entry(name, describe_array(value, array), array, budget)
    return None


def _sounds_entry(name: str, note: str, array: NDArray[Any], budget: Budget) -> CardEntry | None:
    """Return the entry of arrays of samples, or None if the array is not audio."""
    # rows may be channels or clips, so each is shown separately
    sounds = array if array.ndim == 3 else array.reshape(-1, 1, array.shape[-1])
    if sounds.shape[1] > _MOST_CHANNELS:
        return None
    shown = [np.nan_to_num(sound[:, :_MOST_SAMPLES].mean(axis=0, dtype=np.float32)) for sound in sounds[:_MOST_CLIPS]]
    images = [embed_spectrogram(spectrogram_pixels(samples), budget) for samples in shown]
    notes = [f"sound {number} of {len(sounds):,}" for number in range(len(shown))]
    sounds_shown = zip(map(waveform, shown), images, notes, strict=True)
    return CardEntry(name, note, sounds=[Sound(path, image, text) for path, image, text in sounds_shown])


def _features_entry(name: str, note: str, array: NDArray[Any], budget: Budget) -> CardEntry | None:
    """Return the entry of log-mel features, or None if the array has no such shape."""
    if array.ndim == 2 and array.shape[1] in _FEATURE_BINS:
        array = array.T[None]
    if array.ndim != 3 or array.shape[1] not in _FEATURE_BINS:
        return None
    scaled = [stretched(features[:, :_MOST_FRAMES]) / 255 for features in array[:_MOST_CLIPS]]
    notes = [f"sound {number} of {len(array):,}" if len(array) > 1 else "" for number in range(len(scaled))]
    images = [embed_spectrogram(coloured(features), budget) for features in scaled]
    return CardEntry(name, note, sounds=[Sound("", image, text) for image, text in zip(images, notes, strict=True)])
