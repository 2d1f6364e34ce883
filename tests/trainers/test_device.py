"""`OnDevice`: the loader's batches, a batch ahead, with the trainer's state; and the order of what a GPU is asked."""

from __future__ import annotations

import contextlib
import linecache
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader import epoch_end, misuse, run, savable_loader
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.trainers import device
from savable_pipeline.trainers.device import OnDevice
from tests.conftest import MakeShards
from tests.support.streams import next_hashes
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline

SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 4}


@pytest.fixture
def shards(make_shards: MakeShards) -> str:
    return str(make_shards([20, 7, 30]))


def streams(shards: str) -> dict[str, Any]:
    """Return functions that build loaders with each kind of end, by name."""
    finite, packed = partial(counted_pipeline, shards), partial(toy_pipeline, shards, epochs=1)
    return {
        "endless": partial(sp.SavableLoader, partial(toy_pipeline, shards), **SETTINGS),
        "with a length": partial(sp.SavableLoader, finite, **SETTINGS),
        "without": partial(sp.SavableLoader, packed, tail="pad", **SETTINGS),
        "evaluation": partial(sp.SavableLoader, finite, on_iter="restart", **SETTINGS),
    }


@pytest.mark.parametrize("name", ["endless", "with a length", "without", "evaluation"])
def test_batches_epochs_and_states_equal_those_of_the_loader(shards: str, name: str) -> None:
    make = streams(shards)[name]
    plain, ahead = make(), OnDevice(make(), "cpu")
    assert ahead.state_dict() == plain.state_dict()
    for count in (3, 1000, 5, 1000, 2):  # broken off, and to the end
        count = min(count, 9) if name == "endless" else count
        left, right = iter(plain), iter(ahead)
        for _ in range(count):
            expected, found = next(left, None), next(right, None)
            assert (expected is None) == (found is None)
            assert found is None or digest(found) == digest(expected)
            assert ahead.epoch == plain.epoch
            assert ahead.state_dict() == plain.state_dict() == ahead.save_state()
            assert ahead.state_dict(lag=1) == plain.state_dict(lag=1)
            assert ahead.global_state_dict(lag=1) == plain.global_state_dict(lag=1)
            assert ahead.trace() == plain.trace()
            if found is None:
                break


def test_repeat_yields_each_batch_several_times_and_loads_it_once(shards: str) -> None:
    make = streams(shards)["with a length"]
    plain, often = make(), OnDevice(make(), "cpu", repeat=3)
    assert len(often) == 3 * len(plain)
    for expected in plain:
        given = [next(often) for _ in range(3)]
        assert digest(given[0]) == digest(expected) and given[1] is given[0] is given[2]
        assert often.state_dict() == plain.state_dict() and often.trace() == plain.trace()
    with pytest.raises(StopIteration):
        next(often)
    with pytest.raises(ValueError, match="repeat must be at least 1, not 0"):
        OnDevice(make(), "cpu", repeat=0)


@pytest.mark.parametrize("move", ["load", "skip", "iterate"])
def test_moving_the_loader_ends_a_repeated_batch(shards: str, move: str) -> None:
    make = streams(shards)["evaluation" if move == "iterate" else "endless"]
    expected, often = next_hashes(make(), 3), OnDevice(make(), "cpu", repeat=3)
    start = often.state_dict()
    assert digest(next(often)) == expected[0]
    if move == "load":
        often.load_state_dict(start)
    elif move == "skip":
        often.skip(1)
    else:
        iter(often)
    assert digest(next(often)) == expected[2 if move == "skip" else 0]
    assert often.state_dict()["slot"] == (3 if move == "skip" else 1)


@pytest.mark.parametrize("name,workers", [("endless", 0), ("endless", 1), ("with a length", 0), ("without", 0)])
def test_run_resumes_exactly_after_any_interruption(shards: str, name: str, workers: int) -> None:
    make = streams(shards)[name]
    expected = next_hashes(make(), 14)
    with OnDevice(make(num_workers=workers), "cpu") as first:
        states = [first.state_dict()]
        for digested in expected:
            assert digest(next(first)) == digested
            states.append(first.state_dict())
    for cut in (0, 10) if workers else (1, 6, 10):
        with OnDevice(make(num_workers=workers), "cpu") as again:
            again.load_state_dict(states[cut])
            assert next_hashes(again, 3) == expected[cut : cut + 3]
            again.restore_state(states[0])
            assert next_hashes(again, 2) == expected[:2]


def test_skipping_starts_after_the_last_yielded_batch(shards: str) -> None:
    make = streams(shards)["endless"]
    expected = next_hashes(make(), 12)
    ahead = OnDevice(make(), "cpu")
    next_hashes(ahead, 3)
    ahead.skip(0)
    ahead.skip(4)
    assert next_hashes(ahead, 3) == expected[7:10]


