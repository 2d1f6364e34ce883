"""`global_rng=None`: functions that draw get what `global_rng=True` gives, and others are not seeded.

Each function below depends on the sample and the global generators alone. A batch of 40 is one series of calls.
"""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core import global_rng
from savable_pipeline.core.global_rng import Seeding
from tests.support.streams import next_hashes, through_a_file

SIZE = 40
SHARDS = [150, 90]


def number(sample: sp.Sample) -> int:
    return int(sample.json()["id"])


def quiet(sample: sp.Sample) -> int:
    return number(sample) * 2


def of_python(sample: sp.Sample) -> Any:
    return number(sample), random.random()


def of_numpy(sample: sp.Sample) -> Any:
    return number(sample), np.random.rand()


def of_torch(sample: sp.Sample) -> Any:
    return number(sample), torch.rand(3).tolist()


def of_one_normal(sample: sp.Sample) -> Any:
    """One normal number leaves another one cached in NumPy's generator."""
    return number(sample), np.random.standard_normal()


def at_the_thirtieth(sample: sp.Sample) -> Any:
    return number(sample), random.random() if number(sample) % 100 == 30 else 0.0


def reseeded_by_a_constant(sample: sp.Sample) -> Any:
    value = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return number(sample), *value


def in_an_error_path(sample: sp.Sample) -> Any:
    if number(sample) % 9 == 4:
        raise ValueError(f"{number(sample)} drew {random.random() < 0.5}")
    return number(sample)


def fails_by_chance(sample: sp.Sample) -> Any:
    if number(sample) % 3 == 1 and random.random() < 0.5:
        raise ValueError("bad luck")
    return number(sample)


def skips_by_chance(sample: sp.Sample) -> Any:
    return sp.Skip("bad luck") if number(sample) % 3 == 1 and np.random.rand() < 0.5 else number(sample)


def none_by_chance(sample: sp.Sample) -> Any:
    return None if number(sample) % 3 == 1 and torch.rand(()).item() < 0.5 else number(sample)


def some_of_each(sample: sp.Sample) -> Any:
    """Errors and skips that do not draw, before a sample that draws."""
    if number(sample) % 10 == 3:
        raise ValueError("it is bad")
    if number(sample) % 10 == 7:
        return sp.Skip("it is odd")
    return number(sample), random.random() if number(sample) % 40 == 38 else 0.0


def iterator_by_chance(sample: sp.Sample) -> Any:
    return iter([number(sample)] * random.randrange(3)) if number(sample) % 5 == 2 else number(sample)


def parts(sample: sp.Sample) -> Iterator[Any]:
    for part in range(60):
        yield number(sample), part, random.random() if part == 45 and number(sample) % 4 == 1 else 0.0


def parts_and_skips(sample: sp.Sample) -> Iterator[Any]:
    for part in range(50):
        lost = part % 7 == 3 and (part < 20 or np.random.rand() < 0.5)
        yield sp.Skip("lost") if lost else (number(sample), part)


def part_fails_by_chance(sample: sp.Sample) -> Iterator[Any]:
    for part in range(50):
        if part == 30 and random.random() < 0.5:
            raise ValueError("bad luck")
        yield number(sample), part


def reads_a_state(sample: sp.Sample) -> Any:
    return number(sample), random.getstate()[1][5], torch.initial_seed()


def in_a_fork(sample: sp.Sample) -> Any:
    with torch.random.fork_rng(devices=[]):
        return number(sample), torch.rand(2).tolist()


MAPPED: list[Callable[[sp.Sample], Any]] = [
    quiet, of_python, of_numpy, of_torch, of_one_normal, at_the_thirtieth, reseeded_by_a_constant, in_an_error_path,
    fails_by_chance, skips_by_chance, none_by_chance, some_of_each, iterator_by_chance, parts, parts_and_skips,
    part_fails_by_chance, reads_a_state, in_a_fork,
]  # fmt: skip


def listed(items: list[Any], rng: sp.Rng) -> Any:
    return items


