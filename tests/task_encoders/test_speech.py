"""`SpeechEncoder`: speech and text, alone, in packs and in batches; broken, silent, stereo, at any rate."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.rng import Rng
from savable_pipeline.errors import MediaError
from savable_pipeline.stages.task_encoder import Skip
from savable_pipeline.testing import assert_exact_resume
from task_encoders.parts.log_mel import log_mel
from task_encoders.parts.tokenizer import Tokenizer
from task_encoders.speech import SpecAugment, SpeechEncoder
from tests.support.media_files import audio_bytes, tone, video_bytes
from tests.support.toy_samples import item, sample, without_pixels, word_lengths, write_samples

RNG = Rng(7)
SECOND = audio_bytes(1.0)


def features(encoder: SpeechEncoder, audio: bytes, seed: int = 7, part: str = "flac") -> Any:
    """Return the features of one item, drawn with this key."""
    made = encoder.encode(sample({part: audio, "txt": "a"}), Rng(seed))
    assert isinstance(made, dict), made
    return made["features"]


def test_an_item_has_the_features_of_the_sound_and_the_tokens_of_the_text() -> None:
    made = item(SpeechEncoder(word_lengths), sample(flac=SECOND, txt="a bb"))
    assert (made["features"].shape, made["features"].dtype) == ((80, 100), torch.float32)
    np.testing.assert_allclose(made["features"], log_mel(tone(1.0, 16_000, 1)[0]), atol=5e-2)  # of 16 bits
    assert (made["frames"], made["tokens"].tolist(), made["labels"].tolist()) == (100, [1, 2], [2, -100])
    assert SpeechEncoder().length(made) == 100


@pytest.mark.parametrize("container", ["flac", "wav", "ogg", "mp3", "mp4", "webm"])
def test_features_depend_on_no_container_rate_or_number_of_channels(container: str) -> None:
    lossless, rate = container in ("flac", "wav"), 44_100 if container != "ogg" and container != "webm" else 48_000
    audio = audio_bytes(1.0, rate=rate, channels=2, container=container)
    made = features(SpeechEncoder(), audio, part=container)
    assert made.shape[1] in range(99, 110)  # codecs pad what they do not know the end of
    mixed = tone(1.0, 16_000, 2).mean(0)
    difference = np.abs(made.numpy()[:60, 5:90] - log_mel(mixed)[:60, 5:90])
    assert float(difference.mean()) < (0.03 if lossless else 0.2)


def test_silence_is_encoded_like_other_audio() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setparams((1, 2, 8_000, 0, "NONE", ""))
        made.writeframes(bytes(2 * 4_000))
    assert torch.equal(features(SpeechEncoder(), file.getvalue(), part="wav"), torch.full((80, 50), -1.5))


def test_every_item_has_the_requested_number_of_frames() -> None:
    made = item(SpeechEncoder(word_lengths, frames=3_000), sample(flac=SECOND, txt="a"))
    assert (made["features"].shape, made["frames"]) == ((80, 3_000), 100)
    np.testing.assert_array_equal(made["features"], features(SpeechEncoder(frames=3_000), SECOND))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"txt": "a"}, "no audio"),
        ({"flac": SECOND}, "no text"),
        ({"flac": SECOND, "txt": ""}, "no text"),
        ({"flac": audio_bytes(0.05), "txt": "a"}, "too short"),
        ({"flac": audio_bytes(2.1), "txt": "a"}, "too long"),
    ],
)
def test_sample_without_audio_or_text_is_skipped_by_its_reason(parts: dict[str, Any], reason: str) -> None:
    encoder = SpeechEncoder(max_s=2.0)
    made = encoder.encode(sample(parts), RNG)
    assert isinstance(made, Skip) and made.reason == reason
    assert encoder.length_of(sample(parts)) is None


@pytest.mark.parametrize("broken", [b"", b"no sound at all", SECOND[: len(SECOND) // 2], SECOND[:200] + b"\0" * 4_000])
def test_broken_audio_is_an_error_that_names_the_part(broken: bytes) -> None:
    with pytest.raises(MediaError, match="part 'flac' of sample 'a'"):
        SpeechEncoder().encode(sample(flac=broken, txt="a"), RNG)


def test_broken_audio_leaves_its_pack_and_is_counted_even_if_only_its_middle_is_broken(tmp_path: Path) -> None:
    headless, cut = b"no sound at all", SECOND[: len(SECOND) // 2]
    samples = [{"flac": broken or audio_bytes(0.3), "txt": "a"} for broken in (None, headless, cut) for _ in range(4)]
    shards = write_samples(tmp_path, samples)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        reader = sp.TarShardReader(str(shards), lane)
        packs = sp.OnlinePacker(sp.Encode(reader, SpeechEncoder(), on_error="skip"), max_length=100, open_packs=2)
        return sp.Batcher(packs, size=1)

    assert assert_exact_resume(pipeline, lanes=2, steps=6, workers=(0,), world_sizes=(1, 2), chains=1) > 6
    with sp.SavableLoader(pipeline, seed=3, lanes=1) as loader:
        made = [batch["frame_segments"].shape[1] for _, batch in zip(range(8), loader, strict=False)]
        skipped = loader.stats()["Encode/skipped/MediaError"]
    assert set(made) <= {30, 60, 90} and skipped >= 8 * (sum(made) // 30 // 4 - 1) > 0, (made, skipped)


def test_audio_and_text_come_from_named_parts_or_fields_or_a_video() -> None:
    encoder = SpeechEncoder(word_lengths, audio="en.wav", text="json[said]")
    other = audio_bytes(2.0, container="wav")
    given = sample({"wav": other, "en.wav": audio_bytes(1.0, container="wav"), "json": {"said": "a bb"}})
    assert (item(encoder, given)["frames"], item(encoder, given)["tokens"].tolist()) == (100, [1, 2])
    video = sample(mp4=video_bytes(24, fps=12, audio="aac"), txt="a")
    assert item(SpeechEncoder(), video)["frames"] in range(200, 210)
    assert SpeechEncoder().length_of(video) is None  # headers say how long the video is


@pytest.mark.parametrize("container", ["flac", "wav", "ogg", "mp3", "mp4"])
@pytest.mark.parametrize(("seconds", "rate"), [(0.5, 48_000), (1.00003, 32_000), (1.2345, 16_000), (0.777, 44_100)])
def test_the_length_by_the_header_is_that_of_the_item(container: str, seconds: float, rate: int) -> None:
    encoder = SpeechEncoder()
    rate = rate if container != "ogg" else 48_000
    given = sample({container: audio_bytes(seconds, rate=rate, container=container), "txt": "a"})
    assert encoder.length_of(given) == encoder.length(item(encoder, given))
    faster = SpeechEncoder(speeds=(1.1,))
    assert faster.length_of(given) == faster.length(item(faster, given))


def test_speed_is_drawn_for_each_sample_so_its_length_is_unknown_in_advance() -> None:
    encoder = SpeechEncoder(speeds=(0.5, 1.0, 2.0))
    lengths = [features(encoder, SECOND, seed).shape[1] for seed in range(20)]
    assert set(lengths) == {50, 100, 200}
    assert lengths == [features(encoder, SECOND, seed).shape[1] for seed in range(20)]
    assert encoder.length_of(sample(flac=SECOND, txt="a")) is None
    faster = features(SpeechEncoder(speeds=(2.0,)), SECOND)
    assert faster[:, 20].argmax() > features(SpeechEncoder(), SECOND)[:, 40].argmax()  # and its tone is higher


def test_masks_cover_bands_and_times_with_the_mean_and_never_the_padding() -> None:
    encoder = SpeechEncoder(frames=150, max_s=1.5, masks=SpecAugment(bands=1, band_width=9, times=1, time_width=20))
    whole = features(SpeechEncoder(frames=150, max_s=1.5), SECOND)
    shapes = set()
    for seed in range(20):
        covered = features(encoder, SECOND, seed)
        assert torch.equal(covered, features(encoder, SECOND, seed))
        changed = (covered != whole).numpy()
        assert not changed[:, 100:].any()
        rows, columns = changed[:, :100].mean(1) > 0.9, changed[:, :100].mean(0) > 0.9
        assert rows.sum() <= 9 and columns.sum() <= 20
        assert np.unique(covered.numpy()[changed]).tolist() in ([], [whole[:, :100].numpy().mean()])
        shapes.add((rows.argmax(), columns.argmax()))
    assert len(shapes) > 10


def test_a_batch_pads_sounds_with_silence_and_texts_with_zeros() -> None:
    encoder = SpeechEncoder(Tokenizer(word_lengths, eos=9))
    given = [sample(flac=SECOND, txt="a bb"), sample(flac=audio_bytes(0.5), txt="ccc")]
    long, short = items = [item(encoder, each) for each in given]
    batch = encoder.batch(items, RNG)
    assert (batch["features"].shape, batch["features"].dtype) == ((2, 80, 100), torch.float32)
    assert torch.equal(batch["features"][0], long["features"])
    assert torch.equal(batch["features"][1, :, :50], short["features"])
    assert batch["features"][1, :, 50:].unique().tolist() == [short["features"].min()]
    assert {name: value for name, value in without_pixels(batch).items() if name != "features"} == {
        "frames": [100, 50],
        "tokens": [[1, 2, 9], [3, 9, 0]],
        "labels": [[2, 9, -100], [9, -100, -100]],
        "position_ids": [[0, 1, 2], [0, 1, 0]],
        "lengths": [3, 2],
    }


def test_packs_say_of_which_item_each_frame_and_each_token_is() -> None:
    encoder = SpeechEncoder(word_lengths)
    texts, seconds = ("a bb", "ccc", "dddd"), (0.2, 0.1, 0.15)
    made = [item(encoder, sample(flac=audio_bytes(s), txt=text)) for s, text in zip(seconds, texts, strict=True)]
    batch = encoder.batch([encoder.pack(made[:2], RNG), encoder.pack(made[2:], RNG)], RNG)
    assert torch.equal(batch["features"][0], torch.cat([made[0]["features"], made[1]["features"]], 1))
    assert batch["frame_segments"].tolist() == [[0] * 20 + [1] * 10, [0] * 15 + [-1] * 15]
    assert batch["segments"].tolist() == [[0, 0, 1], [0, -1, -1]]
    assert (batch["tokens"].tolist(), batch["cu_seqlens"].tolist()) == ([[1, 2, 3], [4, 0, 0]], [0, 2, 3, 4, 6])
    assert batch["max_seqlen"] == 2


def test_pack_of_items_with_a_fixed_number_of_frames_has_only_frames_of_speech() -> None:
    encoder = SpeechEncoder(word_lengths, frames=100, max_s=1.0)
    made = item(encoder, sample(flac=audio_bytes(0.2), txt="a"))
    assert encoder.pack([made, made], RNG)["features"].shape == (80, 40)
    assert encoder.batch([made], RNG)["features"].shape == (1, 80, 100)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bins": 0}, "expected bins ≥ 1"),
        ({"min_s": 2.0, "max_s": 1.0}, "min_s ≤ max_s"),
        ({"speeds": ()}, "speeds in 0.1 … 10"),
        ({"speeds": (0.0,)}, "speeds in 0.1 … 10"),
        ({"frames": 2_999}, r"frames=2999 have room for 29.99 s, less than max_s=30.0"),
    ],
)
def test_a_setting_out_of_range_is_an_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeechEncoder(**wrong)
    with pytest.raises(ValueError, match="a share at most 1"):
        SpecAugment(time_share=1.5)
