"""The gradient of several ranks and micro-batches is that of one mean over all targets, which one rank has of all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.trainers.loss_scale import loss_scale
from tests.trainers.scaled_rank import LENGTHS, batches, joined_batch, loss_of, toy_model


def run(ranks: str, folder: Path, *arguments: str) -> None:
    """Run `scaled_rank` on these numbers of ranks."""
    module = ["tests.trainers.scaled_rank", ranks, str(folder), *arguments]
    subprocess.run([sys.executable, "-m", "tests.support.forked_ranks", *module], check=True, timeout=300)


def relative_error(one: list[Any], other: list[Any]) -> float:
    """Return the greatest difference, relative to the greatest value."""
    greatest = max(float(value.abs().max()) for value in one)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) / greatest


@pytest.mark.parametrize("accumulated", ["accumulated", "whole"])
def test_gradient_of_two_ranks_equals_that_of_one(tmp_path: Path, accumulated: str) -> None:
    model, whole = toy_model(), joined_batch(batches())
    loss_of(model, whole, "mean").backward()  # torch's own mean over all targets
    expected = [weight.grad for weight in model.parameters()]
    run("2", tmp_path, "loop", accumulated)
    for rank in range(2):
        assert (
            relative_error(expected, torch.load(tmp_path / f"loop-{accumulated}-{rank}-of-2.pt")) < 1e-6
        )  # scale is float32
    means = toy_model()
    for rank in range(2):
        (loss_of(means, joined_batch(batches()[rank::2]), "mean") / 2).backward()
    assert (
        relative_error(expected, [weight.grad for weight in means.parameters()]) > 0.05
    )  # what each rank's own mean gives


def test_one_process_divides_by_its_targets_also_without_any() -> None:
    assert float(loss_scale(batches())) == pytest.approx(1 / 1859)
    assert float(loss_scale([{"labels": torch.full((2, 3), -100)}])) == 1


@pytest.mark.landing  # each rank imports transformers
@pytest.mark.parametrize(("how", "accumulated"), [("hf", 1), ("hf", 2), ("function", 2)])
def test_hugging_faces_trainer_applies_the_loss_scale(tmp_path: Path, how: str, accumulated: int) -> None:
    with sp.ShardWriter(str(tmp_path / "shards")) as writer:
        for number, length in enumerate(LENGTHS):
            writer.write({"__key__": str(number), "txt": "abc defg hij"[number % 3 :] * length})
    run("1", tmp_path, how, str(2 * accumulated))
    run("2", tmp_path, how, str(accumulated))
    (one,) = (torch.load(path) for path in tmp_path.glob("*-0-of-1.pt"))
    two = [torch.load(path) for path in tmp_path.glob("*-of-2.pt")]
    assert len(two) == 2 and all(relative_error(one, each) < 1e-9 for each in two)