class Listing(sp.TaskEncoder):
    """A batch is the list of its items, with a draw."""

    def __init__(self, setting: bool | None, *, draws: bool = True) -> None:
        self.global_rng, self.draws = setting, draws

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return [number(sample)] * 3

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return [*items, random.random(), np.random.rand()] if self.draws else items

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [items, random.random(), torch.rand(()).item()] if self.draws else items


def select_by_chance(items: list[Any], rng: sp.Rng) -> Any:
    random.shuffle(items)
    return [items[:7], items[7:30]]


def mapped(function: Callable[..., Any], folder: Path, setting: bool | None, **how: Any) -> Any:
    samples = sp.read(str(folder), quarantine=how.pop("quarantine", None)).shuffle(20)
    items = samples.map(function, on_error="skip", max_errors=10_000, global_rng=setting, **how)
    return items.batch(SIZE, encoder=Listing(False, draws=False))


def filtered(folder: Path, setting: bool | None) -> Any:
    kept = sp.read(str(folder)).filter(keep_by_chance, global_rng=setting, on_error="skip")
    return kept.map(number, global_rng=False).batch(SIZE)


def keep_by_chance(sample: sp.Sample) -> bool:
    """Errors, results of every kind, and draws late in a series."""
    if number(sample) % 11 == 5:
        raise ValueError("it is bad")
    return number(sample) % 4 != 1 or np.random.rand() < 0.5


def packed(folder: Path, setting: bool | None) -> Any:
    return sp.read(str(folder)).encode(Listing(setting)).pack(max_length=30, open_packs=2).batch(4)


def selected(folder: Path, setting: bool | None) -> Any:
    def build(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(str(folder), lane), Listing(setting))
        return sp.Batcher(custom.ItemPacker(items, size=SIZE, select=select_by_chance), size=2)

    return build


PIPELINES: dict[str, Callable[[Path, bool | None], Any]] = {
    **{function.__name__: partial(mapped, function) for function in MAPPED},
    "filter": filtered,
    "pack": packed,
    "select": selected,
}


def run(pipeline: Any, steps: int, **settings: Any) -> tuple[list[str], dict[str, Any]]:
    """The hashes of batches, and what was dropped."""
    with sp.SavableLoader(pipeline, seed=3, lanes=4, **settings) as loader:
        batches = next_hashes(loader, steps)
        counts = {
            name: n for name, n in loader.stats().items() if "/skipped" in name or name.endswith(("items", "filtered"))
        }
        return batches, counts


@pytest.mark.parametrize("name", PIPELINES)
def test_watched_function_draws_the_same_as_an_always_seeded_one(make_shards: Any, name: str) -> None:
    folder = make_shards(SHARDS)
    pipeline = PIPELINES[name](folder, None)
    expected = run(PIPELINES[name](folder, True), 9)
    assert run(pipeline, 9) == expected
    assert run(pipeline, 9, num_workers=2) == expected


def test_errors_from_draws_are_quarantined_like_those_of_an_always_seeded_function(
    make_shards: Any, tmp_path: Path
) -> None:
    def written(name: str, function: Callable[..., Any], setting: bool | None) -> str:
        bad = tmp_path / f"{name}-{setting}.jsonl"
        samples = sp.read(str(folder), quarantine=bad, epochs=1)
        if name == "filter":
            items = samples.filter(function, on_error="skip", global_rng=setting).map(number, global_rng=False)
        else:
            items = samples.map(function, on_error="skip", max_errors=999, global_rng=setting, check=0.0)
        list(items.batch(SIZE))
        return bad.read_text()

    folder = make_shards(SHARDS)
    for name, function in (("map", fails_by_chance), ("map none", none_by_chance), ("filter", filter_fails_by_chance)):
        assert written(name, function, None) == written(name, function, True) != "", name


def filter_fails_by_chance(sample: sp.Sample) -> bool:
    fails_by_chance(sample)
    return True


