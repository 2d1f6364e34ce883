"""`SavableLoader(sample_ids=True)` and `sources`: which samples a batch was made of, with the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline


@pytest.fixture
def shards(make_shards: Any) -> str:
    return str(make_shards([40, 7, 60]))


@pytest.mark.parametrize(
    ("num_workers", "pack", "blend"), [(0, None, None), (2, "best_fit", "nested"), (0, "best_fit", None)]
)
def test_each_row_has_source_index_and_part_of_its_samples(
    shards: str, num_workers: int, pack: str | None, blend: str | None
) -> None:
    pipeline = partial(toy_pipeline, shards, pack=pack, blend=blend)
    with sp.SavableLoader(pipeline, seed=3, lanes=12, num_workers=num_workers, sample_ids=True) as own:
        assert own.sources == (["c", "x/a", "x/b"] if blend else [""])
        for _, batch in zip(range(30), own, strict=False):
            traced = own.trace()
            ids = batch["sample_ids"]
            assert ids.dtype == torch.int64 and ids.shape == (len(traced.samples), 3)
            assert ids[:, 1:].tolist() == [[sample.ref.index, sample.ref.part] for sample in traced.samples]
            if pack is None:
                assert ids[:, 1].tolist() == [item["id"] for item in batch["items"]] and "sample_rows" not in batch
            elif "sample_rows" in batch:
                counts = torch.bincount(batch["sample_rows"], minlength=2).tolist()
                assert counts == [len(row) for row in traced.rows]


def test_sources_map_ids_to_blended_names(shards: str) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        sources = {name: sp.TarShardReader(shards, lane, subset=part) for name, part in PARTS.items()}
        return sp.Batcher(sp.Encode(sp.Blend(sources, weights={"web": 2, "books": 1}), Numbers()), size=4)

    alone = {name: {sample.json()["id"] for sample in sp.TarShardReader(shards, sp.Lane(), subset=part, epochs=1)}
             for name, part in PARTS.items()}  # fmt: skip
    with sp.SavableLoader(pipeline, seed=1, lanes=2, sample_ids=True) as own:
        for _, batch in zip(range(20), own, strict=False):
            for source, index, _ in batch["sample_ids"].tolist():
                assert index in alone[own.sources[source]]


PARTS: dict[str, Any] = {"web": (0.0, 0.5), "books": (0.5, 1.0)}


class Numbers(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"]}


def test_padding_rows_have_no_sample(shards: str) -> None:
    with sp.SavableLoader(partial(counted_pipeline, shards), seed=3, lanes=12, tail="pad", sample_ids=True) as own:
        for batch in own:
            assert (batch["sample_ids"][:, 0] >= 0).tolist() == batch["valid"].tolist()


def test_state_is_the_same_with_and_without_ids(shards: str) -> None:
    with_ids, without = (
        sp.SavableLoader(partial(toy_pipeline, shards), seed=3, lanes=12, sample_ids=ids) for ids in (True, False)
    )
    for _ in range(5):
        with_ids.load_state_dict(without.state_dict())
        first, second = next(with_ids), next(without)
        assert str(second) == str({name: value for name, value in first.items() if not name.startswith("sample_")})
    assert with_ids.state_dict() == without.state_dict()


class Lists(Numbers):
    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


class Takes(Numbers):
    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"sample_ids": items}


@pytest.mark.parametrize("encoder", [Lists(), Takes()])
def test_batch_without_room_for_ids_is_an_error_and_not_yielded(shards: str, encoder: sp.TaskEncoder) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane), encoder), size=4)

    own = sp.SavableLoader(pipeline, seed=3, lanes=2, sample_ids=True)
    before = own.state_dict()
    with pytest.raises(sp.EncodeError, match=r"Return a dict without them from batch\(\), not (list|dict)"):
        next(own)
    assert own.state_dict() == before
