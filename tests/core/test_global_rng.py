"""The trainer's own random numbers and threads: as if the loader were not there; and what encoders are given."""

from __future__ import annotations

import random
import re
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core import global_rng
from savable_pipeline.core.global_rng import KINDS, as_in_a_worker, seeded_generators, seeder
from tests.support.streams import next_hashes
from tests.support.toy_faults import NumberEncoder, number_pipeline
from tests.support.toy_pipelines import toy_pipeline


def trainers_draws() -> list[Any]:
    """What a trainer draws in a step: its own augmentation, and dropout."""
    dropped = torch.nn.functional.dropout(torch.ones(20), p=0.5)
    return [random.random(), np.random.rand(3).tolist(), dropped.tolist(), torch.randn(2).tolist()]


def seed_all(seed: int = 1234) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize(("num_workers", "epochs"), [(0, None), (2, 1)])
def test_loader_does_not_change_the_trainers_random_numbers(
    make_shards: Any, num_workers: int, epochs: int | None
) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=epochs)
    seed_all()
    expected = [trainers_draws() for _ in range(6)]

    seed_all()
    found = []
    with sp.SavableLoader(pipeline, seed=3, lanes=6, num_workers=num_workers) as loader:
        for _, _batch in zip(range(6), loader, strict=False):
            found.append(trainers_draws())
            loader.load_state_dict(loader.state_dict())
    assert len(found) > 5
    assert found == expected[: len(found)]


def test_failing_encoder_does_not_change_the_trainers_random_numbers(make_shards: Any) -> None:
    pipeline = partial(number_pipeline, str(make_shards([40])), encoder=DrawsThenFails())
    seed_all()
    expected = trainers_draws()
    seed_all()
    with pytest.raises(sp.EncodeError):
        next(sp.SavableLoader(pipeline, seed=3, lanes=1))
    assert trainers_draws() == expected


class DrawsThenFails(NumberEncoder):
    """Draws from every global generator in each call."""

    global_rng = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        raise ValueError(trainers_draws())


@pytest.mark.parametrize("global_rng", [None, True, False])
def test_drawing_pipeline_function_does_not_change_the_trainers_random_numbers(
    make_shards: Any, global_rng: bool | None
) -> None:
    shards = str(make_shards([40]))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        trainers_draws()  # as the making of a torch module does
        encoder = NumberEncoder()
        encoder.global_rng = global_rng
        return number_pipeline(shards, lane, encoder)

    seed_all()
    expected = trainers_draws()
    seed_all()
    loader = sp.SavableLoader(pipeline, seed=3, lanes=4)
    loader.state_dict()
    next_hashes(loader, 9)
    assert trainers_draws() == expected


def test_draws_of_the_trainer_between_batches_change_no_batch(make_shards: Any) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    expected = next_hashes(sp.SavableLoader(pipeline, seed=3, lanes=6), 9)
    loader = sp.SavableLoader(pipeline, seed=3, lanes=6)
    found = []
    for seed in range(9):
        seed_all(seed)
        found += next_hashes(loader, 1)
    assert found == expected


# Threads.


class Reduction(NumberEncoder):
    """A sum whose bits depend on the number of threads."""

    global_rng = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return torch.randn(2_000_000).sum(), torch.get_num_threads()

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


@pytest.fixture
def four_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_a_sum_of_floats_has_the_same_bits_in_this_process_and_in_a_worker(
    make_shards: Any, four_threads: None
) -> None:
    pipeline = partial(number_pipeline, str(make_shards([20])), encoder=Reduction())
    torch.randn(2_000_000).sum()  # a worker forked after this has no such threads, and would wait for them
    found = []
    for num_workers in (0, 1):
        with sp.SavableLoader(
            pipeline, seed=3, lanes=2, num_workers=num_workers, workers=sp.Workers(timeout=60)
        ) as loader:
            found.append(next_hashes(loader, 4))
    assert found[0] == found[1]


def test_trainers_number_of_threads_is_unchanged(make_shards: Any, four_threads: None) -> None:
    shards = str(make_shards([20]))
    loader = sp.SavableLoader(partial(number_pipeline, shards, encoder=Reduction()), seed=3, lanes=2)
    loader.state_dict()
    assert torch.get_num_threads() == 4
    for _ in range(3):
        assert {threads for _, threads in next(loader)} == {1}
        assert torch.get_num_threads() == 4
    failing = sp.SavableLoader(partial(number_pipeline, shards, encoder=DrawsThenFails()), seed=3, lanes=2)
    with pytest.raises(sp.EncodeError):
        next(failing)
    assert torch.get_num_threads() == 4


