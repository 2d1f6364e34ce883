"""Sounds as tokens: 25 a second, of features that do not depend on what would follow."""

from __future__ import annotations

import pytest
import torch

from task_encoders.parts.audio_tokens import AudioTokens
from task_encoders.parts.log_mel import log_mel
from tests.support.toy_media import ToneAudio


@pytest.mark.parametrize(
    ("samples", "frames", "tokens"),
    [(321, 3, 1), (16000, 100, 25), (16001, 101, 25), (16161, 102, 25), (16321, 103, 26)],
)
def test_a_second_is_a_hundred_frames_and_25_tokens(samples: int, frames: int, tokens: int) -> None:
    seen = AudioTokens(300).tokenize(ToneAudio(samples))
    assert seen.tokens == tokens
    assert seen.fields["audio_frames"].tolist() == [frames]
    assert seen.fields["audio_mels"].shape == (frames, 128)


def test_features_equal_those_of_the_audio_padded_with_silence() -> None:
    audio = ToneAudio(16000)  # the last window reaches beyond
    mels = AudioTokens(300, bins=80).tokenize(audio).fields["audio_mels"]
    assert torch.equal(mels.T, torch.from_numpy(log_mel(audio.tone[0], bins=80, frames=500))[:, :100])


def test_too_short_audio_and_settings_out_of_range_are_rejected() -> None:
    with pytest.raises(ValueError, match="audio of 320 samples at 16000 Hz is too short for a token"):
        AudioTokens(300).tokenize(ToneAudio(320))
    with pytest.raises(ValueError, match="bins, the mel bands, must be at least 1"):
        AudioTokens(300, bins=0)
