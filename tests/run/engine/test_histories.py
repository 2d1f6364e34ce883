"""Random histories of workers that are late, repeat or lose messages, fall silent or die: no wrong batch."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from tests.conftest import write_numbered_shards
from tests.support.fake_workers import TROUBLES, FakeWorkers, World
from tests.support.toy_faults import NumberEncoder, number_pipeline, packed_numbers

LANES = 6
STEPS = 24  # of a history
HISTORIES = 35
MORE = 10_000  # of the long test


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("histories") / "shards"
    write_numbered_shards(folder, [40, 7, 60])
    return str(folder)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "savable_pipeline")


def buffered(shards: str, lane: sp.Lane, *, epochs: int | None = None) -> custom.Stage:
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane, block_size=4, epochs=epochs), size=5)
    return sp.Batcher(sp.Encode(samples, NumberEncoder()), size=3)


PIPELINES: list[Callable[..., Any]] = [number_pipeline, packed_numbers, buffered]


class Undisturbed:
    """The batches of each pipeline without workers, and the state after each; made once."""

    def __init__(self, shards: str) -> None:
        self._shards = shards
        self._known: dict[tuple[int, int | None], tuple[list[Any], list[Any]]] = {}

    def pipeline(self, number: int, epochs: int | None) -> Any:
        return partial(PIPELINES[number], self._shards, epochs=epochs)

    def of(self, number: int, epochs: int | None) -> tuple[list[Any], list[Any]]:
        if (number, epochs) not in self._known:
            loader = sp.SavableLoader(self.pipeline(number, epochs), seed=3, lanes=LANES)
            batches, states = [], [loader.state_dict()]
            for batch in endless(loader, 3 * STEPS):
                batches.append(batch)
                states.append(loader.state_dict())
            self._known[number, epochs] = batches, states
        return self._known[number, epochs]


def endless(loader: sp.SavableLoader, steps: int) -> Iterator[Any]:
    """Batches, of as many epochs as it takes."""
    left = steps
    while left:
        for batch in loader:
            yield batch
            left -= 1
            if not left:
                return


@pytest.fixture(scope="module")
def undisturbed(shards: str) -> Undisturbed:
    return Undisturbed(shards)


class History:
    """One run in a drawn world, with other workers from time to time; every batch and some states are compared."""

    def __init__(self, undisturbed: Undisturbed, seed: int) -> None:
        self.draw = random.Random(f"history {seed}")
        self.number, self.epochs = self.draw.randrange(len(PIPELINES)), self.draw.choice((None, None, 1))
        self.pipeline = undisturbed.pipeline(self.number, self.epochs)
        self.batches, self.states = undisturbed.of(self.number, self.epochs)
        self.anew = 3 if self.epochs and self.draw.random() < 0.5 else 0  # how often its passes are started again
        self.on_iter: Any = "restart" if self.anew else "continue"
        self.world = World(seed)
        self.errors = self.restarts = 0

    def loader(self) -> sp.SavableLoader:
        workers = FakeWorkers(
            self.draw.randint(1, 4), timeout=20.0, prefetch=self.draw.randint(1, 4), max_restarts=1_000_000,
            world=self.world,
        )  # fmt: skip
        return sp.SavableLoader(self.pipeline, seed=3, lanes=LANES, workers=workers, on_iter=self.on_iter)

    def run(self) -> None:
        loader, step = self.loader(), 0
        while step < STEPS:
            self.world.run_until(self.world.now + self.draw.choice((0.0, 0.0, 0.05, 2.0)), lambda: False)  # it trains
            try:
                batch = next(loader)
            except StopIteration:
                assert self.epochs is not None
                if self.on_iter == "restart":
                    break
                iter(loader)
                continue
            except sp.WorkerError:  # the same sample killed four, or one has not started: the state is whole
                self.errors += 1
                if self.errors > 40:  # of a world in which hardly anything arrives
                    break
                continue
            assert batch == self.batches[step], f"step {step}"
            step += 1
            if self.anew and self.draw.random() < 0.1:
                self.anew, step = self.anew - 1, 0
                iter(loader)
            elif self.draw.random() < 0.1:
                assert loader.state_dict() == self.states[step], f"the state after {step}"
            if self.draw.random() < 0.04 and self.on_iter == "continue":  # a loaded pass is not started again
                loader = self.resumed(loader)
        self.restarts += loader.stats()["restarts"]
        loader.close()

    def resumed(self, loader: sp.SavableLoader) -> sp.SavableLoader:
        state = loader.state_dict()
        self.restarts += loader.stats()["restarts"]
        if self.draw.random() < 0.5:
            loader.close()
            loader = self.loader()
        loader.load_state_dict(state)
        return loader


def histories(undisturbed: Undisturbed, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        history = History(undisturbed, seed)
        try:
            history.run()
        except BaseException as error:
            error.add_note(f"in history {seed}")
            raise
        seen.update(history.world.seen)
        seen.update(errors=history.errors, restarts=history.restarts)
    return seen


def test_random_worker_histories_change_no_batch_and_no_state(undisturbed: Undisturbed) -> None:
    seen = histories(undisturbed, range(HISTORIES))
    assert all(seen[trouble] > 5 for trouble in TROUBLES), seen
    assert seen["restarts"] > HISTORIES and seen["errors"] < seen["restarts"] / 10, seen


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_many_random_histories_change_no_batch_and_no_state(undisturbed: Undisturbed) -> None:
    histories(undisturbed, range(HISTORIES, MORE))