def test_skip_after_the_last_batch_does_not_change_the_epochs_end(shards: str) -> None:
    make = streams(shards)["with a length"]
    first, second = (next_hashes(own, 1000) for own in [make()] * 2)
    ahead = OnDevice(make(), "cpu")
    given = 0
    for _ in ahead:
        given += 1
        if given == len(first):
            ahead.skip(2)
    assert given == len(first) and next_hashes(ahead, 1000) == second[2:]


def test_loaded_evaluation_continues_once_and_then_restarts(shards: str) -> None:
    make = streams(shards)["evaluation"]
    whole = next_hashes(make(), 100)
    ahead = OnDevice(make(), "cpu")
    next_hashes(ahead, 4)
    state = ahead.state_dict()
    for asked_before in (0, 1):
        again = OnDevice(make(), "cpu")
        again.load_state_dict(state)
        assert [digest(next(again)) for _ in range(asked_before)] == whole[4 : 4 + asked_before]
        assert next_hashes(again, 100) == whole[4 + asked_before :]
        assert next_hashes(again, 3) == whole[:3]
        assert next_hashes(again, 2) == whole[:2]


class Fails(sp.TaskEncoder):
    """Encoder that fails on one sample."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        if sample.json()["id"] == 5:
            raise ValueError("the fifth")
        return sample.json()["id"]


def test_error_is_raised_at_its_batch(shards: str) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane, shuffle=False), Fails()), size=1)

    plain, ahead = (sp.SavableLoader(pipeline, seed=3, lanes=1) for _ in range(2))
    moved = OnDevice(ahead, "cpu")
    next_hashes(plain, 5)
    assert [batch.tolist() for _, batch in zip(range(5), moved, strict=False)] == [[i] for i in range(5)]
    assert moved.state_dict() == plain.state_dict()
    for _ in range(2):
        with pytest.raises(sp.EncodeError, match="the fifth"):
            next(moved)
        assert moved.state_dict() == plain.state_dict()


def test_only_tensors_are_moved_in_containers_of_equal_types(shards: str) -> None:
    loader = streams(shards)["with a length"]()
    moved = next(OnDevice(loader, "meta"))
    assert moved["id"].device.type == "meta" and moved["drawn"] == [pytest.approx(x) for x in moved["drawn"]]
    nested = {"a": (torch.zeros(2), [torch.ones(1)]), "n": 7, "s": "x"}
    found = device.tensors_changed(nested, lambda tensor: tensor + 1)
    assert found["a"][0].tolist() == [1, 1] and found["a"][1][0].tolist() == [2] and found["n"] == 7
    assert isinstance(found["a"], tuple) and nested["a"][0].tolist() == [0, 0]  # type: ignore[index]


def test_a_batch_whose_move_fails_is_not_lost(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = streams(shards)["endless"]
    expected = next_hashes(make(), 4)
    ahead = OnDevice(make(), "cpu")
    assert digest(next(ahead)) == expected[0]
    calls = iter([True, False])

    def failing(batch: Any) -> Any:
        if next(calls, False):
            raise RuntimeError("out of memory")
        return lambda: batch

    ahead._move = failing
    state = ahead.state_dict()
    with pytest.raises(RuntimeError, match="out of memory"):
        next(ahead)
    assert ahead.state_dict() == state
    assert next_hashes(ahead, 3) == expected[1:]


class Interrupt:
    """Raises KeyboardInterrupt before the `at`-th line that these modules run, but for a function `without` state."""

    def __init__(self, at: int, modules: Sequence[ModuleType], without: str | None = None) -> None:
        self.left = at
        self.without = without
        self.files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.files or frame.f_code.co_name == self.without:
            return None
        if event == "line" and not self._has_given(frame):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self

    @staticmethod
    def _has_given(frame: FrameType) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        return frame.f_code.co_filename == device.__file__ and line == "return batch"


WITH_THE_LOADER = [device, run, savable_loader, epoch_end, misuse]


@pytest.mark.parametrize(
    ("modules", "name", "before"),
    [
        ([device], "with a length", 0),
        ([device], "with a length", 5),
        ([device], "evaluation", 2),
        pytest.param(WITH_THE_LOADER, "endless", 0, marks=pytest.mark.long),
        pytest.param(WITH_THE_LOADER, "endless", 2, marks=pytest.mark.long),
        pytest.param(WITH_THE_LOADER, "with a length", 12, marks=pytest.mark.long),
        pytest.param(WITH_THE_LOADER, "evaluation", 2, marks=pytest.mark.long),
    ],
)
def test_interrupt_at_any_line_loses_and_repeats_no_batch(shards: str, modules: Any, name: str, before: int) -> None:
    make = streams(shards)[name]
    expected = next_hashes(make(), before + 3)
    for at in range(1, 1000):
        ahead, resumed = OnDevice(make(), "cpu"), make()
        assert next_hashes(ahead, before) == expected[:before]
        interrupt = Interrupt(at, modules, "tensors_changed" if modules == [device] else None)  # called for each number
        tracer = sys.gettrace()
        sys.settrace(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            next(ahead)
        sys.settrace(tracer)
        if interrupt.left:
            break
        resumed.load_state_dict(ahead.state_dict())
        assert next_hashes(resumed, 2) == expected[before : before + 2], at
        assert [digest(next(ahead)) for _ in range(3)] == expected[before:], at
    assert at > 10


class FakeGpu:
    """Replacement of torch.cuda without a GPU, which records the order of calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.copies = 0

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self._on())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pinned(tensor))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append("keep"))

    @contextlib.contextmanager
    def _on(self) -> Iterator[None]:
        self.log.append("copy [")
        yield
        self.log.append("]")

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self.log.append("pin")
        return tensor

    def record_event(self) -> int:
        self.copies += 1
        self.log.append(f"mark {self.copies}")
        return self.copies

    def wait_event(self, event: int) -> None:
        self.log.append(f"wait {event}")


