"""Log-mel features of speech as in Whisper: 80 or 128 bands, 100 frames a second.

See Radford et al., 2022.

    samples  ─ windows of 400 every 160 ─ |FFT|² ─ mel bands ─ log10 ─ at least the maximum - 8 ─ (x + 4) / 4

The arithmetic is NumPy's in float64 without BLAS, so no bit depends on the number of threads. It is as fast as
`torch.stft` with one thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.floating[Any]]

RATE = 16_000  # samples per second
WINDOW = 400  # samples of a frame: 25 ms
HOP = 160  # samples from one frame to the next: 10 ms
_CHUNK = 250  # frames transformed at once, few enough for the CPU's cache


def log_mel(samples: Floats, *, bins: int = 80, frames: int | None = None) -> NDArray[np.float32]:
    """Compute Whisper's features of one channel of audio.

    They equal those of `WhisperFeatureExtractor`.

    Args:
        samples: float (n,), between -1 and 1, 16,000 per second.
        bins: The number of mel bands, from 0 to 8,000 Hz (default 80).
        frames: The number of frames of the result. The audio is truncated, or padded with silence, to 160 samples per
            frame. 3,000 are the 30 s of Whisper. None (default): n // 160, which drops the last n % 160 samples.

    Returns:
        float32 (bins, frames), mostly between -1 and 1.5.

    Raises:
        ValueError: The audio is empty or shorter than one frame.

    Example:
        ```python
        import numpy as np
        from task_encoders.parts.log_mel import log_mel
        tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
        log_mel(tone).shape                # (80, 100)
        log_mel(tone, frames=3_000).shape  # (80, 3000)
        ```
    """
    length = len(samples) if frames is None else frames * HOP
    if length < HOP or len(samples) < 1:
        raise ValueError(f"expected at least {HOP} samples of audio, one frame, found {len(samples)}")
    power = np.zeros((bins, length // HOP))
    used_length = min(length, len(samples) + 2 * WINDOW)  # all windows after these samples are zero
    _mel_power(_fit_length(samples, used_length), power[:, : used_length // HOP])
    log = np.log10(np.maximum(power, 1e-10))
    result: NDArray[np.float32] = ((np.maximum(log, log.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
    return result


def _fit_length(samples: Floats, count: int) -> Floats:
    """Truncate or zero-pad to `count` samples, and mirror half a window at both ends."""
    padded = np.pad(samples[:count], (0, max(0, count - len(samples))))
    return np.pad(padded, WINDOW // 2, mode="reflect")


def _mel_power(padded: Floats, power: Floats) -> None:
    """Write the power of each band in each frame to `power`, float64 (bins, frames)."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)  # Hann's, periodic
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    for first in range(0, power.shape[1], _CHUNK):
        chunk = power[:, first : first + _CHUNK]
        spectrum = np.fft.rfft(windows[first : first + chunk.shape[1]] * window, axis=1)
        energy = np.ascontiguousarray((spectrum.real**2 + spectrum.imag**2).T)  # (201, frames)
        for band, (lowest, weights) in zip(chunk, _bands(len(power)), strict=True):
            np.sum(weights * energy[lowest : lowest + len(weights)], axis=0, out=band)


@cache
def _bands(bins: int) -> list[tuple[int, Floats]]:
    """Return for each band the index of its lowest frequency in the transform, and its weights, float64 (n, 1).

    A band is a triangle of area 1 between the centres of its neighbours. Centres are evenly spaced on Slaney's mel
    scale (Auditory Toolbox, 1998). It is linear up to 1,000 Hz, which are 15 mel, and grows by a factor of 6.4 per 27
    mel above.
    """
    mel = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), bins + 2)  # up to 8,000 Hz
    edges = np.where(mel < 15, mel * (1_000 / 15), 1_000 * 6.4 ** ((mel - 15) / 27))
    frequencies = np.arange(WINDOW // 2 + 1) * (RATE / WINDOW)
    result = []
    for low, centre, high in zip(edges, edges[1:], edges[2:], strict=False):
        rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
        weights = np.maximum(np.minimum(rising, falling), 0) * (2 / (high - low))
        nonzero = np.flatnonzero(weights)
        lowest, stop = (nonzero[0], nonzero[-1] + 1) if len(nonzero) else (0, 0)
        result.append((int(lowest), weights[lowest:stop, None]))
    return result
