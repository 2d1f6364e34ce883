"""`Encode(check=...)` finds an encoder that gives two results for one sample, and changes no batch."""

from __future__ import annotations

import importlib.machinery
import itertools
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import savable_pipeline as sp
from savable_pipeline.core.global_rng import as_in_a_worker
from savable_pipeline.run.engine.worker_main import use_one_thread
from savable_pipeline.run.transport.batch_pickle import dumps, loads
from savable_pipeline.stages import purity_check
from savable_pipeline.stages.batch_difference import first_difference
from savable_pipeline.stages.item_buffer import size_of
from tests.support.toy_faults import NumberEncoder
from tests.support.toy_pipelines import ToyEncoder


class OneField(sp.TaskEncoder):
    """The number of a sample, and what `value` gives. Notes which samples it was given."""

    def __init__(self, value: Callable[[sp.Rng], Any]) -> None:
        self.value = value
        self.given: list[int] = []

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        self.given.append(sample.json()["id"])
        return {"id": sample.json()["id"], "value": self.value(rng)}


class Fans(OneField):
    """Makes three items of each sample."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return (super(Fans, self).encode(sample, rng) for _ in range(3))


@pytest.fixture
def items(make_shards: Any) -> Callable[..., sp.Encode]:
    folder: Path = make_shards([30])

    def make(encoder: sp.TaskEncoder, **settings: Any) -> sp.Encode:
        return sp.Encode(sp.TarShardReader(str(folder), sp.Lane(seed=4), epochs=1), encoder, **settings)

    return make


SEQUENCE = iter(range(1000))
PYTHON = random.Random()
TORCH = torch.Generator()
MISTAKES = {
    "clock": lambda rng: time.perf_counter_ns(),
    "state": lambda rng: next(SEQUENCE),
    "numpy": lambda rng: np.random.default_rng().random(),
    "python": lambda rng: PYTHON.random(),
    "torch": lambda rng: (TORCH.seed(), torch.rand(2, generator=TORCH))[1],
    "no dict twice": lambda rng: [1] * (next(SEQUENCE) % 2),
}


@pytest.mark.parametrize("encoder", [OneField, Fans])
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_impurity_is_reported_with_encoder_field_sample_and_values_and_never_skipped(
    items: Any, mistake: str, encoder: type[OneField], on_error: str
) -> None:
    stage = items(encoder(MISTAKES[mistake]), check=1.0, on_error=on_error)
    with pytest.raises(sp.EncodeError) as caught:
        next(stage)
    told = str(caught.value)
    assert told.startswith(f"{encoder.__name__}.encode returned two results for one sample: item['value']")
    assert " expected, " in told and "sample 's0000" in told


def test_purity_check_does_not_change_items(items: Any) -> None:
    """With draws from every generator, skips and fan-outs."""
    plain, checked = (list(map(repr, items(ToyEncoder(), check=share))) for share in (0.0, 1.0))
    assert plain == checked and len(plain) > 30


def test_checked_fraction_of_samples_is_the_same_after_a_resume(items: Any) -> None:
    def twice(encoder: OneField) -> set[int]:
        return {number for number in encoder.given if encoder.given.count(number) > 1}

    whole, first, second = (OneField(lambda rng: rng.random()) for _ in range(3))
    assert len(list(items(whole, check=0.4))) == 30
    assert 3 < len(twice(whole)) < 27
    cut = items(first, check=0.4)
    for _ in range(11):
        next(cut)
    resumed = items(second, check=0.4)
    resumed.restore_state(cut.save_state())
    assert len(list(resumed)) == 19
    assert twice(first) | twice(second) == twice(whole) and twice(first) and twice(second)


def test_first_eight_samples_of_a_process_are_checked_by_default(
    items: Any,
) -> None:
    encoder = OneField(lambda rng: rng.random())
    stage = items(encoder)
    assert len(list(stage)) == 30 and len(encoder.given) == 38
    assert stage.keyed.due_encode() == encoder.encode
    nothing = OneField(lambda rng: next(SEQUENCE))
    assert len(list(items(nothing, check=0.0))) == len(nothing.given) == 30


def test_lanes_of_a_process_share_the_eight_checks(make_shards: Any) -> None:
    encoder = OneField(lambda rng: rng.random())
    loader = sp.SavableLoader(sp.read(str(make_shards([60])), epochs=1).encode(encoder).batch(2), seed=0, lanes=5)
    assert sum(len(batch["id"]) for batch in loader) == 60 == len(encoder.given) - 8


class OwnGenerator(sp.TaskEncoder):
    """Draws from a generator of its own, whose position no state knows."""

    def __init__(self) -> None:
        self.drawn = np.random.RandomState(0)

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"crop": self.drawn.randint(100, size=2)}


@pytest.mark.parametrize("workers", [0, 1])
def test_encoder_with_its_own_generator_is_an_error_by_default(make_shards: Any, workers: int) -> None:
    chain = sp.read(str(make_shards([20]))).encode(OwnGenerator()).batch(4)
    two = pytest.raises(sp.EncodeError, match=r"returned two results for one sample: item\['crop'\]")
    with sp.SavableLoader(chain, seed=0, lanes=2, num_workers=workers) as loader, two:
        next(loader)


class Slow(sp.TaskEncoder):
    """Takes long by a clock that the test turns."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        self.seconds, self.clock, self.calls = seconds, clock, 0

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        self.calls += 1
        self.clock[0] += self.seconds
        return self.calls if self.seconds > 1 else 0


