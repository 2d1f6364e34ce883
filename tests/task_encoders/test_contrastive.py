"""`ContrastiveEncoder`: pairs of image and text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from savable_pipeline import Clips
from savable_pipeline.core.rng import Rng
from savable_pipeline.stages.task_encoder import Skip
from task_encoders.contrastive import ContrastiveEncoder
from task_encoders.parts.square_crop import SquareCrop
from task_encoders.parts.tokenizer import Tokenizer
from tests.support.media_files import frame_number, video_bytes
from tests.support.toy_samples import item, plain_png, sample, word_lengths

RNG = Rng(7)
SMALL = SquareCrop(8, augment=False)
ENDING = Tokenizer(word_lengths, bos=8, eos=9)


def test_a_batch_pairs_each_image_with_its_padded_text() -> None:
    encoder = ContrastiveEncoder(ENDING, crop=SMALL)
    texts = ["a zero", "a onea one"]
    items = [item(encoder, sample(png=plain_png(8, 8, 90 * i), txt=text)) for i, text in enumerate(texts)]
    batch = encoder.batch(items, RNG)
    assert (batch["image"].shape, batch["image"].dtype) == ((2, 3, 8, 8), torch.float32)
    assert batch["tokens"].tolist() == [[8, 1, 4, 9, 0], [8, 1, 4, 3, 9]]
    assert batch["lengths"].tolist() == [4, 5]


def test_long_text_is_truncated_before_its_end_token() -> None:
    encoder = ContrastiveEncoder(ENDING, crop=SMALL, max_tokens=4)
    assert item(encoder, sample(png=plain_png(8, 8), txt="a bb ccc dddd"))["tokens"].tolist() == [8, 1, 2, 9]


def test_one_of_several_texts_is_drawn_for_each_sample() -> None:
    encoder = ContrastiveEncoder(word_lengths, text="json[captions]", crop=SMALL)
    given = sample(png=plain_png(8, 8), json={"captions": ["a", "bb", "ccc"]})
    drawn = [encoder.encode(given, Rng(seed))["tokens"].item() for seed in range(30)]  # type: ignore[index]
    assert set(drawn) == {1, 2, 3}
    assert drawn == [encoder.encode(given, Rng(seed))["tokens"].item() for seed in range(30)]  # type: ignore[index]


@pytest.mark.parametrize(
    ("record", "reason"),
    [({"captions": []}, "no text"), ({"captions": ""}, "no text"), ({}, "no text")],
)
def test_sample_without_text_is_skipped(record: Any, reason: str) -> None:
    made = ContrastiveEncoder(text="json[captions]", crop=SMALL).encode(sample(png=plain_png(8, 8), json=record), RNG)
    assert isinstance(made, Skip)
    assert made.reason == reason


def test_sample_without_image_is_skipped() -> None:
    made = ContrastiveEncoder(crop=SMALL).encode(sample(txt="a"), RNG)
    assert isinstance(made, Skip)
    assert made.reason == "no image"


@pytest.mark.parametrize("wrong", [7, ["a", 7], {"a": 1}])
def test_value_that_is_not_text_is_an_error_that_names_the_field(wrong: Any) -> None:
    encoder = ContrastiveEncoder(text="json[captions]", crop=SMALL)
    with pytest.raises(ValueError, match=r"json\[captions\]: expected text or a list of texts"):
        encoder.encode(sample(png=plain_png(8, 8), json={"captions": wrong}), RNG)


VIDEO = video_bytes(24, fps=12)
CLIPS = Clips(length_s=0.5, fps=8)  # 4 frames


def clip_items(encoder: ContrastiveEncoder, seed: int = 7, **parts: Any) -> list[Any]:
    """Return the items of a sample's clips, drawn with this key."""
    made = encoder.encode(sample(parts), Rng(seed))
    assert not isinstance(made, Skip | dict)
    return list(made)


def test_a_clip_of_a_video_is_paired_with_the_text() -> None:
    encoder = ContrastiveEncoder(ENDING, crop=SquareCrop(32, augment=False), clips=CLIPS)
    drawn = []
    for seed in range(10):
        (made,) = clip_items(encoder, seed, mp4=VIDEO, txt="a bb")
        assert (made["video"].shape, made["video"].dtype) == ((4, 3, 32, 32), torch.uint8)
        assert made["tokens"].tolist() == [8, 1, 2, 9]
        drawn.append(made["video"])
    (again,) = clip_items(encoder, 9, mp4=VIDEO, txt="a bb")
    assert torch.equal(again["video"], drawn[-1])
    assert len({each.numpy().tobytes() for each in drawn}) > 5
    batch = encoder.batch([{"video": each, "tokens": again["tokens"]} for each in drawn[:2]], RNG)
    assert (batch["video"].shape, batch["video"].dtype) == ((2, 4, 3, 32, 32), torch.float32)
    assert torch.equal(batch["video"][1], encoder.crop.normalize(drawn[1]))
    assert batch["lengths"].tolist() == [4, 4]


def test_all_frames_of_a_clip_have_the_same_random_crop() -> None:
    columns = np.broadcast_to(np.arange(64, dtype=np.uint8) * 4, (5, 3, 48, 64))
    crop, seen = SquareCrop(16, scale=(0.3, 1.0)), set()
    for seed in range(20):
        cut = crop.clip(columns, Rng(seed))
        assert all(torch.equal(frame, cut[0]) for frame in cut)
        assert torch.equal(cut, crop.clip(columns, Rng(seed)))
        seen.add(tuple(cut[0, 0, 0, [0, -1]].tolist()))
    assert len(seen) > 10 and {left < right for left, right in seen} == {False, True}
    central = SquareCrop(48, augment=False).clip(columns, RNG)
    assert central[0, 0, 0].tolist() == columns[0, 0, 0, 8:56].tolist()


def test_several_clips_of_a_video_are_several_items() -> None:
    encoder = ContrastiveEncoder(
        word_lengths,
        crop=SquareCrop(48, augment=False),
        text="json[texts]",
        clips=Clips(length_s=0.5, fps=4, stride_s=0.5),
    )
    texts = {"texts": ["a", "bb"]}
    made = clip_items(
        encoder, webm=video_bytes(24, fps=12, size=(48, 48), container="webm", codec="libvpx"), json=texts
    )
    shown = [[frame_number(frame.numpy()) for frame in each["video"]] for each in made]
    assert shown == [[0, 3], [6, 9], [12, 15], [18, 21]]
    assert {each["tokens"].item() for each in made} <= {1, 2}


@pytest.mark.parametrize("video", [None, "top.mp4"])
def test_sample_without_the_video_is_skipped(video: str | None) -> None:
    given = sample({"png": plain_png(8, 8), "txt": "a"} | ({"mp4": VIDEO} if video else {}))
    made = ContrastiveEncoder(clips=CLIPS, video=video).encode(given, RNG)
    assert isinstance(made, Skip) and made.reason == "no video"


def test_a_clip_without_a_text_is_skipped() -> None:
    (made,) = clip_items(ContrastiveEncoder(clips=CLIPS), mp4=VIDEO)
    assert isinstance(made, Skip) and made.reason == "no text"
