"""Threads as workers: the batches and states of processes, from one to the other; and what threads cannot share."""

from __future__ import annotations

import copy
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.stores import shard_files
from savable_pipeline.run.engine import thread_host
from savable_pipeline.run.engine.thread_host import detached_copy
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.stages.item_buffer import MemoryBudget, StageBuffer
from savable_pipeline.stages.item_ref import Element
from tests.run.engine.test_last_look import OVERWRITTEN, overwrite
from tests.support import toy_pipelines
from tests.support.draws import scaled_examples
from tests.support.exact_search import pipelines, shard_sizes, sufficient_sizes, written_pipeline
from tests.support.streams import through_a_file
from tests.support.toy_faults import NumberEncoder, number_pipeline

LANES, STEPS = 12, 30


def threads(count: int = 3, **settings: Any) -> sp.Workers:
    return sp.Workers(count, start_method="thread", **settings)


def loader(pipeline: Any, workers: sp.Workers | None = None, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=3, lanes=LANES, workers=workers or threads(), **settings)


# The same as processes.


def own_draws(rng: sp.Rng) -> list[Any]:
    """As `toy_pipelines.draw`, without the global generators."""
    return [rng.random(), rng.integers(10), rng.permutation(3), rng.numpy.random(), torch.rand(2, generator=rng.torch)]


