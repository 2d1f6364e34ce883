"""What is hardly meant is said when a pipeline is built or first looked at, in an error or in the log."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader import local_lanes
from task_encoders import LanguageModelingEncoder
from tests.support.toy_faults import NumberEncoder


def said_of(pipeline: Callable[[sp.Lane], Any], caplog: pytest.LogCaptureFixture, **settings: Any) -> list[str]:
    """What is said of a pipeline in the log, from its loader's first batch on."""
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, "savable_pipeline.run.loader.local_lanes"),
        sp.SavableLoader(pipeline, seed=0, lanes=1, **settings) as own,
    ):
        next(own)
        own.close()
        next(own)
    return [
        f"{record.levelname} {record.message}"
        for record in caplog.records
        if record.funcName in ("log_hints", "_warn_of_blocks")
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pipeline_with_all_stages_gets_no_hint(
    make_shards: Any, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    root = str(make_shards([20]))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        samples = sp.ShuffleBuffer(sp.TarShardReader(root, lane), size=4)
        return sp.Batcher(sp.Encode(samples, NumberEncoder()), size=4)

    assert said_of(pipeline, caplog, num_workers=num_workers) == []


def test_pipeline_without_a_batcher_warns_once(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    root = str(make_shards([20]))
    (told,) = said_of(lambda lane: sp.Encode(sp.TarShardReader(root, lane, shuffle=False), NumberEncoder()), caplog)
    assert told.startswith("WARNING the pipeline ends with Encode, so each step yields a single element")


@pytest.mark.parametrize(("point", "inside"), [(30, False), (300, False), (20, True)])
def test_schedule_point_within_later_buffers_warns(
    make_shards: Any, caplog: pytest.LogCaptureFixture, point: int, inside: bool
) -> None:
    root = str(make_shards([40]))

    def pipeline(lane: sp.Lane, behind: bool = True) -> custom.Stage:
        schedule = sp.Schedule([(0, {"a": 1}), (point, {"b": 1})])
        size = 20 if behind else 1
        samples = {name: sp.ShuffleBuffer(sp.TarShardReader(root, lane), size=21 - size) for name in "ab"}
        return sp.Batcher(
            sp.Encode(sp.ShuffleBuffer(sp.Blend(samples, weights=schedule), size=size), NumberEncoder()), size=2
        )

    told = said_of(pipeline, caplog)
    assert len(told) == inside
    assert not told or "changes at 20, but later buffers draw 20 samples before the first batch" in told[0]
    assert not said_of(partial(pipeline, behind=False), caplog), "its draws are those of the batches"


def test_batch_larger_than_the_dataset_warns(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    root = str(make_shards([20]))

    def pipeline(lane: sp.Lane, epochs: int | None = None) -> custom.Stage:
        samples = sp.TarShardReader(root, lane, shuffle=False, epochs=epochs)
        return sp.Batcher(sp.Encode(samples, NumberEncoder()), size=21)

    (told,) = said_of(pipeline, caplog)
    assert told.startswith("WARNING Batcher(size=21): the data has only 20 samples, so a batch repeats samples")
    caplog.clear()
    with sp.SavableLoader(lambda lane: pipeline(lane, 1), seed=0, lanes=1) as own:
        next(own)
    assert "so no batch is full" in caplog.text


@pytest.mark.parametrize(("pack", "warned"), [(16, True), (32, False)])
def test_packs_shorter_than_the_rows_of_the_encoder_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pack: int, warned: bool
) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "some words"}\n' * 20)
    encoder = LanguageModelingEncoder(part="text", max_length=32)
    pipeline = sp.read(str(tmp_path / "docs.jsonl")).shuffle(20).encode(encoder).pack(pack, too_long="skip").batch(2)
    found = said_of(pipeline, caplog)
    expected = "packs of 16 tokens may be padded to the 32 tokens of LanguageModelingEncoder(max_length=32)"
    assert [message for message in found if expected in message] == found
    assert len(found) == warned


class Ids(sp.TaskEncoder):
    """Numbers of samples, of which 10 fill a pack."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return [sample.ref.index]

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return [each for item in items for each in item]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return self.pack(items, rng)


def neighbours(pipeline: Callable[[sp.Lane], Any]) -> float:
    """The share of the samples of batches that follow the one before them in their shard."""
    with sp.SavableLoader(pipeline, seed=0, lanes=2) as own:
        batches = [next(own) for _ in range(20)]
    pairs = [pair for batch in batches for pair in pairwise(batch)]
    return sum(second == first + 1 for first, second in pairs) / len(pairs)


def plain(samples: custom.SampleStage) -> custom.Stage:
    return sp.Batcher(sp.Encode(samples, Ids()), size=16)


LEFT_IN_BLOCKS: dict[str, Callable[[Any, sp.Lane], custom.Stage]] = {
    "alone": lambda root, lane: plain(sp.TarShardReader(root, lane)),
    "packed": lambda root, lane: sp.Batcher(
        sp.OnlinePacker(sp.Encode(sp.TarShardReader(root, lane), Ids()), max_length=10), size=2
    ),
    "one source of two": lambda root, lane: plain(
        sp.Blend(
            {"a": sp.TarShardReader(root, lane), "b": sp.ShuffleBuffer(sp.TarShardReader(root, lane), size=200)},
            weights={"a": 9, "b": 1},
        )
    ),
}
MIXED_OR_MEANT: dict[str, Callable[[Any, sp.Lane], custom.Stage]] = {
    "a buffer of samples": lambda root, lane: plain(sp.ShuffleBuffer(sp.TarShardReader(root, lane), size=200)),
    "a buffer of items": lambda root, lane: sp.Batcher(
        sp.ShuffleBuffer(sp.Encode(sp.TarShardReader(root, lane), Ids()), size=200), size=16
    ),
    "a buffer after the blend": lambda root, lane: plain(
        sp.ShuffleBuffer(sp.Blend({"a": sp.TarShardReader(root, lane), "b": sp.TarShardReader(root, lane)}), size=200)
    ),
    "blocks that were asked for": lambda root, lane: plain(sp.TarShardReader(root, lane, block_size=8)),
    "single samples": lambda root, lane: plain(sp.TarShardReader(root, lane, block_size=1)),
    "file order": lambda root, lane: plain(sp.TarShardReader(root, lane, shuffle=False)),
    "a pass for evaluation": lambda root, lane: plain(sp.TarShardReader(root, lane, epochs=1)),
    "a stage of one's own": lambda root, lane: plain(Reordered(sp.TarShardReader(root, lane))),
}


class Reordered(custom.SampleStage):
    """May mix: it is no filter."""

    def __next__(self) -> sp.Sample:
        sample: sp.Sample = next(self.source)
        self.ref = self.source.ref
        return sample

    ref: Any = ()


@pytest.fixture
def unsaid() -> None:
    """A process in which nothing was said of blocks yet."""
    local_lanes._warn_of_blocks.cache_clear()


@pytest.mark.parametrize("name", LEFT_IN_BLOCKS)
def test_shuffle_that_keeps_neighbors_together_warns_with_a_fix(
    make_shards: Any, caplog: pytest.LogCaptureFixture, unsaid: None, name: str
) -> None:
    pipeline = partial(LEFT_IN_BLOCKS[name], str(make_shards([400, 400])))
    assert neighbours(pipeline) > 0.3
    local_lanes._warn_of_blocks.cache_clear()
    (told,) = said_of(pipeline, caplog)
    assert told.startswith("WARNING only blocks of 8 consecutive samples are shuffled")
    assert "Add .shuffle(size), or set block_size=8" in told and "block_size" in told
    assert said_of(pipeline, caplog) == []  # once a process


@pytest.mark.parametrize("name", MIXED_OR_MEANT)
def test_sufficient_shuffle_and_intended_blocks_do_not_warn(
    make_shards: Any, caplog: pytest.LogCaptureFixture, unsaid: None, name: str
) -> None:
    pipeline = partial(MIXED_OR_MEANT[name], str(make_shards([400, 400])))
    assert said_of(pipeline, caplog) == []
    if "buffer" in name:
        assert neighbours(pipeline) < 0.1


def test_token_blocks_and_single_sample_shards_do_not_warn(
    make_shards: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, unsaid: None
) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16))
    assert said_of(lambda lane: plain(custom.TokenReader(tmp_path / "tokens.npy", lane, length=8)), caplog) == []
    many = str(make_shards([1] * 40))
    assert said_of(lambda lane: plain(sp.TarShardReader(many, lane)), caplog) == []


class Unpacked(sp.TaskEncoder):
    """Has no `pack`."""


def test_an_encoder_that_cannot_pack_is_rejected_by_a_packer(make_shards: Any) -> None:
    items = sp.Encode(sp.TarShardReader(make_shards([4]), sp.Lane()), Unpacked())
    with pytest.raises(ValueError, match=r"OnlinePacker: Unpacked has no pack\(items, rng\)"):
        sp.OnlinePacker(items, max_length=8)
    sp.OnlinePacker(items, max_length=8, encoder=NumberEncoder())


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        (len, r"Pass a function to \.map"),
        (NumberEncoder, "Pass an instance"),
        (7, "7$"),
    ],
)
def test_invalid_encoder_is_rejected_with_a_fix(make_shards: Any, wrong: Any, cure: str) -> None:
    samples = sp.TarShardReader(make_shards([4]), sp.Lane())
    with pytest.raises(ValueError, match=f"Encode takes a TaskEncoder, not .*{cure}"):
        sp.Encode(samples, wrong)
    items = sp.Encode(samples, NumberEncoder())
    with pytest.raises(ValueError, match=f"Batcher takes a TaskEncoder, not .*{cure}"):
        sp.Batcher(items, size=2, encoder=wrong)
    with pytest.raises(ValueError, match=f"OnlinePacker takes a TaskEncoder, not .*{cure}"):
        sp.OnlinePacker(items, max_length=2, encoder=wrong)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("epochs", [None, 1])
def test_a_loader_in_a_loader_is_rejected(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch, num_workers: int, epochs: int | None
) -> None:
    class OneToOne(NumberEncoder):
        one_to_one = True

    root = str(make_shards([20]))
    own = sp.SavableLoader(
        lambda lane: sp.Batcher(sp.Encode(sp.TarShardReader(root, lane, epochs=epochs), OneToOne()), size=2),
        seed=0,
        lanes=1,
    )
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # to wait for each of its workers
    with pytest.raises(TypeError, match=r"Iterate over it|no dataset"):
        next(iter(torch.utils.data.DataLoader(own, batch_size=2, num_workers=num_workers)))  # type: ignore[arg-type]
    gc.collect()


class Scaled(NumberEncoder):
    """Has settings, which its class does not tell of."""

    def __init__(self, scale: float) -> None:
        self.scale, self.name = scale, "x"
        self._cache, self.tokenizer, self.one_to_one = 3, None, True


class Told(Scaled):
    def settings(self) -> dict[str, Any]:
        return {"scale": self.scale}


def test_unsaved_settings_of_an_encoder_are_named(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    root = str(make_shards([20]))

    def pipeline(lane: sp.Lane, encoder: sp.TaskEncoder) -> custom.Stage:
        samples = sp.ShuffleBuffer(sp.TarShardReader(root, lane), size=4)
        return sp.Batcher(sp.Encode(samples, encoder), size=4)

    (hint,) = said_of(partial(pipeline, encoder=Scaled(0.5)), caplog)
    assert hint.startswith("WARNING Scaled: a resumed run does not compare name, scale.")
    assert said_of(partial(pipeline, encoder=Told(0.5)), caplog) == []
