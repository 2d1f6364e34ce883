"""What the batches for a DeepSpeed engine refuse. The engine is a stand-in; `drive.py` trains a real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.trainers import deepspeed as with_deepspeed


def test_example_matches_its_comment(runs: Any) -> None:
    assert runs(with_deepspeed.prepare_for_engine) == [1]


def engine_of(**given: Any) -> SimpleNamespace:
    one = {"micro_steps": 0, "world_size": 1, "dp_world_size": 1, "gradient_accumulation_steps": lambda: 1}
    return SimpleNamespace(**{**one, **given})


def test_processes_of_one_batch_need_shared_batches(make: Any) -> None:
    engine = engine_of(device="cpu", world_size=2)
    with pytest.raises(ValueError, match=r"of model_parallel need the same batches\. Pass ranks=sp\.Ranks\.of"):
        with_deepspeed.prepare_for_engine(engine, make(ranks=(0, 2)))
    with_deepspeed.prepare_for_engine(engine, make(ranks=(0, 1)))


def test_nothing_is_saved_between_two_steps(make: Any) -> None:
    engine = engine_of(device="cpu", gradient_accumulation_steps=lambda: 3)
    batches = with_deepspeed.prepare_for_engine(engine, make())
    for _ in zip(range(4), batches, strict=False):
        engine.micro_steps += 1
    with pytest.raises(sp.SavableError, match=r"the gradients of 1 of 3 batches .*engine\.micro_steps is a multiple"):
        batches.state_dict()
    engine.micro_steps = 6
    assert batches.state_dict()["slot"] == 4


def test_batches_are_moved_to_the_device_of_the_engine(make: Any) -> None:
    engine = engine_of(device="meta")
    assert next(iter(with_deepspeed.prepare_for_engine(engine, make())))["x"].device.type == "meta"
