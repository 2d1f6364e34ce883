"""`assert_exact_resume`: shows that a pipeline, yours too, resumes exactly, or says where it does not."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any, Literal

import torch

from savable_pipeline.compare import first_difference
from savable_pipeline.host import Pipeline
from savable_pipeline.loader import SavableLoader
from savable_pipeline.ranks import Ranks
from savable_pipeline.state import merge_states


def assert_exact_resume(
    pipeline: Pipeline,
    *,
    seed: int = 0,
    lanes: int = 12,
    steps: int = 24,
    workers: Sequence[int] = (0,),
    world_sizes: Sequence[int] = (1,),
    chains: int = 3,
    after: int = 3,
    multiprocessing_context: str | None = None,
    tail: Literal["stop", "pad"] = "stop",
) -> int:
    """Cut a pipeline at every step, go on from each cut in fresh objects, and compare every byte of every batch.

    The uninterrupted run takes `steps` batches (or to the end of the first epoch and the same again) in one process.
    Then, from the state after each of them: the next `after` batches. Then `chains` runs that are stopped and resumed
    again and again, 0 to 3 steps apart, with workers and ranks drawn from `workers` and `world_sizes`. States pass
    through `torch.save` and `torch.load(weights_only=True)`. Gives the number of resumes that were compared.

    Take `steps` of at least twice `lanes`: before its second batch a lane shows nothing of what it keeps between two.

    Raises AssertionError that names the first slot, field and sample that differ.
    """
    make = _Maker(
        pipeline, {"seed": seed, "lanes": lanes, "multiprocessing_context": multiprocessing_context, "tail": tail}
    )
    expected, states = _uninterrupted(make, steps)
    resumes = 0
    for cut, state in enumerate(states):
        with make(0) as loader:
            loader.load_state_dict(state)
            found = _take(loader, min(after, len(expected) - cut))
        _compare(expected, cut, found, f"resumed at step {cut}")
        resumes += 1
    draw = random.Random(seed)
    for chain in range(chains):
        resumes += _chain(make, expected, draw, workers, world_sizes, f"chain {chain}")
    return resumes


class _Maker:
    """Makes loaders that differ only in what may change."""

    def __init__(self, pipeline: Pipeline, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._pipeline = pipeline

    def __call__(self, num_workers: int, rank: int = 0, world_size: int = 1) -> SavableLoader:
        return SavableLoader(
            self._pipeline, num_workers=num_workers, rank=rank, world_size=world_size, **self._settings
        )

    def ranks(self, num_workers: int, world_size: int) -> list[SavableLoader]:
        """The loaders of all ranks, in this process, agreeing as ranks under torch.distributed would."""
        loaders = [self(num_workers, rank, world_size) for rank in range(world_size)]
        agreed: dict[tuple[int, int], bool] = {}
        for rank, loader in enumerate(loaders):
            loader._ranks = _LocalRanks(rank, loaders, agreed)
        return loaders


class _LocalRanks(Ranks):
    """Ranks that live in one process and take their steps in turn."""

    def __init__(self, rank: int, loaders: list[SavableLoader], agreed: dict[tuple[int, int], bool]) -> None:
        super().__init__(rank, len(loaders), None)
        self._loaders = loaders
        self._agreed = agreed

    def all_true(self, mine: bool) -> bool:
        asking = self._loaders[self.rank]
        about = (asking.epoch, asking._at.rounds)
        if about not in self._agreed:  # the first to ask: no rank has taken this step yet
            self._agreed[about] = all(one._rounds.own_vote(one._at, one._ranks) for one in self._loaders)
        return self._agreed[about]


_END: Any = object()  # stands in a stream for the end of an epoch


def _uninterrupted(make: _Maker, steps: int) -> tuple[list[Any], list[dict[str, Any]]]:
    with make(0) as loader:
        states = [_copy(loader.state_dict())]
        expected: list[Any] = []
        while len(expected) < steps:
            expected += _take(loader, 1)
            states.append(_copy(loader.state_dict()))
    return expected, states


def _take(loader: SavableLoader, n: int) -> list[Any]:
    """The next `n` entries of the stream, where the end of an epoch counts as one and the next one follows."""
    taken: list[Any] = []
    batches = iter(loader)
    while len(taken) < n:
        batch = next(batches, _END)
        taken.append(batch)
        if batch is _END:
            if len(taken) > 1 and taken[-2] is _END:
                raise AssertionError("an epoch without a single batch: too little data for so many lanes")
            batches = iter(loader)
    return taken


def _chain(
    make: _Maker,
    expected: list[Any],
    draw: random.Random,
    workers: Sequence[int],
    world_sizes: Sequence[int],
    name: str,
) -> int:
    """Resume again and again with other workers and ranks until the expected stream is used up."""
    done, resumes = 0, 0
    state: dict[str, Any] | None = None
    trail: list[str] = []
    while done < len(expected):
        world_size, num_workers = draw.choice(list(world_sizes)), draw.choice(list(workers))
        loaders = make.ranks(num_workers, world_size)
        try:
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            steps = draw.randrange(4)
            trail.append(f"{world_size} ranks × {num_workers} workers at {done}")
            found = _steps(loaders, steps, expected[done:])
            done = _compare(expected, done, found, f"{name}, resumed {' then '.join(trail[-4:])}", world_size)
            state = merge_states(_copy(loader.state_dict()) for loader in loaders)
        finally:
            for loader in loaders:
                loader.close()
        resumes += 1
        if done + world_size > len(expected) and world_size > 1:
            break  # what is left is less than a step of so many ranks may take
    return resumes


def _steps(loaders: list[SavableLoader], steps: int, expected: list[Any]) -> list[Any]:
    """What the ranks are given in some steps, in the order of the slots, as long as `expected` lasts.

    Ranks that began at a slot they do not divide may leave out an epoch's last slots, too few for a step of them all:
    those count as given.
    """
    given: list[Any] = []
    for _ in range(steps):
        if len(given) + len(loaders) > len(expected):
            break
        first = loaders[0]._at.slot
        batches = [next(iter(loader), _END) for loader in loaders]
        if any(batch is _END for batch in batches):
            assert all(batch is _END for batch in batches), "the ranks do not end at the same step"
            left_out = -first % len(loaders)
            given += [*expected[len(given) : len(given) + left_out], _END]
        else:
            given += sorted_by_slot(batches, first)
    return given


def sorted_by_slot(batches: list[Any], first: int) -> list[Any]:
    """The batches of a step that began at slot `first`, one of each rank in the order of the ranks, by slot."""
    return [batches[(first + i) % len(batches)] for i in range(len(batches))]


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint would."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copied: dict[str, Any] = torch.load(file, weights_only=True)
    return copied


def _compare(expected: list[Any], start: int, found: list[Any], how: str, world_size: int = 1) -> int:
    """Compare what was found with the expected stream from `start` on; gives where in it the next entry lies.

    Ranks that began at a slot that they do not divide leave out the last slots of an epoch that fill no step.
    """
    position = start
    for batch in found:
        if batch is _END:
            left = expected[position : position + world_size]
            position += left.index(_END) if _END in left else 0
        i, position = position, position + 1
        if (expected[i] is _END) != (batch is _END):
            what = "an epoch ended" if batch is _END else "an epoch went on"
            raise AssertionError(f"{how}: {what} at step {i}, otherwise than uninterrupted")
        difference = None if batch is _END else first_difference(expected[i], batch)
        if difference:
            raise AssertionError(f"{how}: the batch at step {i} differs in {difference}")
    return position
