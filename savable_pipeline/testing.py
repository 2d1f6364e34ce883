"""For users' tests: `assert_exact_resume`, which names the first difference, and the ranks of a run in one process."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from savable_pipeline.run.engine.worker_settings import Workers
from savable_pipeline.run.loader.run import Run, voted_step
from savable_pipeline.run.loader.savable_loader import SavableLoader, run_of
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.state.state_dict import merge_states
from savable_pipeline.stages.batch_difference import first_difference
from savable_pipeline.stages.pipeline import PipelineFunction


def assert_exact_resume(
    pipeline: PipelineFunction,
    *,
    seed: int = 0,
    lanes: int = 12,
    steps: int = 24,
    workers: Sequence[int] = (0,),
    world_sizes: Sequence[int] = (1,),
    chains: int = 3,
    after: int = 3,
    start_method: str | None = None,
    tail: Literal["stop", "pad"] = "stop",
    epoch_slots: int | None = None,
) -> int:
    """Stop a pipeline after every step, resume it in fresh objects, and compare every byte of every batch.

    The uninterrupted run takes `steps` steps in one process, through the ends of epochs. From the state after each of
    them a fresh run takes the next `after` batches. Then `chains` runs are stopped and resumed repeatedly, every 0 to 3
    steps. States pass through `torch.save` and `torch.load(weights_only=True)`.

    Args:
        pipeline: The function that builds the stages of a lane.
        seed: The seed of the run, and of the random cuts.
        lanes: The number of lanes of the run.
        steps: Steps of the uninterrupted run. Take at least twice `lanes`: what a lane keeps from one batch to the next
            shows in its second batch.
        workers: Numbers of worker processes that the chains draw from.
        world_sizes: Numbers of ranks that they draw from.
        chains: How many runs are stopped and resumed again and again.
        after: Batches compared after each single resume.
        start_method: Of the worker processes, as for `sp.Workers`.
        tail: As for `SavableLoader`.
        epoch_slots: As for `SavableLoader`.

    Returns:
        The number of resumes that were compared.

    Raises:
        AssertionError: A batch differs; the message names the first step, field and sample.
        ValueError: A setting is wrong.

    Example:
        >>> class Numbers(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["id"]
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Numbers()), size=4)
        >>> from savable_pipeline.testing import assert_exact_resume
        >>> assert_exact_resume(pipeline, lanes=4, steps=8, chains=0)  # one resume at each step, and one at the end
        9
    """
    settings = LoaderSettings(
        pipeline,
        seed=seed,
        lanes=lanes,
        ranks=(0, 1),
        workers=Workers(start_method=start_method),
        tail=tail,
        epoch_slots=epoch_slots,
    )
    expected, states = _uninterrupted(settings, steps)
    resumes = 0
    for cut, state in enumerate(states):
        with Run(settings) as run:
            run.load_state_dict(state)
            found = [_entry(run) for _ in range(min(after, len(expected) - cut))]
        _compare(expected, cut, found, f"resumed at step {cut}")
        resumes += 1
    draw = random.Random(seed)
    for chain in range(chains):
        resumes += _chain(settings, expected, draw, workers, world_sizes, f"chain {chain}")
    return resumes


def steps_of_ranks(loaders: Sequence[SavableLoader]) -> Iterator[list[Any]]:
    """Take the steps of all ranks of a run in this process: an epoch, or what is left of it.

    The ranks of a finite run must agree on its end, for which loaders in processes of their own use torch.distributed;
    here they vote together. Between two steps each loader can be asked for its state, and the next call continues as
    the next `iter()` of the loaders would. If one rank raises, others may already be after that step: then load a state
    into all of them.

    Args:
        loaders: One of each rank, in the order of the ranks, made alike with `ranks=`.

    Yields:
        For each step, the ranks' batches in the order of the ranks (`sorted_by_slot` sorts them by slot). There is no
        end to an endless run without `epoch_slots`.

    Raises:
        ValueError: The loaders are not those of all ranks of one run, in their order and at the same place.

    Example:
        >>> class Numbers(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["id"]
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane, epochs=1), Numbers()), size=4)
        >>> from savable_pipeline.testing import steps_of_ranks
        >>> ranks = [sp.SavableLoader(pipeline, seed=7, lanes=4, ranks=(rank, 2)) for rank in range(2)]
        >>> steps = list(steps_of_ranks(ranks))
        >>> len(steps), len(steps[0])
        (50, 2)
        >>> len({number for step in steps for batch in step for number in batch.tolist()})  # no sample twice
        400
    """
    runs = [run_of(loader) for loader in loaders]
    found = [(run.ranks.rank, run.ranks.world_size) for run in runs]
    if not runs or found != [(rank, len(runs)) for rank in range(len(runs))]:
        listed = ", ".join(f"{rank} of {world_size}" for rank, world_size in found) or "none"
        raise ValueError(f"steps_of_ranks needs the loaders of all ranks in their order, not {listed}")
    if len({(run.settings.seed, run.settings.lanes, run.settings.tail, run.settings.epoch_slots) for run in runs}) > 1:
        raise ValueError("the loaders differ in seed, lanes, tail or epoch_slots. Change only ranks=.")
    return _steps(runs)


def _steps(runs: Sequence[Run]) -> Iterator[list[Any]]:
    places = {(run.position.epoch, run.position.slot) for run in map(iter, runs)}
    if len(places) > 1:
        places_found = ", ".join(f"slot {slot} of epoch {epoch}" for epoch, slot in sorted(places))
        raise ValueError(f"the ranks are at {places_found}. Load one state into all loaders.")
    while runs[0].position.previous is None:
        yield voted_step(runs)
    for run in runs:
        run.end_epoch()


class _Entry(NamedTuple):
    """A batch of the stream, and its place there."""

    epoch: int
    slot: int
    batch: Any


def _uninterrupted(settings: LoaderSettings, steps: int) -> tuple[list[_Entry], list[dict[str, Any]]]:
    with Run(settings) as run:
        states = [_copy(run.state_dict())]
        expected: list[_Entry] = []
        while len(expected) < steps:
            expected.append(_entry(run))
            states.append(_copy(run.state_dict()))
    return expected, states


def _entry(run: Run) -> _Entry:
    return _take_step([run])[0]


def _take_step(runs: Sequence[Run]) -> list[_Entry]:
    """Take one step of the runs of all ranks, which vote together. Returns the batches in the order of the slots.

    At the end of an epoch, begin the next one.
    """
    taken = voted_step([iter(run) for run in runs])
    at = runs[0].position.previous or runs[0].position  # after the step
    first = at.slot - len(runs)
    return [_Entry(at.epoch, first + i, batch) for i, batch in enumerate(sorted_by_slot(taken, first))]


def _chain(
    settings: LoaderSettings,
    expected: list[_Entry],
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
        runs = [Run(replace(settings, num_workers=num_workers, ranks=(rank, world_size))) for rank in range(world_size)]
        try:
            for run in runs:
                if state is not None:
                    run.load_state_dict(state)
            trail.append(f"{world_size} ranks × {num_workers} workers at {done}")
            for _ in range(draw.randrange(4)):
                if done + 2 * world_size > len(expected) + 1:  # a step, and what ranks may leave out before it
                    break
                how = f"{name}, resumed {' then '.join(trail[-4:])}"
                done = _compare(expected, done, _take_step(runs), how, world_size)
                done += _left_out(expected, done, runs[0].position.epoch, world_size)
            state = merge_states(_copy(run.state_dict()) for run in runs)
        finally:
            for run in runs:
                run.close()
        resumes += 1
        if done + 2 * max(world_sizes) > len(expected) + 1 and max(world_sizes) > 1:
            break
    return resumes


def sorted_by_slot(batches: list[Any], first: int) -> list[Any]:
    """Sort the batches of a step by slot.

    Args:
        batches: One of each rank, in the order of the ranks.
        first: The slot at which the step began.

    Returns:
        The batches of slots `first`, `first + 1`, …

    Example:
        >>> from savable_pipeline.testing import sorted_by_slot
        >>> sorted_by_slot(["slot 6", "slot 4", "slot 5"], 4)  # of ranks 0, 1 and 2
        ['slot 4', 'slot 5', 'slot 6']
    """
    return [batches[(first + i) % len(batches)] for i in range(len(batches))]


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it is read back from a checkpoint file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copied: dict[str, Any] = torch.load(file, weights_only=True)
    return copied


def _compare(expected: list[_Entry], place: int, found: list[_Entry], how: str, world_size: int = 1) -> int:
    """Compare the stream `found` with the expected one from `place` on. Returns the place of the next entry in that.

    Ranks whose number does not divide an epoch's slots leave out its last ones, too few for a step, or fill them up.
    """
    for epoch, slot, batch in found:
        place += _left_out(expected, place, epoch, world_size)
        if place == len(expected):
            break
        there = expected[place]
        if epoch < there.epoch and world_size > 1 and _is_filler(batch):
            continue
        i, place = place, place + 1
        if (there.epoch, there.slot) != (epoch, slot):
            what = "an epoch ended" if epoch > there.epoch else "an epoch went on"
            raise AssertionError(f"{how}: {what} at step {i}, otherwise than uninterrupted")
        difference = first_difference(there.batch, batch)
        if difference:
            raise AssertionError(f"{how}: the batch at step {i} differs in {difference}")
    return place


def _left_out(expected: list[_Entry], place: int, epoch: int, world_size: int) -> int:
    """How many entries from `place` on, fewer than a step of the ranks, are of the epoch before."""
    return sum(entry.epoch < epoch for entry in expected[place : place + world_size - 1])


def _is_filler(batch: Any) -> bool:
    """Whether no row of a batch counts."""
    return isinstance(batch, dict) and "valid" in batch and not batch["valid"].any()