@pytest.mark.parametrize("name", PIPELINES)
def test_a_resumed_run_equals_one_that_was_not_interrupted(make_shards: Any, name: str) -> None:
    pipeline = PIPELINES[name](make_shards(SHARDS), None)
    whole = sp.SavableLoader(pipeline, seed=3, lanes=2)
    states, expected = [], []
    for _ in range(7):
        states.append(through_a_file(whole.state_dict()))
        expected += next_hashes(whole, 1)
    for step in (1, 4, 5):
        resumed = sp.SavableLoader(pipeline, seed=3, lanes=2)
        resumed.load_state_dict(states[step])
        assert next_hashes(resumed, 7 - step) == expected[step:], f"from step {step}"


# What is seeded, and how often functions are called.


class Calls(sp.TaskEncoder):
    """Encodes by a function of the sample, and notes for which samples NumPy's generator was seeded by their key."""

    def __init__(self, function: Callable[[sp.Sample], Any], setting: bool | None = None) -> None:
        self.function, self.global_rng = function, setting
        self.calls: list[int] = []
        self.seeded: list[bool] = []

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        self.calls.append(number(sample))
        self.seeded.append(np.random.get_state()[1][0] == rng.key & 0xFFFFFFFF)
        return self.function(sample)


def batches(folder: Path, encoder: sp.TaskEncoder, size: int, *, lanes: int = 1, **how: Any) -> sp.SavableLoader:
    """Batches of an endless run, which is not asked in advance whether there is another one."""
    samples = sp.read(str(folder), shuffle=False, block_size=1)
    items = samples.encode(encoder, **how).batch(size, encoder=Listing(False, draws=False))
    return sp.SavableLoader(items, seed=3, lanes=lanes)


def one_epoch(loader: sp.SavableLoader, samples: int) -> list[Any]:
    """The items of as many samples as the dataset has."""
    found: list[Any] = []
    while len(found) < samples:
        found += next(loader)
    return found


@pytest.mark.parametrize(("size", "seeded"), [(15, True), (16, False), (75, False)])
def test_a_function_that_draws_nothing_is_seeded_only_in_series_of_less_than_16_calls(
    make_shards: Any, size: int, seeded: bool
) -> None:
    encoder = Calls(quiet)
    found = one_epoch(batches(make_shards([size * 4]), encoder, size, check=0.0), size * 4)
    assert found == [2 * n for n in range(size * 4)] and encoder.calls == [*range(size * 4)]
    assert encoder.seeded == [seeded] * size * 4


def test_a_series_that_draws_is_repeated_and_all_later_calls_are_seeded(make_shards: Any) -> None:
    encoder = Calls(at_the_thirtieth)
    assert len(one_epoch(batches(make_shards([100]), encoder, 25, check=0.0), 100)) == 100
    assert encoder.calls == [*range(25), *range(25, 50), *range(25, 50), *range(50, 100)]
    assert encoder.seeded == [False] * 50 + [True] * 75


def test_lanes_of_a_process_share_what_they_learned_about_draws(make_shards: Any) -> None:
    encoder = Calls(of_torch)
    assert len(one_epoch(batches(make_shards([120]), encoder, 20, lanes=3, check=0.0), 120)) == 120
    assert encoder.seeded == [False] * 20 + [True] * 120


def test_filters_of_one_function_share_what_they_learned_about_draws(make_shards: Any) -> None:
    seeded: list[bool] = []

    def keep(sample: sp.Sample, rng: sp.Rng) -> bool:
        seeded.append(np.random.get_state()[1][0] == rng.key & 0xFFFFFFFF)
        return random.random() < 2

    chain = sp.read(str(make_shards([160])), block_size=1).filter(keep).map(number, global_rng=False).batch(20)
    assert len(one_epoch(sp.SavableLoader(chain, seed=3, lanes=2), 160)) == 160
    assert sum(seeded) == 160 and seeded[-160:] == [True] * 160


def test_the_first_eight_samples_run_twice_from_two_states_even_if_values_are_not_compared(make_shards: Any) -> None:
    states: dict[int, set[float]] = {}

    def keep(sample: sp.Sample) -> bool:
        states.setdefault(number(sample), set()).add(random.getstate()[1][3])
        return True

    chain = sp.read(str(make_shards([64])), shuffle=False, block_size=1).filter(keep).map(number, global_rng=False)
    assert len(one_epoch(sp.SavableLoader(chain.batch(32), seed=3, lanes=1), 64)) == 64
    assert [len(states[n]) for n in range(64)] == [2] * 8 + [1] * 56


