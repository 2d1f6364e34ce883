"""`ContrastiveEncoder`: pairs of image and text."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch

from savable_pipeline.core.rng import Rng
from savable_pipeline.stages.task_encoder import Skip
from task_encoders.contrastive import ContrastiveEncoder
from task_encoders.parts.square_crop import SquareCrop
from task_encoders.parts.tokenizer import Tokenizer
from tests.support.toy_samples import NAMES, digits, item, plain_png, sample, words

RNG = Rng(7)
SMALL = SquareCrop(8, augment=False)
ENDING = Tokenizer(words, bos=8, eos=9)


def test_a_batch_of_digits_pairs_each_image_with_its_padded_text() -> None:
    encoder = ContrastiveEncoder(ENDING, crop=SMALL)
    items = [item(encoder, sample(png=image, txt=f"a {NAMES[digit]}" * (digit + 1))) for image, digit in digits()[:2]]
    batch = encoder.batch(items, RNG)
    assert (batch["image"].shape, batch["image"].dtype) == ((2, 3, 8, 8), torch.float32)
    assert batch["tokens"].tolist() == [[8, 1, 4, 9, 0], [8, 1, 4, 3, 9]]
    assert batch["lengths"].tolist() == [4, 5]


def test_a_long_text_is_cut_and_keeps_its_end() -> None:
    encoder = ContrastiveEncoder(ENDING, crop=SMALL, max_tokens=4)
    assert item(encoder, sample(png=plain_png(8, 8), txt="a bb ccc dddd"))["tokens"].tolist() == [8, 1, 2, 9]


def test_one_of_several_texts_is_drawn_for_each_sample() -> None:
    encoder = ContrastiveEncoder(words, text="json[captions]", crop=SMALL)
    given = sample(png=plain_png(8, 8), json={"captions": ["a", "bb", "ccc"]})
    drawn = [encoder.encode(given, Rng(seed))["tokens"].item() for seed in range(30)]  # type: ignore[index]
    assert set(drawn) == {1, 2, 3}
    assert drawn == [encoder.encode(given, Rng(seed))["tokens"].item() for seed in range(30)]  # type: ignore[index]


@pytest.mark.parametrize(
    ("record", "reason"),
    [({"captions": []}, "no text"), ({"captions": ""}, "no text"), ({}, "no text")],
)
def test_no_text_is_a_reason_to_skip(record: Any, reason: str) -> None:
    made = ContrastiveEncoder(text="json[captions]", crop=SMALL).encode(sample(png=plain_png(8, 8), json=record), RNG)
    assert isinstance(made, Skip)
    assert made.reason == reason


def test_no_image_is_a_reason_to_skip() -> None:
    made = ContrastiveEncoder(crop=SMALL).encode(sample(txt="a"), RNG)
    assert isinstance(made, Skip)
    assert made.reason == "no image"


@pytest.mark.parametrize("wrong", [7, ["a", 7], {"a": 1}])
def test_what_is_no_text_is_an_error_that_names_the_field(wrong: Any) -> None:
    encoder = ContrastiveEncoder(text="json[captions]", crop=SMALL)
    with pytest.raises(ValueError, match=r"json\[captions\]: expected text or a list of texts"):
        encoder.encode(sample(png=plain_png(8, 8), json={"captions": wrong}), RNG)


@pytest.mark.parametrize("changed", [{"tokenizer": words}, {"text": "md"}, {"crop": SquareCrop(9)}, {"max_tokens": 9}])
def test_settings_change_with_every_argument_and_are_plain(changed: dict[str, Any]) -> None:
    made = ContrastiveEncoder(**changed)
    assert made.settings() != ContrastiveEncoder().settings()
    assert json.loads(json.dumps(made.settings())) == made.settings()
    assert pickle.loads(pickle.dumps(made)).settings() == made.settings()
