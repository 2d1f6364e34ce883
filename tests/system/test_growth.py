"""Data that grows in a run: old epochs as on the old data, new ones as on all of it, however the run is stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.run import Run
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.batch_difference import digest
from tests.conftest import write_numbered_shards
from tests.support.streams import through_a_file
from tests.support.toy_pipelines import toy_pipeline

LANES = 6
SIZES = [31, 18, 40, 25, 37]
Batches = dict[tuple[int, int], str]  # by epoch and slot


class Ids(sp.TaskEncoder):
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"], "drawn": rng.integers(1000)}


def passes(folder: str, lane: sp.Lane, **how: Any) -> custom.Stage:
    """A pipeline of known length, so that ranks need not vote, with a buffer below the bound of the smallest data."""
    samples = sp.TarShardReader(folder, lane, epochs=1, block_size=3, **how)
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(samples, size=5), Ids()), size=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The folder of the first so many shards."""
    root = tmp_path_factory.mktemp("growth")
    for count in range(1, len(SIZES) + 1):
        write_numbered_shards(root / str(count), SIZES[:count])
    return {count: str(root / str(count)) for count in range(1, len(SIZES) + 1)}


def begun(pipeline: Callable[[sp.Lane], custom.Stage], state: Any, world: int, allow: Sequence[str]) -> Any:
    """The ranks of a run that go on from `state`."""
    runs = [Run(LoaderSettings(pipeline, seed=5, lanes=LANES, ranks=(rank, world))) for rank in range(world)]
    for run in runs if state is not None else ():
        run.load_state_dict(state, allow)
    return runs


def take(runs: list[Run], steps: int, found: Batches) -> None:
    """Take steps of all ranks, and note each batch by its epoch and slot."""
    for _ in range(steps):
        for run in runs:
            try:
                batch = next(run)
            except StopIteration:
                iter(run)
                batch = next(run)
            place = run.epoch, run.last_step()[0]
            assert place not in found
            found[place] = digest(batch)


def grown_run(
    pipelines: list[tuple[Callable[[sp.Lane], custom.Stage], int]],
    draw: random.Random | None = None,
) -> tuple[Batches, list[tuple[int, int]]]:
    """The batches of a run that takes so many slots of each pipeline in turn, and where it went on with the next.

    `draw`: it is stopped between them again and again, to go on with other ranks.
    """
    found: Batches = {}
    state, places = None, []
    for pipeline, slots in pipelines:
        left = slots
        while left:
            world = draw.choice([each for each in (1, 2, 3, 6) if each <= left]) if draw else 1
            steps = min(left // world, draw.randrange(4, 12)) if draw else left
            runs = begun(pipeline, state, world, ["shards"] if left == slots else [])
            try:
                take(runs, steps, found)
                state = through_a_file(sp.merge_states([run.state_dict() for run in runs]))
            finally:
                for run in runs:
                    run.close()
            left -= steps * world
        places.append((state["epoch"], state["slot"]))
    return found, places


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", [{}, {"shuffle": False}, {"subset": 0.7}])
def test_each_epoch_equals_that_of_a_run_on_its_shards(folders: dict[int, str], how: dict[str, Any], seed: int) -> None:
    draw = random.Random(f"{how}{seed}")
    counts, slots = sorted(draw.sample(range(2, 6), 3)), [6 * draw.randrange(1, 8), 6 * draw.randrange(1, 8) + 30, 90]
    plan = [(partial(passes, folders[count], **how), n) for count, n in zip(counts, slots, strict=True)]
    found, places = grown_run(plan, draw)
    expected: dict[int, Batches] = {}
    for count in counts:
        with Run(LoaderSettings(partial(passes, folders[count], **how), seed=5, lanes=LANES)) as run:
            expected[count] = {}
            while run.epoch <= places[-1][0]:
                take([run], 1, expected[count])
    joins = [0] + [epoch + (slot > 0) for epoch, slot in places[:-1]]
    for (epoch, slot), batch in found.items():
        count = next(count for join, count in reversed(list(zip(joins, counts, strict=True))) if join <= epoch)
        assert expected[count][epoch, slot] == batch, (epoch, slot)
    assert max(found)[0] >= joins[-1] > joins[1] >= 0


LONGER = (12, 48, 120)  # slots on one, three and five shards


@pytest.mark.parametrize(
    ("how", "slots"),
    [
        ({"blend": "items", "by": "tokens", "buffer": 5}, (12, 36, 60)),
        pytest.param({"blend": "items", "by": "tokens", "buffer": 5}, LONGER, marks=pytest.mark.long),
        pytest.param({"blend": "nested", "pack": "first_fit_decreasing"}, LONGER, marks=pytest.mark.long),
        pytest.param({"shuffle": False, "pack": None, "block_size": 2}, LONGER, marks=pytest.mark.long),
    ],
)
def test_run_that_grew_twice_resumes_exactly_after_any_interruption(
    folders: dict[int, str], how: dict[str, Any], slots: tuple[int, int, int]
) -> None:
    pipelines = [partial(toy_pipeline, folders[count], **how) for count in (1, 3, 5)]
    plan = list(zip(pipelines, slots, strict=True))
    expected, _ = grown_run(plan)
    found, _ = grown_run(plan, random.Random(str(how)))
    assert found == expected
    unmixed, _ = grown_run([plan[0], (pipelines[2], slots[1] + slots[2])])
    assert unmixed != expected  # else this test shows nothing of the second growth


def test_later_epochs_yield_all_samples_of_the_grown_data_once(folders: dict[int, str]) -> None:
    def ids(batches: Any) -> list[int]:
        return sorted(int(number) for batch in batches for number in batch["id"][batch["valid"]])

    loader = sp.SavableLoader(partial(passes, folders[2]), seed=5, lanes=LANES, tail="pad")
    old = [next(loader) for _ in range(4)]
    later = sp.SavableLoader(partial(passes, folders[5]), seed=5, lanes=LANES, tail="pad")
    later.load_state_dict(loader.state_dict(), allow="shards")
    assert ids([*old, *later]) == list(range(sum(SIZES[:2])))
    iter(later)
    length, given = len(later), list(later)
    assert len(given) == length
    assert ids(given) == list(range(sum(SIZES)))
