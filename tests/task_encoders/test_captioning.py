"""`CaptioningEncoder`: image and caption, alone, in packs and in batches."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import UnidentifiedImageError

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.task_encoder import Skip
from task_encoders.captioning import CaptioningEncoder
from task_encoders.parts.tokenizer import Tokenizer
from tests.support.toy_samples import item, png, sample, word_lengths
from tests.support.toy_transformer import assert_packs_equal_documents

RNG = Rng(7)
BOS, EOS = 257, 258


NOISE = png(np.random.default_rng(0).integers(0, 256, (40, 60, 3)))


def sample_of_colour(red: int, caption: str) -> Sample:
    """Return a sample whose image has one colour."""
    return sample(png=png(np.full((4, 4, 3), (red, 0, 255))), txt=caption.encode())


def crop(encoder: CaptioningEncoder, seed: int) -> torch.Tensor:
    """Return the image of one noisy sample, drawn with this key."""
    made = encoder.encode(sample(png=NOISE, txt=b"noise"), Rng(seed))
    assert not isinstance(made, Skip)
    image: torch.Tensor = made["image"]
    return image


def text_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return all fields but the image, as lists."""
    return {name: v.tolist() if torch.is_tensor(v) else v for name, v in batch.items() if name != "image"}


def test_an_item_is_a_uint8_image_and_the_captions_tokens_labelled_with_the_next() -> None:
    made = item(CaptioningEncoder(image_size=8), sample(png=NOISE, txt=b"hi"))
    assert (made["image"].shape, made["image"].dtype) == ((3, 8, 8), torch.uint8)
    assert made["tokens"].tolist() == [BOS, 104, 105, EOS]
    assert made["labels"].tolist() == [104, 105, EOS, -100]
    assert CaptioningEncoder().length(made) == 4


def test_crop_depends_on_the_key() -> None:
    encoder = CaptioningEncoder(image_size=16)
    assert torch.equal(crop(encoder, 1), crop(encoder, 1))
    assert not torch.equal(crop(encoder, 1), crop(encoder, 2))


def test_augmentation_draws_from_the_generator_of_the_call_alone() -> None:
    encoder = CaptioningEncoder(image_size=16)
    assert encoder.global_rng is False
    torch.manual_seed(7)
    before = random.getstate(), np.random.get_state()
    crops = [crop(encoder, seed) for seed in range(20)]  # both ways of the flip
    assert random.getstate() == before[0]
    for old, new in zip(before[1], np.random.get_state(), strict=True):
        np.testing.assert_array_equal(old, new)
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    assert all(torch.equal(crop(encoder, seed), old) for seed, old in enumerate(crops))


def test_without_augmentation_the_image_is_its_central_square_and_nothing_is_drawn() -> None:
    encoder = CaptioningEncoder(image_size=2, augment=False)
    assert encoder.global_rng is False
    columns = np.broadcast_to(np.array([10, 20, 30, 40])[None, :, None], (2, 4, 3))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    image = item(encoder, sample(png=png(columns), txt=b"a"))["image"]
    assert image.tolist() == [[[20, 30], [20, 30]]] * 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("flip", "expected"), [(0.0, [10, 20]), (1.0, [20, 10])])
def test_flip_is_the_probability_to_mirror(flip: float, expected: list[int]) -> None:
    columns = np.broadcast_to(np.array([10, 20])[None, :, None], (2, 2, 3))
    encoder = CaptioningEncoder(image_size=2, crop_scale=(1.0, 1.0), flip=flip)
    image = item(encoder, sample(png=png(columns), txt=b"a"))["image"]
    assert image[0, 0].tolist() == expected


def test_the_caption_is_the_text_or_else_a_field_of_the_json() -> None:
    both = sample(png=NOISE, txt=b"a bb", json=json.dumps({"caption": "ccc"}).encode())
    only = sample(png=NOISE, json=json.dumps({"caption": "ccc", "alt": "a dddd"}).encode())
    made = [item(CaptioningEncoder(word_lengths), both), item(CaptioningEncoder(word_lengths), only)]
    made.append(item(CaptioningEncoder(word_lengths, caption="alt"), only))
    assert [each["tokens"].tolist() for each in made] == [[1, 2], [3], [1, 4]]