@pytest.fixture(scope="module", autouse=True)
def quiet_toys() -> Any:
    """The toy encoders leave the global generators alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_pipelines, "draw", own_draws)
        patch.setattr(toy_pipelines.ToyEncoder, "global_rng", False)
        yield


quiet = pipelines.map(
    lambda chosen: {
        **chosen,
        "filters": [kind for kind in chosen["filters"] if kind == "items"],  # that of samples seeds the generators
        "pack": None
        if chosen["pack"] in ("groups", "both", "items")
        else chosen["pack"],  # whose function draws from them
    }
)


def check_legs(sizes: list[int], chosen: dict[str, Any], seed: int) -> None:
    """A run in legs, of threads, of this process and now and then of processes, is the run that never stopped."""
    draw = random.Random(seed)
    with written_pipeline(sufficient_sizes(sizes, chosen, LANES), chosen) as pipeline:
        alone = sp.SavableLoader(pipeline, seed=seed, lanes=LANES)
        expected, states = [], [alone.state_dict()]
        for _ in range(STEPS):
            expected.append(digest(next(alone)))
            states.append(alone.state_dict())
        step = 0
        while step < STEPS:
            method = draw.choice(["thread", "thread", "fork"])
            workers = sp.Workers(draw.choice([1, 2, 3]), start_method=method, prefetch=draw.choice([1, 3]))
            with sp.SavableLoader(pipeline, seed=seed, lanes=LANES, workers=workers) as leg:
                leg.load_state_dict(through_a_file(states[step]))
                end = min(STEPS, step + draw.randint(3, 20))
                while step < end:
                    assert digest(next(leg)) == expected[step], f"{method}, step {step}"
                    step += 1
                assert leg.state_dict() == states[step], f"{method}, the state after {step}"


@given(shard_sizes, quiet, st.integers(0, 2**20))
@scaled_examples(4, shrink=False)
def test_threads_and_processes_yield_the_same_batches_and_exchange_states(
    sizes: list[int], chosen: dict[str, Any], seed: int
) -> None:
    check_legs(sizes, chosen, seed)


@pytest.mark.long
@given(shard_sizes, quiet, st.integers(0, 2**20))
@scaled_examples(300, shrink=False)
def test_many_threads_and_processes_yield_the_same_batches(sizes: list[int], chosen: dict[str, Any], seed: int) -> None:
    check_legs(sizes, chosen, seed)


# Encoders.


class Seeded(NumberEncoder):
    global_rng = ("torch",)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda read: read.encode(Seeded()), r"torch.* of Seeded.* set global_rng = False in the class"),
        (
            lambda read: read.map(numbered, global_rng=True),
            r"\(python, numpy, torch\) of \.map\(…\)\. .* write \.map\(…, global_rng=False\)",
        ),
        (
            lambda read: read.filter(small, global_rng=True).map(numbered, global_rng=False),
            r"\(python, numpy, torch\) of \.filter\(…\)\. .* write \.filter\(…, global_rng=False\)",
        ),
    ],
)
def test_encoder_that_needs_global_generators_is_rejected_with_a_fix(
    make_shards: Any, make: Callable[[Any], Any], named: str
) -> None:
    pipeline = make(sp.read(make_shards([40]))).batch(2)
    with loader(pipeline) as own, pytest.raises(ValueError, match=f"{named}, or use start_method='fork'"):
        next(own)


def numbered(sample: sp.Sample) -> int:
    return int(sample.json()["id"])


def small(sample: sp.Sample) -> bool:
    return sample.json()["id"] < 30


def test_functions_marked_thread_safe_run_in_threads(make_shards: Any) -> None:
    quiet = sp.read(make_shards([60])).filter(small, global_rng=False).map(numbered, global_rng=False).batch(2)
    expected = [next(iter_) for iter_ in [iter(sp.SavableLoader(quiet, seed=3, lanes=LANES))] for _ in range(9)]
    with loader(quiet) as own:
        assert [next(own).tolist() for _ in range(9)] == [batch.tolist() for batch in expected]


class Alone(NumberEncoder):
    """Fails where two threads are in it at a time, as a fast tokenizer does; notes which of its copies are called."""

    used: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.inside = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        assert not self.inside, "Already borrowed"
        self.inside = True
        time.sleep(0.001)
        self.inside = False
        self.used.add(id(self))
        return super().encode(sample, rng)


class Safe(NumberEncoder):
    thread_safe = True
    used: ClassVar[set[int]] = set()

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        self.used.add(id(self))
        return super().encode(sample, rng)


class Uncopied(NumberEncoder):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_each_thread_has_a_copy_of_the_encoder(make_shards: Any) -> None:
    encoder = Alone()
    with loader(partial(number_pipeline, str(make_shards([600])), encoder=encoder)) as own:
        assert [next(own) for _ in range(30)] == [[2 * i, 2 * i + 1] for i in range(30)]
    assert len(Alone.used) == 3 and id(encoder) not in Alone.used


def test_thread_safe_encoder_is_not_copied(make_shards: Any) -> None:
    encoder = Safe()
    with loader(partial(number_pipeline, str(make_shards([600])), encoder=encoder)) as own:
        next(own)
    assert Safe.used == {id(encoder)}


def test_encoder_that_cannot_be_copied_is_an_error_with_a_fix(make_shards: Any) -> None:
    with (
        loader(partial(number_pipeline, str(make_shards([40])), encoder=Uncopied())) as own,
        pytest.raises(ValueError, match=r"Uncopied cannot be copied for a worker thread .*thread_safe = True"),
    ):
        next(own)


class Mine:
    """Notes which thread has used which of its copies."""

    used: ClassVar[set[tuple[int, int]]] = set()

    def __init__(self) -> None:
        self.random = random.Random(3)

    def use(self, result: Any) -> Any:
        self.used.add((id(self), threading.get_ident()))
        return result

    def keep(self, element: Any) -> bool:
        return self.use(True)

    def alone(self, lengths: list[int]) -> list[list[int]]:
        return self.use([[i] for i in range(len(lengths))])

    def cost(self, length: int, images: int) -> int:
        return self.use(length)

    def select(self, items: list[Any], rng: sp.Rng) -> list[list[Any]]:
        return self.use([items])


class Tokens(NumberEncoder):
    def __init__(self, mine: Mine | None = None) -> None:
        self.mine = mine or Mine()

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return self.mine.use([3] * 3)

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items[0]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


STEPS_WITH_FUNCTIONS: dict[str, tuple[Callable[[Mine], Any], Callable[[Any, Any], Any]]] = {
    "map": (lambda mine: partial(Mine.keep, mine), lambda read, f: read.map(f, global_rng=False)),
    "filter before": (lambda mine: mine.keep, lambda read, f: read.filter(f, global_rng=False).encode(Tokens())),
    "filter after": (lambda mine: mine.keep, lambda read, f: read.encode(Tokens()).filter(f)),
    "encode": (lambda mine: partial(Tokens, mine), lambda read, f: read.encode(f)),
    "policy": (lambda mine: mine.alone, lambda read, f: read.encode(Tokens()).pack(4, policy=f)),
    "cost": (lambda mine: mine.cost, lambda read, f: read.encode(Tokens()).pack(4, cost=f, max_cost=4)),
    "balance": (lambda mine: mine.cost, lambda read, f: read.encode(Tokens()).balance(2, cost=f)),
    "select": (
        lambda mine: mine.select,
        lambda read, f: read.encode(Tokens()).then(custom.ItemPacker, size=2, select=f),
    ),
    "group": (lambda mine: mine.keep, lambda read, f: read.encode(Tokens()).bucket(size=2, group=f)),
    "size": (lambda mine: mine.keep, lambda read, f: read.encode(Tokens()).bucket(size=f, group=len)),
}


def of_a_step(root: Path, step: str, function: Callable[..., Any]) -> Any:
    made = STEPS_WITH_FUNCTIONS[step][1](sp.read(root), function)
    return made if step in ("group", "size") else made.batch(2, encoder=Tokens())


@pytest.mark.parametrize("step", STEPS_WITH_FUNCTIONS)
def test_each_thread_has_a_copy_of_objects_bound_to_a_function(make_shards: Any, step: str) -> None:
    Mine.used.clear()
    mine = Mine()
    with loader(of_a_step(make_shards([600]), step, STEPS_WITH_FUNCTIONS[step][0](mine))) as own:
        for _ in range(30):
            next(own)
        users = {number: {thread for used, thread in Mine.used if used == number} for number, _ in Mine.used}
    assert all(len(threads) == 1 for threads in users.values()), "none is used by two threads"
    assert users.get(id(mine), {threading.get_ident()}) == {threading.get_ident()} and len(Mine.used) >= 3


@pytest.mark.parametrize("step", STEPS_WITH_FUNCTIONS)
def test_unsafe_global_of_a_function_is_rejected_in_threads(make_shards: Any, step: str) -> None:
    draws = random.Random(3)
    functions: dict[int, Callable[..., Any]] = {
        0: lambda: Tokens(draws and Mine()),
        1: lambda element: draws and 1,
        2: lambda a, b: draws and 1,
    }
    arguments = {"encode": 0, "cost": 2, "balance": 2, "select": 2}.get(step, 1)
    told = r"worker threads cannot share 'draws' of \S+<lambda>, a Random\. Bind it"
    with (
        loader(of_a_step(make_shards([40]), step, functions[arguments])) as own,
        pytest.raises(ValueError, match=told),
    ):
        next(own)


def test_tokenizer_shared_by_two_functions_yields_the_same_batches_in_threads(make_shards: Any) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    pipeline = sp.read(make_shards([600])).map(partial(truncated, words), global_rng=False, check=0.0).batch(4)
    with sp.SavableLoader(pipeline, seed=3, lanes=LANES) as process:
        expected = [next(process).tolist() for _ in range(60)]
    with loader(pipeline, threads(4)) as own:
        assert [next(own).tolist() for _ in range(60)] == expected


def truncated(words: Any, sample: sp.Sample) -> int:
    words.enable_truncation(5 if sample.json()["id"] % 2 else 50)
    time.sleep(0.0002)
    return len(words.encode("a " * 60).ids)


class Counting(NumberEncoder):
    thread_safe = True
    calls = 0

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        self.calls += 1
        return self.calls


def test_impure_encoder_error_mentions_threads_if_there_are_any(make_shards: Any) -> None:
    pipeline = sp.read(make_shards([60])).encode(Counting()).batch(2)
    with (
        loader(pipeline) as own,
        pytest.raises(sp.EncodeError, match="not what another thread changes meanwhile, a"),
    ):
        next(own)
    with loader(pipeline, sp.Workers(0)) as own, pytest.raises(sp.EncodeError, match="settings and `rng`, not a clock"):
        next(own)


# What is not shared.


class Cached(NumberEncoder):
    """Gives the same array and the same bytes for each sample."""

    def __init__(self) -> None:
        self.array, self.tensor, self.raw = np.zeros(5000, np.uint8), torch.zeros(2000), b"x" * 5000

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"array": self.array, "tensor": self.tensor[5:], "raw": self.raw, "list": [1]}


def test_a_trainer_may_write_to_its_batches(make_shards: Any) -> None:
    with loader(partial(number_pipeline, str(make_shards([600])), encoder=Cached()), threads(1)) as own:
        raws = set()
        for _ in range(8):
            batch = next(own)  # of two items, with one array
            for item in batch:
                assert not item["array"].any() and not item["tensor"].any() and item["list"] == [1]
            for item in batch:
                item["array"] += 1
                item["tensor"].add_(1)
                item["list"].append(2)
                raws.add(id(item["raw"]))
        assert len(raws) == 1, "bytes cannot be written to: they are not copied"


def test_object_that_is_twice_in_a_batch_is_twice_in_its_copy() -> None:
    array, shared = np.arange(3), [1]
    made = detached_copy({"a": [array, array], "b": (shared, shared), "c": np.float32(2.5), "d": None}, {})
    assert made["a"][0] is made["a"][1] is not array and made["b"][0] is made["b"][1] is not shared
    channels_last = torch.rand(2, 3, 32, 32).to(memory_format=torch.channels_last)
    assert detached_copy(channels_last, {}).stride() == channels_last.stride()


def test_a_trainer_keeps_its_generators_signals_and_number_of_threads(make_shards: Any) -> None:
    def settings() -> list[Any]:
        handlers = [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
        ]
        drawn = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]
        return [*handlers, *drawn, torch.get_num_threads(), sorted(each.name for each in threading.enumerate())]

    before = settings()
    with loader(partial(number_pipeline, str(make_shards([60])))) as own:
        for _ in range(10):
            next(own)
        assert settings()[:-1] == before[:-1]
    assert settings() == before


def test_memory_of_stages_is_counted_correctly_in_many_threads() -> None:
    budget = MemoryBudget()

    class Buffer(StageBuffer):
        def __init__(self) -> None:
            self._budget, self._max_bytes = budget, 1 << 40

    def hold() -> None:
        buffer = Buffer()
        for number in range(20_000):
            element = Element((number, 0, 0), 3)
            buffer.count_bytes([element])
            buffer.release_bytes([element])
        buffer.count_bytes([Element((0, 0, 0), 5)])  # until the buffer is gone

    begun = [threading.Thread(target=hold) for _ in range(4)]
    for thread in begun:
        thread.start()
    for thread in begun:
        thread.join()
    assert budget.used == 0


def test_threads_share_one_memory_budget(make_shards: Any) -> None:
    found: dict[str, set[int]] = {"budget": set(), "values": set()}

    def pipeline(lane: sp.Lane) -> custom.Stage:
        found["budget"].add(id(lane.shared("held items", MemoryBudget, by_threads=True)))
        found["values"].add(id(lane.shared("mine", list)))
        return number_pipeline(str(shards), lane)

    shards = make_shards([600])
    with loader(pipeline) as own:
        for _ in range(24):
            next(own)
        assert len(found["budget"]) == 2 and len(found["values"]) == 4, "of three threads, and of the trainer itself"


# Threads that fail.


class Waits(NumberEncoder):
    """Waits in sample 9 until it may go on."""

    thread_safe = True

    def __init__(self) -> None:
        self.may = threading.Event()

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        if (number := super().encode(sample, rng)) == 9:
            self.may.wait()
        return number


def test_hung_thread_is_an_error_that_says_it_cannot_be_killed(make_shards: Any) -> None:
    encoder = Waits()
    pipeline = partial(number_pipeline, str(make_shards([600])), encoder=encoder)
    told = (
        r"\(thread \d\) gave no batch in 0\.5 s, while it built a batch of lane 4, .*'s000009'.*thread cannot be killed"
    )
    with loader(pipeline, threads(2, timeout=0.5)) as own:
        found = [next(own) for _ in range(4)]
        with pytest.raises(sp.WorkerError, match=told) as caught:
            next(own)
        assert "in wait\n" in str(caught.value) and "in encode" in str(caught.value)
        encoder.may.set()
        found += [next(own) for _ in range(8)]
    assert found == [[2 * i, 2 * i + 1] for i in range(12)]


class Exits(NumberEncoder):
    left = 2

    def __deepcopy__(self, memo: dict[int, Any]) -> Exits:
        return copy.copy(self)

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        if (number := super().encode(sample, rng)) == 9 and Exits.left:
            Exits.left -= 1
            raise SystemExit(3)
        return number


def test_a_thread_that_ends_is_replaced(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    with loader(partial(number_pipeline, str(make_shards([600])), encoder=Exits())) as own:
        assert [next(own) for _ in range(12)] == [[2 * i, 2 * i + 1] for i in range(12)]
        assert own.stats()["restarts"] == 2
    assert "ended by SystemExit, while it built a batch of lane 4" in caplog.text


def test_loader_closes_without_waiting_for_a_slow_thread(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread_host, "_CHECK_S", 0.2)
    encoder = Waits()
    own = loader(partial(number_pipeline, str(make_shards([600])), encoder=encoder), threads(1, prefetch=8))
    next(own)
    time.sleep(0.1)
    own.close()
    assert "thread 1 did not end within 0.2 s" in caplog.text
    encoder.may.set()


def test_overwritten_shard_is_reported_at_close(make_shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_CHECK_S", 10_000.0)
    root: Path = make_shards([84])
    own = loader(partial(number_pipeline, str(root)), threads(2, prefetch=1))
    for _ in range(10):
        next(own)
    overwrite(root)
    next(own)
    with pytest.raises(sp.ShardError, match=OVERWRITTEN):
        own.close()


def test_torchs_number_of_threads_is_warned_of_if_it_may_matter(make_shards: Any, caplog: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        loader(partial(number_pipeline, str(make_shards([40])))).close()
    finally:
        torch.set_num_threads(before)
    assert "torch has 3 threads here and one in worker processes" in caplog.text


def test_filter_without_workers_does_not_change_the_trainers_generators(make_shards: Any) -> None:
    alone = sp.SavableLoader(sp.read(make_shards([60])).filter(small).map(numbered, global_rng=False).batch(2), seed=3)
    next(alone)
    random.seed(5)
    expected = random.Random(5).random()
    next(alone)
    assert random.random() == expected
