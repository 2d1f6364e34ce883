"""The waveform and the spectrogram of a sound show its extremes, and each tone at its own place and time."""

from __future__ import annotations

import numpy as np

from savable_pipeline.tools.preview.sound_entries import spectrogram, spectrogram_pixels, waveform


def test_spectrogram_is_the_power_of_each_window_in_decibels() -> None:
    samples = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    found = spectrogram(samples)
    n = np.arange(512)
    hop = (16_000 - 512) // (found.shape[1] - 1)
    piece = samples[7 * hop : 7 * hop + 512] * np.sin(np.pi * n / 512) ** 2
    power = [abs((piece * np.exp(-2j * np.pi * f * n / 512)).sum()) ** 2 for f in range(257)]
    assert found.shape[0] == 257 and found.max() == 0
    difference = 10 * np.log10(power) - found[:, 7]
    assert np.ptp(difference[found[:, 7] > -79]) < 1e-6, "the same, but for the greatest of all"


def test_tones_are_at_their_frequency_and_time_and_silence_is_dark() -> None:
    times = np.arange(16_000) / 16_000
    samples = np.where(times < 0.5, np.sin(2 * np.pi * 1000 * times), np.sin(2 * np.pi * 6000 * times))
    pixels = spectrogram_pixels(samples.astype(np.float32))
    brightest = pixels.sum(axis=2).argmax(axis=0)
    quarter = len(brightest) // 4
    assert pixels.shape[0] == 128 and pixels.shape[1] <= 480
    assert abs(brightest[quarter] - (127 - 16)) <= 1 and abs(brightest[3 * quarter] - (127 - 96)) <= 1
    assert spectrogram_pixels(np.zeros(100, np.float32)).max() < 30


def test_a_waveform_shows_the_extremes_of_each_column_however_short_or_loud() -> None:
    samples = np.zeros(24_000, np.float32)
    samples[12_050], samples[12_061] = 1.0, -0.5
    points = [point.split() for point in waveform(samples)[1:-1].split("L")]
    heights = {(float(x), float(y)) for x, y in points}
    assert len(points) == 480 and min(y for _, y in heights) == 0.0 and max(y for _, y in heights) == 36.5
    assert waveform(np.zeros(0, np.float32)) == "" and waveform(np.array([9.0], np.float32)) == "M0 0.0L0 0.5Z"
