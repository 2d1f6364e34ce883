"""`log_mel`: Whisper's features, beside those that transformers makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from task_encoders.parts.log_mel import HOP, RATE, log_mel


def noise(count: int) -> NDArray[np.float32]:
    """Return a rising tone in noise, first loud and then silent."""
    time = np.arange(count) / RATE
    rng = np.random.default_rng(0)
    made = np.sin(2 * np.pi * (200 + 500 * time) * time) * np.exp(-2 * time) + 0.01 * rng.standard_normal(count)
    return (made / 2).astype(np.float32)


def whisper_features(samples: NDArray[np.float32], bins: int) -> NDArray[np.float32]:
    """Return transformers' features of 30 s, float32 (bins, 3000), by torch's transform in float32."""
    from transformers import WhisperFeatureExtractor  # takes a second

    made = WhisperFeatureExtractor(feature_size=bins)(samples, sampling_rate=RATE, return_tensors="np")
    return np.asarray(made["input_features"][0])


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("count", [RATE * 2 + 77, RATE * 29 + 15_900, RATE * 31])
def test_thirty_seconds_equal_whispers_feature_extractor(bins: int, count: int) -> None:
    made = log_mel(noise(count), bins=bins, frames=3_000)
    assert (made.shape, made.dtype) == ((bins, 3_000), np.float32)
    np.testing.assert_allclose(made, whisper_features(noise(count), bins), atol=2e-4)


@pytest.mark.parametrize("bins", [80, 128])
def test_unpadded_audio_has_the_features_of_the_formula(bins: int) -> None:
    """That of torchaudio's `MelSpectrogram` with Slaney's scale and norm, as transformers writes it in float64."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    samples = noise(RATE + 80)
    filters = mel_filter_bank(201, bins, 0.0, 8_000.0, RATE, norm="slaney", mel_scale="slaney")
    whole = spectrogram(
        samples, window_function(400, "hann"), 400, HOP, power=2.0, mel_filters=filters, log_mel="log10"
    )
    expected = (np.maximum(whole[:, :-1], whole[:, :-1].max() - 8) + 4) / 4
    np.testing.assert_allclose(log_mel(samples, bins=bins), expected, atol=2e-6)


def test_silence_has_one_value_and_padding_has_the_least() -> None:
    assert np.unique(log_mel(np.zeros(RATE))).tolist() == [-1.5]
    made = log_mel(noise(RATE), frames=200)
    assert np.unique(made[:, 103:]).tolist() == [made.min()]


@pytest.mark.parametrize("count", [1, 7, 159, 160, 161, 399])
def test_a_few_samples_are_a_few_frames(count: int) -> None:
    frames = -(-count // HOP)
    made = log_mel(noise(count), frames=frames)
    assert made.shape == (80, frames) and np.isfinite(made).all()


def test_features_do_not_depend_on_threads_or_memory_alignment() -> None:
    samples, threads = noise(RATE * 6), torch.get_num_threads()
    made = log_mel(samples)
    try:
        torch.set_num_threads(2)
        assert log_mel(samples.copy()).tobytes() == made.tobytes()
    finally:
        torch.set_num_threads(threads)
    shifted = np.concatenate([np.zeros(1, np.float32), samples])[1:]  # at an address that is no multiple of 8
    assert log_mel(shifted).tobytes() == made.tobytes()


@pytest.mark.parametrize(("count", "frames"), [(0, None), (159, None), (0, 10), (160, 0)])
def test_audio_without_a_frame_is_an_error(count: int, frames: int | None) -> None:
    with pytest.raises(ValueError, match=f"expected at least 160 samples of audio, one frame, found {count}"):
        log_mel(noise(count), frames=frames)
