"""Helpers for users' tests: `assert_exact_resume` and all ranks in one process."""

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
    """Interrupt a pipeline after every step, resume it, and compare all batches.

    The uninterrupted run takes `steps` steps in one process, across ends of epochs. From the state after each step, a
    new run takes the next `after` batches, and every byte of them is compared. Then `chains` runs are interrupted and
    resumed repeatedly, every 0 to 3 steps. States pass through `torch.save` and `torch.load(weights_only=True)`.

    Args:
        pipeline: The function that builds the stages of a lane.
        seed: The seed of the run, and of the random interruptions.
        lanes: The number of lanes of the run.
        steps: The number of steps of the uninterrupted run. Pass at least twice `lanes`, because an error in the state
            of a lane shows in its second batch at the earliest.
        workers: Numbers of worker processes that the chains draw from.
        world_sizes: Numbers of ranks that the chains draw from.
        chains: How many runs are interrupted and resumed repeatedly.
        after: The number of batches compared after each single resume.
        start_method: The start method of worker processes, as for `sp.Workers`.
        tail: What to do at the end of a finite run, as for `SavableLoader`.
        epoch_slots: The length of an epoch, as for `SavableLoader`.

    Returns:
        The number of resumes that were compared.

    Raises:
        AssertionError: A batch differs. The message names the first step, field and sample.
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
    for step, state in enumerate(states):
        with Run(settings) as run:
            run.load_state_dict(state)
            found = [_next_entry(run) for _ in range(min(after, len(expected) - step))]
        _compare(expected, step, found, f"resumed at step {step}")
        resumes += 1
    draw = random.Random(seed)
    for chain in range(chains):
        resumes += _chain(settings, expected, draw, workers, world_sizes, f"chain {chain}")
    return resumes


def steps_of_ranks(loaders: Sequence[SavableLoader]) -> Iterator[list[Any]]:
    """Yield the steps of all ranks of a run in this process, to the end of the epoch.

    The ranks of a finite run must agree on its end. Loaders in separate processes use torch.distributed for that, but
    here they vote directly. Between two steps, each loader can save its state. The next call continues as the next
    `iter()` of the loaders would. If one rank raises, others may have finished that step already. Then load one state
    into all of them.

    Args:
        loaders: One loader per rank, in the order of ranks. They differ only in `ranks=`.

    Yields:
        For each step, the ranks' batches in the order of ranks (`sorted_by_slot` sorts them by slot). An endless run
        without `epoch_slots` never ends.

    Raises:
        ValueError: The loaders are not those of all ranks of one run, in their order and at the same position.

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
    positions = {(run.position.epoch, run.position.slot) for run in map(iter, runs)}
    if len(positions) > 1:
        found = ", ".join(f"slot {slot} of epoch {epoch}" for epoch, slot in sorted(positions))
        raise ValueError(f"the ranks are at {found}. Load one state into all loaders.")
    while runs[0].position.previous is None:
        yield voted_step(runs)
    for run in runs:
        run.end_epoch()


class _Entry(NamedTuple):
    """Batch of a run, with its epoch and slot."""

    epoch: int
    slot: int
    batch: Any


def _uninterrupted(settings: LoaderSettings, steps: int) -> tuple[list[_Entry], list[dict[str, Any]]]:
    """Return the batches of an uninterrupted run, and the states before and after each."""
    with Run(settings) as run:
        states = [_copy(run.state_dict())]
        expected: list[_Entry] = []
        while len(expected) < steps:
            expected.append(_next_entry(run))
            states.append(_copy(run.state_dict()))
    return expected, states


def _next_entry(run: Run) -> _Entry:
    """Take the next batch of the only rank."""
    return _take_step([run])[0]


def _take_step(runs: Sequence[Run]) -> list[_Entry]:
    """Take the next step of all ranks, and return its batches in the order of slots.

    At the end of an epoch, start the next one.
    """
    batches = voted_step([iter(run) for run in runs])
    after = runs[0].position.previous or runs[0].position  # the position after the step
    first = after.slot - len(runs)
    return [_Entry(after.epoch, first + i, batch) for i, batch in enumerate(sorted_by_slot(batches, first))]


def _chain(
    settings: LoaderSettings,
    expected: list[_Entry],
    draw: random.Random,
    workers: Sequence[int],
    world_sizes: Sequence[int],
    name: str,
) -> int:
    """Resume repeatedly with other numbers of workers and ranks until the expected batches end.

    Return the number of resumes. `name` names the chain in messages.
    """
    done, resumes = 0, 0  # the index of the next expected batch, and the number of resumes
    state: dict[str, Any] | None = None
    trail: list[str] = []  # the resumes so far, for messages
    while done < len(expected):
        world_size, num_workers = draw.choice(list(world_sizes)), draw.choice(list(workers))
        runs = [Run(replace(settings, num_workers=num_workers, ranks=(rank, world_size))) for rank in range(world_size)]
        try:
            for run in runs:
                if state is not None:
                    run.load_state_dict(state)
            trail.append(f"{world_size} ranks × {num_workers} workers at {done}")
            for _ in range(draw.randrange(4)):
                if done + 2 * world_size > len(expected) + 1:  # a step, and the slots that an epoch's end may skip
                    break
                how = f"{name}, resumed {' then '.join(trail[-4:])}"
                done = _compare(expected, done, _take_step(runs), how, world_size)
                done += _count_skipped(expected, done, runs[0].position.epoch, world_size)
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
        batches: One batch per rank, in the order of ranks.
        first: The slot at which the step started.

    Returns:
        The batches of slots `first`, `first + 1`, …

    Example:
        >>> from savable_pipeline.testing import sorted_by_slot
        >>> sorted_by_slot(["slot 6", "slot 4", "slot 5"], 4)  # of ranks 0, 1 and 2
        ['slot 4', 'slot 5', 'slot 6']
    """
    return [batches[(first + i) % len(batches)] for i in range(len(batches))]


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """Save the state to a checkpoint file and load it again."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copied: dict[str, Any] = torch.load(file, weights_only=True)
    return copied


def _compare(expected: list[_Entry], index: int, found: list[_Entry], how: str, world_size: int = 1) -> int:
    """Compare batches with the expected ones from `index` on, and return the index of the next expected one.

    If the number of ranks does not divide the slots of an epoch, its last slots may be missing, or padded to a step.
    """
    for epoch, slot, batch in found:
        index += _count_skipped(expected, index, epoch, world_size)
        if index == len(expected):
            break
        entry = expected[index]
        if epoch < entry.epoch and world_size > 1 and _is_padding(batch):
            continue
        i, index = index, index + 1
        if (entry.epoch, entry.slot) != (epoch, slot):
            event = "an epoch ended" if epoch > entry.epoch else "an epoch went on"
            raise AssertionError(f"{how}: {event} at step {i}, otherwise than uninterrupted")
        difference = first_difference(entry.batch, batch)
        if difference:
            raise AssertionError(f"{how}: the batch at step {i} differs in {difference}")
    return index


def _count_skipped(expected: list[_Entry], index: int, epoch: int, world_size: int) -> int:
    """Return how many of the expected batches from `index` on belong to the epoch before `epoch`.

    They are less than a step, and were skipped.
    """
    return sum(entry.epoch < epoch for entry in expected[index : index + world_size - 1])


def _is_padding(batch: Any) -> bool:
    """Return whether all rows of a batch are padding."""
    return isinstance(batch, dict) and "valid" in batch and not batch["valid"].any()