@pytest.mark.parametrize("seconds", [0.9, 1.1])
def test_item_that_takes_more_than_a_second_is_not_built_twice(
    items: Any, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    slow = Slow(seconds, clock)
    assert len(list(items(slow))) == 30
    assert slow.calls == (30 if seconds > 1 else 38)


class Handle:
    """Cannot be copied, and is known by its address alone."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


def test_incomparable_values_are_not_compared_and_images_by_their_pixels(items: Any) -> None:
    pixels = iter(range(1000))
    assert len(list(items(OneField(lambda rng: Handle()), check=1.0))) == 30
    assert len(list(items(OneField(lambda rng: (x for x in "ab")), check=1.0))) == 30
    assert len(list(items(OneField(lambda rng: Image.new("L", (2, 2), 7)), check=1.0))) == 30
    with pytest.raises(sp.EncodeError, match="returned two results"):
        list(items(OneField(lambda rng: Image.new("L", (2, 2), next(pixels))), check=1.0))


def test_first_parts_of_a_fan_out_are_checked_and_all_are_yielded(items: Any) -> None:
    made: list[int] = []

    class Many(sp.TaskEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            for part in range(20):
                made.append(part)
                yield part, rng.random()

    plain = list(items(Many(), check=0.0))
    made.clear()
    assert list(items(Many())) == plain and len(plain) == 600
    assert len(made) == 600 + 8 * 8


def test_reused_buffer_is_compared_by_its_earlier_contents(items: Any) -> None:
    buffer = np.zeros(2)

    def value(rng: sp.Rng) -> Any:
        buffer[:] += 1
        return buffer

    with pytest.raises(sp.EncodeError, match=r"item\['value'\], sample 0 .*1\.0\) expected, .*2\.0\) found"):
        next(items(OneField(value), check=1.0))


def test_failure_of_the_second_call_is_reported(items: Any) -> None:
    def fails(rng: sp.Rng, calls: list[int] = []) -> int:  # noqa: B006
        calls.append(1)
        return 1 // (len(calls) % 2)

    with pytest.raises(sp.EncodeError, match="the second time it raised ZeroDivisionError"):
        next(items(OneField(fails), check=1.0, on_error="skip"))


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_checked_fraction_must_be_between_0_and_1(items: Any, share: float) -> None:
    with pytest.raises(ValueError, match=r"0\.0 to 1\.0"):
        items(OneField(lambda rng: 0), check=share)


def test_item_unreadable_the_second_time_is_not_a_difference(make_shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = itertools.count(), purity_check.copied_leaves

    def fails_every_second_time(value: Any, path: str) -> list[tuple[str, Any]]:
        if next(calls) % 2:
            raise AttributeError("partially initialized module 'torch' has no attribute 'Tensor'")
        return real(value, path)

    monkeypatch.setattr(purity_check, "copied_leaves", fails_every_second_time)
    items = sp.Encode(sp.TarShardReader(make_shards([4]), sp.Lane(), epochs=1), NumberEncoder())
    assert sorted(items) == [0, 1, 2, 3]
    assert next(calls) == 8


def test_torch_import_in_progress_does_not_fail_the_purity_check(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = ModuleType("torch")
    half.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", half)
    assert first_difference({"a": np.arange(3)}, {"a": np.arange(3)}) is None
    assert size_of({"a": [1, b"two"]}) > 0
    pieces, buffers = dumps({"a": np.arange(3), "b": {1, 2}})
    assert loads(b"".join(pieces), buffers)["a"].tolist() == [0, 1, 2]
    with as_in_a_worker({"torch"}):
        use_one_thread()
