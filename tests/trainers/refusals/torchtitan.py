"""What torchtitan's dataloader on a loader gives and refuses."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers import torchtitan as with_torchtitan

GIVEN: dict[str, Any] = {"dp_rank": 1, "dp_world_size": 2, "tokenizer": "words", "seq_len": 8, "local_batch_size": 4}


@pytest.mark.parametrize("name", [with_torchtitan.SavableDataLoader, with_torchtitan.inputs_and_labels])
def test_example_matches_its_comment(runs: Any, name: Any) -> None:
    assert runs(name) == [1]


def test_builder_gets_torchtitans_arguments_and_its_rank_resumes(make: Any) -> None:
    told: dict[str, Any] = {}

    def make_loader(*, ranks: sp.Ranks, **given: Any) -> sp.SavableLoader:
        told.update(given)
        return make(ranks=ranks)

    config = with_torchtitan.SavableDataLoader.Config(make=make_loader, convert=lambda batch: (batch, batch["label"]))
    one, other = (config.build(**GIVEN, snapshot_every_n_steps=5) for _ in range(2))
    sizes = {"tokenizer": "words", "seq_len": 8, "local_batch_size": 4}
    assert told == {**sizes, "infinite": True, "snapshot_every_n_steps": 5}
    list(islice(one, 3))
    other.load_state_dict(one.state_dict())
    expected = [digest(batch) for batch in islice(make(ranks=(1, 2)), 3, 7)]
    assert [digest(batch) for batch, _ in islice(other, 4)] == expected


def test_only_a_loader_is_accepted(make: Any) -> None:
    config = with_torchtitan.SavableDataLoader.Config(make=lambda **given: [])
    with pytest.raises(TypeError, match="make must return a SavableLoader, not list"):
        config.build(**GIVEN)


def test_trainer_gets_only_tokens_positions_and_labels() -> None:
    batch = {"tokens": torch.ones(1, 2), "labels": torch.zeros(1, 2), "position_ids": torch.arange(2), "max_seqlen": 2}
    inputs, labels = with_torchtitan.inputs_and_labels(batch)
    assert list(inputs) == ["input", "positions"] and labels is batch["labels"]
