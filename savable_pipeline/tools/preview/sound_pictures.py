"""Pictures of a sound: its waveform as a path of SVG, and its spectrogram.

The spectrogram is the power of short pieces of the sound under Hann's window, in decibels below the greatest:

    S[f, t] = 10 log10 |Σ_n w[n] x[n + t·hop] e^(-2πi·f·n/N)|²,   w[n] = sin²(πn/N),   N = 512
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from savable_pipeline.tools.preview.image_entries import Pixels
from savable_pipeline.tools.preview.room import Room

Samples = NDArray[np.float32]  # (samples,), from -1 to 1

WAVE_WIDTH, WAVE_HEIGHT = 240, 48  # of the waveform's `viewBox`
_WINDOW = 512  # samples: N
_ROWS, _COLUMNS = 128, 480  # pixels of a spectrogram, at most
_LEAST_HOP = 64  # samples
_RANGE_DB = 80.0
_SILENCE_DB = -40.0  # the rounding of 16 bits is about as loud: silence is dark
_COLOURS = np.array([(8, 8, 24), (76, 20, 112), (196, 54, 88), (250, 148, 48), (252, 244, 190)], float)  # RGB


def waveform(samples: Samples) -> str:
    """The least and the greatest of the samples of each column, as a closed path; "" for no samples."""
    if not len(samples):
        return ""
    columns = np.array_split(samples, min(WAVE_WIDTH, len(samples)))
    heights = np.array([(column.max(), column.min()) for column in columns]).clip(-1, 1)
    middle = WAVE_HEIGHT / 2
    high, low = (middle - 0.5 - middle * heights[:, 0]).clip(0), (middle + 0.5 - middle * heights[:, 1])
    across = np.linspace(0, WAVE_WIDTH, len(columns))
    points = [*zip(across, high, strict=True), *reversed([*zip(across, low, strict=True)])]
    return "M" + "L".join(f"{x:.0f} {y:.1f}" for x, y in points) + "Z"


def spectrogram(samples: Samples) -> NDArray[np.float64]:
    """Decibels below the greatest, -80 to 0, float64 (frequencies, times): from 0 Hz to half the rate."""
    padded = np.pad(samples, (0, max(0, _WINDOW - len(samples)))).astype(np.float64)
    hop = max(_LEAST_HOP, -(-(len(padded) - _WINDOW) // (_COLUMNS - 1)))
    pieces = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::hop]
    window = np.sin(np.pi * np.arange(_WINDOW) / _WINDOW) ** 2
    power = np.abs(np.fft.rfft(pieces * window, axis=1).T) ** 2
    decibels = 10 * np.log10(np.maximum(power, 1e-20))
    below: NDArray[np.float64] = np.maximum(decibels - max(decibels.max(), _SILENCE_DB), -_RANGE_DB)
    return below


def spectrogram_pixels(samples: Samples) -> Pixels:
    """The spectrogram as colours, low frequencies at the bottom: uint8 (128, times, 3)."""
    decibels = spectrogram(samples)
    return coloured(decibels[1:].reshape(_ROWS, -1, decibels.shape[1]).max(axis=1) / _RANGE_DB + 1)


def coloured(shares: NDArray[np.floating[Any]]) -> Pixels:
    """Numbers from 0, dark, to 1, (frequencies, times), as colours: uint8 (frequencies, times, 3), the first below."""
    place = shares[::-1] * (len(_COLOURS) - 1)
    channels = [np.interp(place, np.arange(len(_COLOURS)), channel) for channel in _COLOURS.T]
    return np.stack(channels, axis=-1).astype(np.uint8)


def picture_of(pixels: Pixels, room: Room) -> str:
    """A spectrogram as a data URI, or "" where there is no room for it."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "JPEG", quality=85)
    return room.take("image/jpeg", file.getvalue())
