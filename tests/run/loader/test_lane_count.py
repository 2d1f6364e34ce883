"""The default number of lanes: by the data alone, fixed at first need, and a loaded state's where there is one."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.errors import StateError
from savable_pipeline.run.loader.local_lanes import lanes_for
from savable_pipeline.run.loader.ranks import Ranks, check_same_data
from savable_pipeline.run.loader.savable_loader import run_of
from savable_pipeline.testing import steps_of_ranks


def next_batches(loader: sp.SavableLoader, count: int) -> list[list[int]]:
    """The next batches, of one epoch of a finite run at most."""
    return [batch.tolist() for _, batch in zip(range(count), loader, strict=False)]


def write_numbers(folder: Path, count: int, name: str = "a") -> str:
    """A folder with `count` samples more, whose numbers continue."""
    folder.mkdir(exist_ok=True)
    first = sum(len(path.read_text().splitlines()) for path in folder.glob("*.jsonl"))
    lines = [json.dumps({"id": number}) for number in range(first, first + count)]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def number(sample: sp.Sample) -> int:
    return int(sample.json()["id"])


def is_even(sample: sp.Sample) -> bool:
    return number(sample) % 2 == 0


class Same(custom.PassThrough, custom.SampleStage):
    """An own stage, of which the library does not know how many samples it drops."""

    def __next__(self) -> sp.Sample:
        return next(self.source)


def numbers(data: str, rows: int, buffer: int = 20, **settings: Any) -> Any:
    return sp.read(data, **settings).shuffle(buffer).map(number).batch(rows)


def lanes_of(pipeline: Any, **settings: Any) -> int:
    return int(sp.SavableLoader(pipeline, seed=7, **settings).state_dict()["lanes"])


@pytest.mark.parametrize(
    ("batches", "lanes"),
    [
        *[(0, 1), (1, 1), (19, 1), (20, 2), (39, 2), (40, 4), (79, 4), (80, 8), (239, 8), (240, 24)],
        *[(479, 24), (480, 48), (959, 48), (960, 96), (10**9, 96), (None, 96)],
    ],
)
def test_number_of_lanes_follows_from_batches_per_epoch(batches: int | None, lanes: int) -> None:
    assert lanes_for(batches, endless=False) == lanes
    assert lanes_for(batches, endless=True) == max(8, lanes)


def test_less_than_a_tenth_of_a_finite_epoch_is_dropped_however_small_it_is() -> None:
    for batches in range(1, 2000):
        assert batches % lanes_for(batches, endless=False) < batches / 10


def test_300_photos_in_batches_of_32_all_come_in_full_batches(tmp_path: Path) -> None:
    data = write_numbers(tmp_path / "data", 300)
    with sp.SavableLoader(numbers(data, 32, 1000, epochs=1), seed=7) as loader:
        for _ in range(2):
            batches = [batch.tolist() for batch in loader]
            assert [len(batch) for batch in batches] == [32] * 9 + [12]
            assert sorted(itertools.chain(*batches)) == list(range(300))


@pytest.mark.parametrize("epochs", [None, 1, 3])
def test_number_of_lanes_follows_from_the_samples_after_subset_and_exclude(tmp_path: Path, epochs: int | None) -> None:
    data = write_numbers(tmp_path / "data", 500)
    sample = next(iter(sp.read(data)))
    exclude = tmp_path / "exclude.txt"
    keys = sorted(each.key for each in sp.read(data, shuffle=False))
    exclude.write_text("\n".join(keys[:120]) + "\n")
    assert sample.key in keys
    assert lanes_of(numbers(data, 2, epochs=epochs)) == 24
    assert lanes_of(numbers(data, 2, epochs=epochs, subset=0.5)) == 8
    assert lanes_of(numbers(data, 2, epochs=epochs, exclude=exclude)) == 8
    half = {each.key for each in sp.read(data, subset=0.5)}
    excluded = [key for key in keys if key in half][: len(half) - 100] + [key for key in keys if key not in half]
    exclude.write_text("\n".join(excluded) + "\n")
    few = 8 if epochs is None else 4
    assert lanes_of(numbers(data, 2, epochs=epochs, subset=0.5, exclude=exclude)) == few  # 50 batches


def test_half_an_epoch_has_fewer_lanes_than_a_whole_one(tmp_path: Path) -> None:
    data = write_numbers(tmp_path / "data", 500)
    assert (lanes_of(numbers(data, 2, epochs=2.5)), lanes_of(numbers(data, 2, epochs=0.5))) == (24, 8)


PIPELINES: dict[str, tuple[Callable[[str], Any], dict[str, Any], int]] = {
    "a filter": (lambda data: sp.read(data, epochs=1).filter(is_even).map(number).batch(2), {}, 4),
    "items in a buffer": (lambda data: sp.read(data, epochs=1).map(number).shuffle(9).batch(2), {}, 4),
    "no encoder": (lambda data: sp.read(data, epochs=1).batch(2), {}, 4),
    "an own stage": (lambda data: sp.read(data).then(Same).map(number).batch(2), {}, 96),
    "a blend": (lambda data: sp.blend({"a": sp.read(data), "b": sp.read(data)}).map(number).batch(2), {}, 96),
    "a function": (lambda data: numbers(data, 2).__call__, {}, 96),
    "filler rows": (lambda data: numbers(data, 2, epochs=1), {"tail": "pad"}, 96),
    "epoch slots": (lambda data: numbers(data, 2), {"epoch_slots": 96}, 96),
    "own lanes": (lambda data: numbers(data, 2), {"lanes": 96}, 96),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_uncountable_pipeline_has_96_lanes(tmp_path: Path, name: str) -> None:
    make, settings, lanes = PIPELINES[name]
    assert lanes_of(make(write_numbers(tmp_path / "data", 100)), **settings) == lanes


def test_packs_and_buckets_have_96_lanes(tmp_path: Path) -> None:
    class Texts(sp.TaskEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
            return number(sample)

        def length(self, item: int) -> int:
            return 1

        def pack(self, items: list[Any], rng: sp.Rng) -> list[Any]:
            return items

    items = sp.read(write_numbers(tmp_path / "data", 100)).encode(Texts())
    assert lanes_of(items.pack(max_length=4).batch(2)) == lanes_of(items.bucket([4, 8], size=2)) == 96


def test_a_run_with_default_lanes_is_the_run_with_that_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_numbers(tmp_path / "data", 400)
    caplog.set_level(logging.INFO)
    with (
        sp.SavableLoader(numbers(data, 4), seed=7) as default,
        sp.SavableLoader(numbers(data, 4), seed=7, lanes=8) as own,
    ):
        assert caplog.messages == []  # nothing is opened yet
        for _ in range(120):
            assert next(default).tolist() == next(own).tolist()
        assert default.state_dict() == own.state_dict()
        assert "lanes=8" in repr(default)
    assert [line for line in caplog.messages if line.startswith("lanes=")] == [
        "lanes=8, because an epoch has 100 batches. Pass another number to a new run."
    ]


def test_a_loader_that_is_closed_unused_opens_nothing(tmp_path: Path) -> None:
    loader = sp.SavableLoader(numbers(str(tmp_path / "nowhere"), 4), seed=7)
    loader.close()
    with pytest.raises(sp.ShardError):
        next(loader)


@pytest.mark.parametrize("epochs", [None, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumes_on_other_ranks_and_workers(tmp_path: Path, epochs: int | None, workers: int) -> None:
    """100 batches on 8 lanes: a finite epoch has 96 slots."""
    pipeline = numbers(write_numbers(tmp_path / "data", 400), 4, epochs=epochs)
    with sp.SavableLoader(pipeline, seed=7, lanes=8) as alone:
        expected = next_batches(alone, 96)
    found: list[list[int]] = []
    state: dict[str, Any] | None = None
    for world_size in (2, 8, 1, 4):
        with contextlib.ExitStack() as opened:
            loaders = [
                sp.SavableLoader(pipeline, seed=7, ranks=(rank, world_size), num_workers=workers * (rank == 0))
                for rank in range(world_size)
            ]
            for loader in loaders:
                opened.enter_context(loader)
                if state is not None:
                    loader.load_state_dict(state)
            for step in itertools.islice(steps_of_ranks(loaders), 24 // world_size):
                found += [batch.tolist() for batch in step]
            state = sp.merge_states([loader.state_dict() for loader in loaders])
    assert found == expected and len(found) == 96


def test_evaluation_with_data_set_lanes_repeats_the_same_batches(tmp_path: Path) -> None:
    pipeline = numbers(write_numbers(tmp_path / "data", 300), 32, epochs=1)
    with sp.SavableLoader(pipeline, seed=7, on_iter="restart") as loader:
        first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first == second and sum(map(len, first)) == 300


@pytest.mark.parametrize("world_size", [3, 16])
def test_ranks_that_do_not_divide_the_default_are_an_error_that_names_the_next_number(
    tmp_path: Path, world_size: int
) -> None:
    pipeline = numbers(write_numbers(tmp_path / "data", 400), 4)
    loader = sp.SavableLoader(pipeline, seed=7, ranks=(world_size - 1, world_size))
    lanes = {3: 9, 16: 16}[world_size]
    with pytest.raises(
        ValueError,
        match=rf"^{world_size} ranks do not divide lanes=8, the default for this data. Start a "
        rf"run with lanes={lanes}, or use a world size of 1, 2, 4, 8\.$",
    ):
        next(loader)
    for rank in range(world_size):
        next(sp.SavableLoader(pipeline, seed=7, lanes=lanes, ranks=(rank, world_size)))


# The lanes of a state.


@pytest.mark.parametrize("started", [False, True])
def test_lanes_of_a_loaded_state_replace_those_set_by_the_data(tmp_path: Path, started: bool) -> None:
    pipeline = numbers(write_numbers(tmp_path / "data", 400), 4)
    with sp.SavableLoader(pipeline, seed=7, lanes=6) as own:
        next_batches(own, 10)
        state, expected = own.state_dict(), next_batches(own, 30)
    for workers in (0, 2):
        with sp.SavableLoader(pipeline, seed=7, num_workers=workers) as loader:
            if started:
                next_batches(loader, 3)
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            assert next_batches(loader, 30) == expected


def test_a_state_sets_the_lanes_where_the_default_is_96(tmp_path: Path) -> None:
    pipeline = numbers(write_numbers(tmp_path / "data", 400), 4).__call__
    with sp.SavableLoader(pipeline, seed=7, lanes=6) as own, sp.SavableLoader(pipeline, seed=7) as loader:
        next_batches(own, 10)
        loader.load_state_dict(own.state_dict())
        assert next(loader).tolist() == next(own).tolist()


def test_state_with_other_lanes_than_the_argument_is_an_error(tmp_path: Path) -> None:
    pipeline = numbers(write_numbers(tmp_path / "data", 400), 4)
    state = sp.SavableLoader(pipeline, seed=7).state_dict()
    with pytest.raises(sp.CheckpointMismatchError, match="lanes"):
        sp.SavableLoader(pipeline, seed=7, lanes=6).load_state_dict(state)


@pytest.mark.parametrize("started", [False, True])
def test_failed_load_changes_neither_lanes_nor_position(tmp_path: Path, started: bool) -> None:
    data = write_numbers(tmp_path / "data", 400)
    with sp.SavableLoader(numbers(data, 4), seed=7, lanes=6) as own:
        next_batches(own, 10)
        state = own.state_dict()
    with sp.SavableLoader(numbers(data, 4), seed=7) as expected, sp.SavableLoader(numbers(data, 4), seed=7) as loader:
        if started:
            next_batches(loader, 3), next_batches(expected, 3)
        with pytest.raises(sp.CheckpointMismatchError, match="seed"):
            loader.load_state_dict(sp.SavableLoader(numbers(data, 4), seed=8, lanes=6).state_dict())
        with pytest.raises(StateError):
            loader.load_state_dict({**state, "lane_00000": b"damaged"})
        with pytest.raises(sp.CheckpointMismatchError):
            loader.load_state_dict({**state, "lanes": 1 << 40})
        assert loader.state_dict() == expected.state_dict()
        assert next(loader).tolist() == next(expected).tolist()


def test_a_state_that_the_ranks_do_not_divide_names_the_saved_run(tmp_path: Path) -> None:
    pipeline = numbers(write_numbers(tmp_path / "data", 400), 4)
    state = sp.SavableLoader(pipeline, seed=7, lanes=6).state_dict()
    loader = sp.SavableLoader(pipeline, seed=7, ranks=(0, 4))
    with pytest.raises(ValueError, match=r"4 ranks do not divide lanes=6\. Start"):
        loader.load_state_dict(state)
    assert loader.state_dict()["lanes"] == 8


def test_a_run_whose_data_have_grown_keeps_its_lanes_and_its_buffers(tmp_path: Path) -> None:
    data = write_numbers(tmp_path / "data", 400)
    with sp.SavableLoader(numbers(data, 4, 1000), seed=7) as loader:
        next_batches(loader, 20)
        state = loader.state_dict()
    write_numbers(tmp_path / "data", 4000, "b")
    pipeline = numbers(data, 4, 1000)
    with sp.SavableLoader(pipeline, seed=7) as grown, sp.SavableLoader(pipeline, seed=7, lanes=8) as own:
        for each in (grown, own):
            each.load_state_dict(state, allow={"shards"})
        assert next_batches(grown, 400) == next_batches(own, 400)
        assert grown.state_dict()["lanes"] == 8
        assert any(int(value) >= 400 for batch in next_batches(grown, 200) for value in batch)
        assert len(run_of(grown).state_dict()["lane_00000"]) < 12 * 50 + 400  # 50 refs in a buffer, not 550
    assert lanes_of(pipeline) == 96


# Processes and threads.


def test_threads_that_save_at_once_fix_the_lanes_once(tmp_path: Path) -> None:
    data = write_numbers(tmp_path / "data", 400)
    for _ in range(10):
        with sp.SavableLoader(numbers(data, 4), seed=7) as loader:
            barrier, found = threading.Barrier(4), []

            def save(
                loader: sp.SavableLoader = loader, barrier: threading.Barrier = barrier, found: list[Any] = found
            ) -> None:
                barrier.wait()
                loader.state_dict()
                found.append(run_of(loader).position)

            threads = [threading.Thread(target=save) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len({id(position) for position in found}) == 1


class SharedStore(Ranks):
    """Ranks of one process, whose values are in a dict."""

    def __init__(self, rank: int, values: dict[str, str]) -> None:
        super().__init__(rank, 2)
        self._values = values

    def first_value(self, key: str, value: str) -> str:
        return self._values.setdefault(key, value)


def test_ranks_with_other_lanes_are_an_error(tmp_path: Path) -> None:
    pipeline = numbers(write_numbers(tmp_path / "data", 400), 4)
    values: dict[str, str] = {}
    first, second = (run_of(sp.SavableLoader(pipeline, seed=7, ranks=(rank, 2))) for rank in range(2))
    second.load_state_dict(sp.SavableLoader(pipeline, seed=7, lanes=6).state_dict())
    check_same_data(SharedStore(0, values), first.states.fingerprint, has_default_lanes=True)
    with pytest.raises(sp.CheckpointMismatchError, match=r"rank 1 and rank 0 found different .* or lanes"):
        check_same_data(SharedStore(1, values), second.states.fingerprint, has_default_lanes=True)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn", "thread"])
def test_workers_of_each_kind_build_lanes_of_the_run(tmp_path: Path, method: str) -> None:
    data = write_numbers(tmp_path / "data", 400)
    pipeline = sp.read(data).shuffle(20).map(number, global_rng=False).batch(4)
    with sp.SavableLoader(pipeline, seed=7, lanes=8) as own:
        expected = next_batches(own, 20)
    workers = sp.Workers(2, start_method=method)
    with sp.SavableLoader(pipeline, seed=7, workers=workers) as loader:
        assert next_batches(loader, 20) == expected