def test_a_long_caption_is_cut_and_its_last_label_is_the_token_that_would_follow() -> None:
    made = item(CaptioningEncoder(word_lengths, max_tokens=2), sample(png=NOISE, txt=b"a bb ccc dddd"))
    assert (made["tokens"].tolist(), made["labels"].tolist()) == ([1, 2], [2, 3])


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"txt": b"a caption"}, "no image"),
        ({"png": NOISE}, "no text"),
        ({"png": NOISE, "txt": b""}, "no text"),
        ({"png": NOISE, "json": b'{"title": "no caption"}'}, "no text"),
        ({"png": NOISE, "json": b'{"caption": null}'}, "no text"),
    ],
)
def test_a_sample_without_image_or_text_is_skipped_by_its_reason(parts: dict[str, bytes], reason: str) -> None:
    made = CaptioningEncoder().encode(sample(**parts), RNG)
    assert isinstance(made, Skip)
    assert made.reason == reason


def test_undecodable_image_raises_an_error() -> None:
    with pytest.raises(UnidentifiedImageError):
        CaptioningEncoder().encode(sample(png=b"not an image", txt=b"a"), RNG)


def test_a_batch_of_items_is_normalized_and_padded_to_the_longest() -> None:
    encoder = CaptioningEncoder(Tokenizer(word_lengths, eos=9), image_size=2, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    batch = encoder.batch(
        [item(encoder, sample_of_colour(255, "a bb")), item(encoder, sample_of_colour(0, "ccc"))], RNG
    )
    assert (batch["image"].shape, batch["image"].dtype) == ((2, 3, 2, 2), torch.float32)
    assert batch["image"][:, :, 0, 0].tolist() == [[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]]
    assert text_of(batch) == {
        "tokens": [[1, 2, 9], [3, 9, 0]],
        "labels": [[2, 9, -100], [9, -100, -100]],
        "position_ids": [[0, 1, 2], [0, 1, 0]],
        "lengths": [3, 2],
    }


def test_a_pack_stacks_the_images_and_joins_the_captions() -> None:
    encoder = CaptioningEncoder(word_lengths, image_size=2)
    pack = encoder.pack([item(encoder, sample_of_colour(10, "a bb")), item(encoder, sample_of_colour(20, "ccc"))], RNG)
    assert (pack["image"].shape, pack["image"].dtype) == ((2, 3, 2, 2), torch.uint8)
    assert pack["image"][:, 0, 0, 0].tolist() == [10, 20]
    assert text_of(pack) == {
        "tokens": [1, 2, 3],
        "labels": [2, -100, -100],
        "position_ids": [0, 1, 0],
        "cu_seqlens": [0, 2, 3],
        "max_seqlen": 2,
    }


def test_a_batch_of_packs_says_which_image_each_token_is_about() -> None:
    encoder = CaptioningEncoder(word_lengths, image_size=2, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    a, b, c = (item(encoder, sample_of_colour(*each)) for each in ((51, "a bb"), (102, "ccc"), (204, "dddd ee")))
    batch = encoder.batch([encoder.pack([a, b], RNG), encoder.pack([c], RNG)], RNG)
    assert batch["image"][:, 0, 0, 0].tolist() == pytest.approx([0.2, 0.4, 0.8])
    assert text_of(batch) == {
        "tokens": [[1, 2, 3], [4, 2, 0]],
        "labels": [[2, -100, -100], [2, -100, -100]],
        "position_ids": [[0, 1, 0], [0, 1, 0]],
        "cu_seqlens": [0, 2, 3, 5, 6],
        "max_seqlen": 2,
        "image_counts": [2, 1],
        "image_index": [[0, 0, 1], [2, 2, -1]],
    }


def test_model_computes_the_same_on_packs_as_on_single_captions() -> None:
    encoder = CaptioningEncoder(image_size=2)
    a, b, c = (item(encoder, sample_of_colour(10, caption)) for caption in ("one", "another", "a third of them"))
    assert_packs_equal_documents(encoder, [[a, b], [c]])


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1 pixel, not 0"):
        CaptioningEncoder(image_size=0)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        CaptioningEncoder(max_tokens=0)


def test_caption_that_is_not_text_is_an_error_that_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"json\[caption\]: expected text, found int 7"):
        CaptioningEncoder().encode(sample(png=NOISE, json=b'{"caption": 7}'), RNG)