# Seeding.


@pytest.mark.parametrize("named", [("python",), ("numpy",), ("torch",), ("torch", "python")])
def test_only_generators_named_by_the_encoder_are_seeded_and_restored(named: tuple[str, ...]) -> None:
    seed = seeder(named)
    assert seed is not None

    def drawn() -> dict[str, float]:
        return {"python": random.random(), "numpy": np.random.rand(), "torch": float(torch.rand(()))}

    seed_all()
    first, second = drawn(), drawn()
    seed_all()
    with as_in_a_worker(set(named)):
        seed(7)
        inside = drawn()
    after = drawn()
    for kind in KINDS:
        assert (inside[kind] == first[kind]) == (kind not in named)
        assert after[kind] == (first if kind in named else second)[kind]


def test_a_key_of_64_bits_seeds_every_kind() -> None:
    seed = seeder(True)
    assert seed is not None
    with as_in_a_worker(set(KINDS)):
        found = []
        for key in (0, 1, 2**32, 2**63, 2**64 - 1):
            seed(key)
            found.append(trainers_draws())
        seed(2**63)
        assert trainers_draws() == found[3]
    assert len({draws[0] for draws in found}) == 5


def test_global_rng_accepts_all_none_or_some_generators() -> None:
    assert seeded_generators(True) == KINDS
    assert seeded_generators(False) == seeded_generators(()) == ()
    assert seeder(False) is None
    assert seeded_generators(("torch",)) == ("torch",)


@pytest.mark.parametrize("setting", ["torch", ("torch", "cuda"), ("Torch",)])
def test_unknown_name_in_global_rng_is_an_error(setting: Any) -> None:
    with pytest.raises(ValueError, match=r"global_rng=.*: expected None, True, False or a tuple of some of"):
        seeded_generators(setting)


def test_the_library_itself_draws_from_no_global_generator() -> None:
    """A retry of a remote read, say, may come between two draws of an encoder."""
    package = Path(sp.__file__).parent
    own = {package / "core" / "global_rng.py", package / "testing.py"}
    drawn = re.compile(
        r"\b(random\.(?!SystemRandom|Random\b)[a-z]|np\.random\.[a-z]\w+\((?<!default_rng\())|\btorch\.rand"
    )
    found = [
        f"{path.name}: {line.strip()}"
        for path in package.rglob("*.py")
        if path not in own
        for line in path.read_text().splitlines()
        if drawn.search(line.split("#")[0]) and not line.strip().startswith((">>>", "...", '"'))
    ]
    assert found == []


@pytest.mark.parametrize("normals", [0, 1, 2, 3])
def test_numpys_state_is_restored_with_its_cached_normal(normals: int) -> None:
    for work in (np.random.rand, np.random.standard_normal, lambda: np.random.seed(3), lambda: None):
        np.random.seed(7)
        np.random.standard_normal(normals)
        expected, state = np.random.standard_normal(5).tolist(), np.random.RandomState(7)
        np.random.set_state(state.get_state())
        np.random.standard_normal(normals)
        with as_in_a_worker({"numpy"}):
            work()
        assert np.random.standard_normal(5).tolist() == expected


@pytest.mark.parametrize("in_memory", [True, False])
def test_pythons_state_is_restored_with_its_cached_normal(in_memory: bool, monkeypatch: Any) -> None:
    if not in_memory:
        monkeypatch.setattr(global_rng, "_python_access", lambda: (random.getstate, random.setstate))
    for work in (random.random, random.gauss, lambda: random.seed(3), lambda: None):
        for normals in range(3):
            random.seed(7)
            _ = [random.gauss() for _ in range(normals)]
            before = random.getstate()
            with as_in_a_worker({"python"}):
                work()
            assert random.getstate() == before


def test_pythons_whole_state_is_read_in_memory() -> None:
    random.seed(3)
    for _ in range(700):
        *words, position = random.getstate()[1]
        assert global_rng._python_access()[0]()[0] == struct.pack("=i624I", position, *words)
        random.random()


def test_the_state_of_another_bit_generator_is_restored() -> None:
    before = np.random.mtrand._rand._bit_generator  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        expected = np.random.RandomState(np.random.PCG64(3)).standard_normal(6).tolist()
        found = [np.random.standard_normal()]
        with as_in_a_worker({"numpy"}):
            np.random.rand(4)
        assert [*found, *np.random.standard_normal(5).tolist()] == expected
    finally:
        np.random.set_bit_generator(before)
