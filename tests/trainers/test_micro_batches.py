"""Micro-batches: each is what the encoder makes of its rows, and put together they are the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from savable_pipeline.core.rng import Rng
from savable_pipeline.trainers.micro_batches import micro_batches, rows, split
from task_encoders import CaptioningEncoder, ChatEncoder, LanguageModelingEncoder, NativeSize, Vision
from task_encoders.parts.image_text_tokens import MixedTokens

RNG = Rng(7)
LENGTH = 24


def documents(lengths: list[int]) -> list[dict[str, Any]]:
    """Return items of these numbers of tokens, all different."""
    return [
        {"tokens": torch.arange(n) + 100 * i, "labels": torch.arange(n) + 100 * i + 1} for i, n in enumerate(lengths)
    ]


def images_and_text(encoder: ChatEncoder, sizes: list[int]) -> dict[str, Any]:
    """Return an item with an image for each size, and text between them."""
    assert encoder.vision is not None
    mixed = MixedTokens(encoder.tokenizer, *encoder.media)
    mixed.add_text("so: ", target=True)
    for number, size in enumerate(sizes):
        seen = encoder.vision.tokenize(Image.new("RGB", (14 * size, 28), (number * 20, size, 0)))
        mixed.add(encoder.vision.pieces(seen))
        mixed.add_text("and", target=True)
    return mixed.item()


def are_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Return whether two batches are equal."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        if torch.is_tensor(value):
            assert value.dtype == right[name].dtype, name
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name


@given(lengths=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=3), min_size=1, max_size=6), data=st.data())
def test_each_part_of_a_batch_of_packs_is_the_batch_of_its_packs(lengths: list[list[int]], data: Any) -> None:
    encoder = LanguageModelingEncoder(max_length=LENGTH)
    packs = [encoder.pack(documents(each), RNG) for each in lengths]
    whole = encoder.batch(packs, RNG)
    n = data.draw(st.integers(1, len(packs)))
    parts = split(whole, n)
    sizes = [rows(part) for part in parts]
    assert (sum(sizes), len(sizes)) == (len(packs), n) and max(sizes) - min(sizes) <= 1
    first = 0
    for part, size in zip(parts, sizes, strict=True):
        are_equal(part, encoder.batch(packs[first : first + size], RNG))
        first += size


def test_images_stay_with_their_rows() -> None:
    encoder = ChatEncoder(vision=Vision(NativeSize(patch=14, merge=1, min_pixels=1), token=300), max_length=96)
    items = [images_and_text(encoder, sizes) for sizes in ([2, 4], [], [6], [3, 2, 2])]
    for made in (items, [encoder.pack([items[0], items[1]], RNG), *(encoder.pack([each], RNG) for each in items[1:])]):
        whole = encoder.batch(made, RNG)
        assert ("cu_seqlens" in whole) == ("cu_seqlens" in made[0])
        for part, own in zip(split(whole, 2), (made[:2], made[2:]), strict=True):
            are_equal(part, encoder.batch(own, RNG))
        are_equal(split(whole, 4)[1], encoder.batch(made[1:2], RNG))


def test_captions_of_a_part_refer_to_its_images() -> None:
    encoder = CaptioningEncoder(image_size=2)
    captions = [
        {"image": torch.full((3, 2, 2), i, dtype=torch.uint8), **each} for i, each in enumerate(documents([3, 2, 5, 4]))
    ]
    packs = [encoder.pack(captions[:2], RNG), encoder.pack(captions[2:3], RNG), encoder.pack(captions[3:], RNG)]
    whole = encoder.batch(packs, RNG)
    first, second = split(whole, 2)
    are_equal(first, encoder.batch(packs[:2], RNG))
    assert second["image_index"].tolist() == [[0, 0, 0, 0, -1]]
    assert torch.equal(second["image"], whole["image"][3:])


def test_unpacked_batch_is_split_by_rows() -> None:
    items = documents([3, 5, 2])
    pictures = [{"image": torch.zeros(3, 2, 2, dtype=torch.uint8), **each} for each in items]
    for batch in (LanguageModelingEncoder().batch(items, RNG), CaptioningEncoder(image_size=2).batch(pictures, RNG)):
        assert all(torch.is_tensor(value) and len(value) == 3 for value in batch.values())
        assert [part["lengths"].tolist() for part in split(batch, 3)] == [[3], [5], [2]]


def test_valid_mask_and_users_fields_are_split_with_the_rows() -> None:
    encoder = LanguageModelingEncoder(max_length=8)
    packs = [encoder.pack(documents([2, 3]), RNG), encoder.pack(documents([4]), RNG)]
    batch = {**encoder.batch(packs, RNG), "valid": torch.tensor([True, False]), "key": ["a", "b"], "drawn": 0.5}
    first, second = split(batch, 2, shared=["drawn"])
    assert (first["valid"].tolist(), first["key"], first["drawn"]) == ([True], ["a"], 0.5)
    assert (second["valid"].tolist(), second["key"], second["drawn"]) == ([False], ["b"], 0.5)


@pytest.mark.parametrize("named", [True, False])
def test_sample_ids_are_split_with_the_rows(named: bool) -> None:
    ids = torch.arange(12).view(4, 3)
    batch = {
        "tokens" if named else "x": torch.zeros(3, 4),
        "sample_ids": ids,
        "sample_rows": torch.tensor([0, 0, 2, 2]),
    }
    first, second, third = split(batch, 3)
    assert torch.equal(first["sample_ids"], ids[:2]) and torch.equal(third["sample_ids"], ids[2:])
    assert (first["sample_rows"].tolist(), third["sample_rows"].tolist()) == ([0, 0], [0, 0])
    assert second["sample_ids"].shape == (0, 3)
    alone = {"x": torch.zeros(4), "sample_ids": ids}
    assert torch.equal(split(alone, 2)[1]["sample_ids"], ids[2:])


@pytest.mark.parametrize("value", [7, 0.5, torch.tensor(3), torch.zeros(3), ["a"], "ab"])
def test_field_not_aligned_with_rows_is_rejected_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="field 'mine' does not have 2 rows"):
        split({"tokens": torch.zeros(2, 4), "mine": value}, 2)


def test_segments_across_rows_are_rejected() -> None:
    with pytest.raises(ValueError, match="no boundary at 0 or at 4"):
        split({"tokens": torch.zeros(2, 4), "cu_seqlens": torch.tensor([0, 5, 8])}, 2)


def test_more_parts_than_rows_and_batches_without_rows_are_rejected() -> None:
    with pytest.raises(ValueError, match="n must be 1 to 2, the rows of the batch, not 3"):
        split({"id": torch.arange(2)}, 3)
    with pytest.raises(ValueError, match="a has 2, b has 3"):
        rows({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="no field is a tensor"):
        rows({"a": 7})
    for size in (0, 1.5):
        with pytest.raises(ValueError, match=f"at least 1, not {size}"):
            micro_batches({"id": torch.arange(2)}, size)


def test_batches_can_be_split_by_size() -> None:
    batch = {"id": torch.arange(7), "image": torch.zeros(7, 3)}
    assert [part["id"].tolist() for part in micro_batches(batch, 3.0)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert rows(batch) == rows(batch["id"]) == 7