def test_the_first_eight_samples_of_an_encoder_run_from_two_states_and_are_compared_once(make_shards: Any) -> None:
    encoder = Calls(quiet)
    one_epoch(batches(make_shards([64]), encoder, 32), 64)
    assert encoder.calls == [*sorted([*range(8)] * 2), *range(8, 64)] and not any(encoder.seeded)


def test_dependence_on_random_state_is_pure_but_on_a_clock_is_not(make_shards: Any) -> None:
    folder, ticks = make_shards([64]), iter(range(1000))
    assert len(one_epoch(batches(folder, Calls(reads_a_state), 32), 64)) == 64
    with pytest.raises(sp.EncodeError, match="returned two results for one sample"):
        next(batches(folder, Calls(lambda sample: next(ticks)), 32))


def test_draw_between_the_two_calls_of_a_check_is_detected(make_shards: Any) -> None:
    """A function that draws without effect on its result: no value differs."""
    encoder = Calls(lambda sample: (random.random(), number(sample))[1])
    assert len(one_epoch(batches(make_shards([64]), encoder, 32), 64)) == 64
    assert encoder.calls[:3] == [0, 0, 0]  # a call that is found to draw, then two that are seeded


def test_checks_of_a_repeated_series_are_repeated(make_shards: Any) -> None:
    encoder = Calls(lambda sample: random.random() if number(sample) == 5 else number(sample))
    one_epoch(batches(make_shards([64]), encoder, 32), 64)
    assert encoder.calls == [*sorted([*range(5)] * 2), 5, *sorted([*range(8)] * 2), *range(8, 64)]


def test_a_sample_that_fails_before_a_draw_is_counted_and_quarantined_once(make_shards: Any, tmp_path: Path) -> None:
    def written(setting: bool | None) -> tuple[list[Any], Any, Any]:
        bad = tmp_path / f"{setting}.jsonl"
        samples = sp.TarShardReader(str(make_shards([80])), sp.Lane(), shuffle=False, epochs=1, quarantine=bad)
        items = sp.Encode(samples, Calls(some_of_each, setting), on_error="skip", max_errors=8)
        found = list(sp.Batcher(items, size=32, encoder=Listing(False, draws=False)))
        return found, items.counts, [json.loads(line) for line in bad.read_text().splitlines()]

    assert written(None) == written(True)
    assert len(written(None)[2]) == 2 * 8  # the file is appended to


def test_errors_beyond_max_errors_end_a_run_at_the_same_sample(make_shards: Any) -> None:
    def ended(setting: bool | None) -> str:
        with pytest.raises(sp.EncodeError, match="of the first") as caught:
            next_hashes(batches(folder, Calls(fails_by_chance, setting), 32, on_error="skip", max_errors=7), 9)
        return str(caught.value)

    folder = make_shards([200])
    assert ended(None) == ended(True)


# The trainer's own generators, Ctrl-C, and torch.


