"""Lengths that an encoder tells without encoding, and what happens where they are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.stages.encode import DeclaredSize


class Telling(sp.TaskEncoder):
    """Numbers as items of a length and images of their own; `told` and `told_images` change what is told."""

    global_rng = False
    told = told_images = 0

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        if number == 11:
            return sp.Skip("eleven")
        return self.parts(number) if number == 12 else number

    def parts(self, number: int) -> Iterator[int]:
        yield from (number, number)

    def length(self, item: int) -> int:
        return 1 + item % 4

    def images(self, item: int) -> int:
        return item % 3

    def length_of(self, sample: sp.Sample) -> int | None:
        number = int(sample.json()["id"])
        return None if number in (11, 12) and not self.told else 1 + number % 4 + (self.told if number > 4 else 0)

    def images_of(self, sample: sp.Sample) -> int:
        return int(sample.json()["id"] % 3) + self.told_images

    def cut(self, item: int, start: int, stop: int) -> Any:
        raise NotImplementedError

    def pack(self, items: list[int], rng: sp.Rng) -> Any:
        return list(items)


def packs(make_shards: Any, encoder: sp.TaskEncoder, *, skip: int = 0, **how: Any) -> sp.OnlinePacker:
    samples = sp.TarShardReader(str(make_shards([20])), sp.Lane(), epochs=1, shuffle=False)
    return sp.OnlinePacker(sp.Encode(samples, encoder, **how), max_length=6, policy="first_fit", open_packs=1)


def test_items_are_placed_by_what_is_told_and_encoded_otherwise(make_shards: Any) -> None:
    found = [number for pack in packs(make_shards, Telling()) for number in pack]
    assert sorted(found) == sorted([*range(11), 12, *range(12, 20)])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"told": 1}, r"Telling.length_of declared 3, but length of the item is 2; .* key 's000005'"),
        ({"told_images": 2}, r"Telling.images_of declared 2, but images of the item is 0; .* key 's000000'"),
    ],
)
def test_another_size_than_told_is_an_error_with_both_numbers_and_the_key(
    make_shards: Any, wrong: dict[str, int], message: str
) -> None:
    encoder = Telling()
    vars(encoder).update(wrong)
    with pytest.raises(sp.EncodeError, match=message):
        list(packs(make_shards, encoder))


@pytest.mark.parametrize(("number", "message"), [(11, "encode skipped the sample, 'eleven'"), (12, "makes several")])
def test_a_length_told_of_what_is_no_single_item_is_an_error(make_shards: Any, number: int, message: str) -> None:
    encoder = Telling()
    encoder.told = 1
    items = sp.Encode(sp.TarShardReader(str(make_shards([20])), sp.Lane(), shuffle=False), encoder)
    with pytest.raises(sp.EncodeError, match=f"length_of declared .*{message}.*key 's0000{number}'"):
        items.fetch((number, 0, 0))


def test_a_length_of_zero_is_an_error(make_shards: Any) -> None:
    encoder = Telling()
    encoder.told = -2
    with pytest.raises(sp.EncodeError, match=r"Telling.length_of raised ValueError: a length of 0"):
        list(packs(make_shards, encoder))


class Failing(Telling):
    """Fails for two samples: where it tells one's length, and where it encodes the other."""

    def length_of(self, sample: sp.Sample) -> int | None:
        if sample.json()["id"] == 2:
            raise OverflowError("too long to tell")
        return super().length_of(sample)

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        if sample.json()["id"] == 5:
            raise OverflowError("too long to encode")
        return super().encode(sample, rng)


def test_an_error_is_raised_or_skipped_as_that_of_encode(make_shards: Any) -> None:
    with pytest.raises(sp.EncodeError, match="too long to tell"):
        next(packs(make_shards, Failing()))
    stage = packs(make_shards, Failing(), on_error="skip")
    found = [number for pack in stage for number in pack]
    assert sorted(found) == sorted([0, 1, 3, 4, *range(6, 11), 12, *range(12, 20)])
    assert stage.source.counts["skipped/OverflowError"] == 2


def test_an_encoder_with_images_tells_nothing_unless_it_tells_them_too() -> None:
    class LengthsAlone(Telling):
        images_of = sp.TaskEncoder.images_of

    assert DeclaredSize(Telling()).known
    assert not DeclaredSize(LengthsAlone()).known
    assert not DeclaredSize(sp.TaskEncoder()).known