def test_gpu_copies_the_next_batch_ahead_and_waits_only_for_the_current_one(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    gpu.patch(monkeypatch)
    copies = device._CudaCopies(torch.device("cpu"))
    loader = streams(shards)["with a length"]()
    ahead = OnDevice(loader, "cpu")
    ahead._move = copies.start
    copied = ["copy [", "pin", "mark {}", "]"]
    next(ahead)
    assert gpu.log == [part.format(i) for i in (1, 2) for part in copied] + ["wait 1", "keep"]
    gpu.log.clear()
    next(ahead)
    assert gpu.log == [part.format(3) for part in copied] + ["wait 2", "keep"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_complete_on_a_busy_gpu(shards: str) -> None:
    make = streams(shards)["with a length"]
    expected = [batch["id"] for batch in make()]
    busy = torch.randn(2000, 2000, device="cuda")
    found = []
    for batch in OnDevice(make(num_workers=1), "cuda"):
        for _ in range(20):
            busy = busy @ busy / busy.norm()
        found.append(batch["id"] * 2)
        del batch  # its memory may be taken by a later copy only once it has been read
    assert all(got.is_cuda and torch.equal(got.cpu(), want * 2) for got, want in zip(found, expected, strict=True))


def test_wrapped_loader_rejects_a_state_one_batch_ahead(shards: str) -> None:
    """Nor takes one: what was moved ahead would be given before it."""
    make = streams(shards)["endless"]
    loader = make()
    ahead = OnDevice(loader, "cpu")
    fresh = loader.state_dict()
    assert fresh == ahead.state_dict()
    loader.load_state_dict(fresh)
    expected = next_hashes(make(), 2)
    assert digest(next(ahead)) == expected[0]
    for act in (
        loader.state_dict,
        loader.save_state,
        loader.global_state_dict,
        lambda: loader.load_state_dict(fresh),
        lambda: loader.restore_state(fresh),
        lambda: loader.skip(1),
        lambda: OnDevice(loader, "cpu"),
    ):
        with pytest.raises(sp.SavableError, match="a batch ahead of the trainer"):
            act()
    assert digest(next(ahead)) == expected[1]


def test_wrapped_loader_may_be_used_if_nothing_is_prefetched(shards: str) -> None:
    loader = streams(shards)["with a length"]()
    ahead = OnDevice(loader, "cpu")
    assert len(list(ahead)) == len(loader)
    assert loader.state_dict() == ahead.state_dict()
    again = OnDevice(loader, "cpu")
    assert len(list(again)) == len(loader)


def test_loader_closes_with_its_last_reference(shards: str) -> None:
    """It does not hold what stands before it."""
    loader = streams(shards)["endless"]()
    ahead = OnDevice(loader, "cpu")
    next(ahead)
    gone = weakref.ref(ahead)
    del ahead
    assert gone() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_missing_gpu_is_an_error_that_names_it(shards: str, device: str) -> None:
    own = sp.SavableLoader(partial(toy_pipeline, shards), seed=3, lanes=2)
    with pytest.raises(
        ValueError, match=rf"torch sees 0 CUDA devices here, so there is no '{device}'\. Check the driver"
    ):
        OnDevice(own, device)