def draws() -> list[Any]:
    return [random.random(), random.gauss(), np.random.standard_normal(), torch.rand(2).tolist()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("size", [4, 32])
def test_after_ctrl_c_and_errors_random_states_are_restored_and_the_series_restarts(
    make_shards: Any, error: type[BaseException], size: int
) -> None:
    once: list[int] = []

    def interrupted(sample: sp.Sample) -> Any:
        if number(sample) == 3 * size - 2 and len(once) < 2:
            once.append(1)
            raise error
        return number(sample), random.random() if number(sample) > 70 else 0

    always = batches(make_shards([96]), Calls(interrupted_never, True), size)
    expected = [next(always) for _ in range(96 // size)]
    random.seed(5), np.random.seed(5), torch.manual_seed(5), random.gauss(), np.random.standard_normal()
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    before = draws()
    random.setstate(state[0]), np.random.set_state(state[1]), torch.set_rng_state(state[2])
    loader = batches(make_shards([96]), Calls(interrupted), size)
    found: list[Any] = []
    while len(found) < len(expected):
        try:
            found.append(next(loader))
        except (KeyboardInterrupt, sp.EncodeError):
            assert len(found) == 2
    assert draws() == before and len(once) == 2
    assert found == expected


def interrupted_never(sample: sp.Sample) -> Any:
    return number(sample), random.random() if number(sample) > 70 else 0


def test_a_series_in_which_torch_is_imported_is_repeated(make_shards: Any) -> None:
    program = """
import sys
import savable_pipeline as sp

class Late(sp.TaskEncoder):
    def __init__(self, setting):
        self.global_rng = setting
    def encode(self, sample, rng):
        if sample.json()["id"] < 30:
            return 0
        import torch
        return torch.rand(()).item()
def found(setting):
    samples = sp.TarShardReader(sys.argv[1], sp.Lane(), shuffle=False, epochs=1)
    return [element.value for element in sp.Encode(samples, Late(setting)).take(50)]

assert "torch" not in sys.modules
watched = found(None)
assert "torch" in sys.modules and len(set(watched)) == 21, watched
assert watched == found(True)
"""
    subprocess.run([sys.executable, "-c", program, str(make_shards([50]))], check=True, timeout=300)


# Worker threads.


def in_threads(pipeline: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=3, lanes=4, num_workers=2, workers=sp.Workers(start_method="thread"))


@pytest.mark.parametrize("size", [4, 40])
@pytest.mark.parametrize("function", [of_python, of_numpy, of_torch, at_the_thirtieth, in_an_error_path])
def test_threads_reject_a_function_that_draws_by_name(
    make_shards: Any, function: Callable[..., Any], size: int
) -> None:
    chain = sp.read(str(make_shards([150]))).map(function, on_error="skip").batch(size)
    refused = pytest.raises(sp.EncodeError, match=rf"{function.__name__} draws from global .* start_method='fork'")
    with in_threads(chain) as loader, refused:
        next_hashes(loader, 300 // size)


def test_threads_reject_filters_packs_and_batches_that_draw_by_name(make_shards: Any) -> None:
    folder = make_shards([150])
    of_filter = sp.read(str(folder)).filter(of_python).map(number).batch(4)
    of_pack = sp.read(str(folder)).encode(Listing(None)).pack(max_length=30, open_packs=2).batch(4)
    of_batch = sp.read(str(folder)).encode(Listing(None)).batch(4)
    named = {"of_python": of_filter, "Listing.pack": of_pack, "Listing.batch": of_batch}
    for name, chain in named.items():
        with in_threads(chain) as loader, pytest.raises(sp.EncodeError, match=f"{name} draws from global"):
            next_hashes(loader, 8)


def test_threads_distinguish_draws_of_a_function_from_the_trainers(make_shards: Any) -> None:
    chain = sp.read(str(make_shards(SHARDS))).filter(small).map(quiet).batch(20)
    expected = run(chain, 12)[0]
    with in_threads(chain) as loader:
        found = []
        for _ in range(12):
            draws()
            found += next_hashes(loader, 1)
    assert found == expected


def small(sample: sp.Sample) -> bool:
    return number(sample) % 5 != 2


def test_a_series_in_a_thread_is_repeated_while_another_thread_draws() -> None:
    """Three series of which another thread draws in the first two."""
    seeding, calls = Seeding("f", None, in_thread=True), []

    def call() -> int:
        calls.append(1)
        if len(calls) < 3:
            other = threading.Thread(target=random.random)
            other.start()
            other.join()
        return 7

    assert seeding.call_alone(call) == 7 and len(calls) == 3


# The states themselves.


@pytest.mark.parametrize(
    "draw",
    [
        random.random, lambda: random.gauss(), lambda: random.getrandbits(1), np.random.rand, np.random.standard_normal,
        lambda: np.random.bytes(1), lambda: torch.rand(()), lambda: torch.randn(()), lambda: random.seed(0),
        lambda: np.random.seed(0), lambda: torch.manual_seed(0), lambda: [random.random() for _ in range(624)],
        lambda: np.random.randint(0, 2**32, 624, dtype=np.uint32),
        lambda: np.random.set_state(np.random.RandomState(3).get_state()),
    ],
)  # fmt: skip
def test_any_draw_and_any_seed_moves_a_state(draw: Callable[[], Any]) -> None:
    with global_rng.as_in_a_worker(set(global_rng.KINDS)):
        for _ in range(2):  # a constant seed leaves the second time what it found
            seeding = Seeding("f", None, in_thread=False)
            with pytest.raises(global_rng.DrawFound), seeding.series(16):
                draw()
            with seeding.series(16) as seed:
                assert seed is not None


def test_fast_numpy_state_equals_that_of_get_state_with_its_cached_normal() -> None:
    read, write = global_rng._accesses(("numpy",))[0]
    np.random.seed(3)
    for number in range(700):
        words, position, has_normal, normal = np.random.get_state()[1:]
        state = read()
        assert state[0] == words.tobytes() + np.int32(position).tobytes()
        assert state[1] == np.int64(has_normal).tobytes() + np.float64(normal).tobytes()
        np.random.standard_normal() if number % 3 else np.random.bytes(4)
        following = np.random.standard_normal(3).tolist()
        write(state)
        np.random.standard_normal() if number % 3 else np.random.bytes(4)
        assert np.random.standard_normal(3).tolist() == following


def test_no_two_processes_and_series_have_the_same_states() -> None:
    keys = [global_rng._start_states(process, True, None) for process in (1, 2)]
    assert len({repr(next(states)[1]) for states in keys for _ in range(8)}) == 8


def reseeding(sample: sp.Sample) -> float:
    np.random.seed(sample.index)
    return float(np.random.normal())


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="NumPy has it since 1.24")
@pytest.mark.parametrize("function", [len, lambda sample: float(np.random.normal()), reseeding])
@pytest.mark.parametrize("setting", [None, True])
@pytest.mark.parametrize("after", [0, 1])
def test_a_trainer_with_another_bit_generator_gets_the_same_batches_and_its_state_back(
    make_shards: Any, setting: Any, function: Any, after: int
) -> None:
    """`np.random.set_bit_generator`, called before the first batch or after it."""
    chain = sp.read(str(make_shards([90])), shuffle=False).map(function, global_rng=setting).batch(30)
    expected, own = (sp.SavableLoader(chain, seed=3, lanes=1) for _ in range(2))
    batches = [next(own).tolist() for _ in range(after)]
    replaced, generator = np.random.get_bit_generator(), np.random.PCG64(5)
    state_before = pickle.dumps(replaced.state)
    np.random.set_bit_generator(generator)
    try:
        np.random.normal()  # it draws two, and caches one of them
        before = np.random.get_state(legacy=False)
        batches += [next(own).tolist() for _ in range(3 - after)]
        assert np.random.get_bit_generator() is generator
        assert np.random.get_state(legacy=False) == before and before["has_gauss"] == 1
        assert pickle.dumps(replaced.state) == state_before, "the trainer may use it again"
    finally:
        np.random.set_bit_generator(replaced)
    assert batches == [next(expected).tolist() for _ in range(3)]


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="NumPy has it since 1.24")
def test_another_bit_generator_of_the_trainer_is_no_reason_to_seed(
    make_shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded: list[int] = []
    seed_numpy = global_rng._seed_numpy
    monkeypatch.setattr(global_rng, "_seed_numpy", lambda key: (seeded.append(key), seed_numpy(key)))
    loader = sp.SavableLoader(sp.read(str(make_shards([90])), shuffle=False).map(len).batch(30), seed=3, lanes=1)
    replaced = np.random.get_bit_generator()
    try:
        for generator in (replaced, np.random.PCG64(5)):
            np.random.set_bit_generator(generator)
            next(loader), seeded.clear()
            next(loader), next(loader)
            assert len(seeded) == 0, type(generator).__name__
    finally:
        np.random.set_bit_generator(replaced)
