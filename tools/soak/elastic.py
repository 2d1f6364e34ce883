"""Save a run with some ranks and workers, and resume it with others. All slots must have the same batches.

`survivors.py` also kills single ranks while the others keep running.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline import soak_pipeline
from report import Row, difference

import savable_pipeline as sp
from savable_pipeline.run.state.lane_state import LaneState, unpack_state
from savable_pipeline.run.state.state_dict import lane_name
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.testing import sorted_by_slot

SEED, LANES = 3, 12
CHANGES = [((4, 2), (1, 0)), ((2, 3), (4, 1)), ((1, 2), (3, 1))]  # ranks and workers that save, and those that resume
SUCCESSIVE = [(4, 2), (3, 1), (2, 3), (4, 0)]
COMPARED_SLOTS = 18  # slots to compare after a resume
State = dict[str, Any]


def elastic(shards: Path, folder: Path, *, saves: int, kills: int) -> Iterator[Row]:
    """Resume with other ranks and workers, once and several times in a row, with another batch size, and after kills.

    Args:
        shards: The folder of the data.
        folder: An unused folder.
        saves: The number of steps after each of which a run is saved and resumed.
        kills: The number of ranks to kill in `survivors.py`.
    """
    pipeline = partial(soak_pipeline, str(shards))
    with sp.SavableLoader(pipeline, seed=SEED, lanes=LANES) as loader:
        expected = [digest(batch) for batch in islice(loader, 4 * saves + 60)]
    for before, after in CHANGES:
        yield _compare(pipeline, expected, before, after, saves)
    yield _changes_in_a_row(pipeline, expected, saves)
    yield _other_batch_size(shards)
    yield _survivors(folder, kills)


class Run:
    """All ranks of a run, as loaders in this process."""

    def __init__(self, pipeline: Any, ranks: int, workers: int, state: State | None = None) -> None:
        self._slot = 0 if state is None else state["slot"]
        self._loaders = [
            sp.SavableLoader(pipeline, seed=SEED, lanes=LANES, num_workers=workers, ranks=(rank, ranks))
            for rank in range(ranks)
        ]
        for loader in self._loaders:
            if state is not None:
                loader.load_state_dict(state)

    def step(self) -> list[str]:
        """Take one step, and return the hashes of its slots."""
        batches = [digest(next(loader)) for loader in self._loaders]
        first, self._slot = self._slot, self._slot + len(batches)
        return sorted_by_slot(batches, first)

    def state(self) -> State:
        """Return the merged state of all ranks."""
        return sp.merge_states(loader.state_dict() for loader in self._loaders)

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()


def _compare(pipeline: Any, expected: list[str], before: tuple[int, int], after: tuple[int, int], saves: int) -> Row:
    """Save after each of `saves` steps with the ranks and workers `before`, and resume each state with `after`."""
    (ranks, _), (resumed_ranks, _) = before, after
    states, problem = [], ""
    run = Run(pipeline, *before)
    for step in range(saves):
        found = run.step()
        problem = problem or difference(expected[step * ranks : (step + 1) * ranks], found)
        states.append(run.state())
    run.close()
    for state in states:
        run, slot = Run(pipeline, *after, state), state["slot"]
        found = [hashed for _ in range(COMPARED_SLOTS // resumed_ranks) for hashed in run.step()]
        run.close()
        problem = problem or difference(expected[slot : slot + len(found)], found)
    return Row(
        "elastic",
        f"{before} → {after}",
        _describe_positions(states, resumed_ranks),
        f"{COMPARED_SLOTS * saves} batches",
        problem,
    )


def _changes_in_a_row(pipeline: Any, expected: list[str], saves: int) -> Row:
    """Resume with one number of ranks and workers after another, `saves` times."""
    states: list[State] = []
    problem, compared = "", 0
    for steps in range(1, saves + 1):
        state: State | None = None
        for index, setting in enumerate(SUCCESSIVE):
            slot = 0 if state is None else state["slot"]
            run = Run(pipeline, *setting, state)
            found = [hashed for _ in range((steps + index) % 5 + 1) for hashed in run.step()]
            problem = problem or difference(expected[slot : slot + len(found)], found)
            compared += len(found)
            state = run.state()
            run.close()
            states.append(state)
    case = " → ".join(map(str, SUCCESSIVE))
    return Row("elastic", case, f"{saves} times, {_describe_positions(states, 4)}", f"{compared} batches", problem)


def _describe_positions(states: list[State], ranks: int) -> str:
    """Describe at which difficult positions the states were saved. All are in the middle of an epoch."""
    positions: Counter[str] = Counter()
    for state in states:
        stages = [unpack_state(state[lane_name(lane)], LaneState, "").stages for lane in range(LANES)]
        packs = [saved["source"] for saved in stages if saved is not None]
        positions["mid-pack"] += any(pack["packs"] for pack in packs)
        positions["mid-fan-out"] += any(pack["source"]["part"] for pack in packs)
        positions["at a slot that the ranks do not divide"] += state["slot"] % ranks != 0
    return f"{len(states)} states: " + ", ".join(f"{number} {position}" for position, number in positions.items())


def _other_batch_size(shards: Path) -> Row:
    """Resume with other batch sizes within an epoch. Each lane's items must keep their order."""
    expected = [_ids(soak_pipeline(str(shards), sp.Lane(lane, LANES, SEED), epochs=1, size=1)) for lane in range(LANES)]
    found: list[list[Any]] = [[] for _ in range(LANES)]
    state, slot = None, 0
    for size, steps in ((2, 17), (3, 9), (1, 14), (5, 11)):
        pipeline = partial(soak_pipeline, str(shards), epochs=1, size=size)
        with sp.SavableLoader(pipeline, seed=SEED, lanes=LANES, num_workers=2) as loader:
            if state is not None:
                loader.load_state_dict(state, allow={"batch_size"})
            for batch in islice(loader, steps):
                found[slot % LANES] += _ids([batch])
                slot += 1
            state = loader.state_dict()
    compared = sum(map(len, found))
    problems = (difference(lane[: len(own)], own) for lane, own in zip(expected, found, strict=True))
    problem = next(filter(None, problems), "")
    return Row("elastic", "batch size 2 → 3 → 1 → 5", "one epoch, 2 workers", f"{compared} packs, by lane", problem)


def _survivors(folder: Path, kills: int) -> Row:
    """Run `survivors.py` in a new process, because it forks and so must not have threads."""
    folder.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("survivors.py")), str(folder), str(kills)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        return Row("elastic", "survivors of 3 ranks", f"{kills} kills", "", f"it ended with {run.returncode}")
    result = json.loads(run.stdout.splitlines()[-1])
    problems = [] if result["trained_once"] else ["a slot was trained on twice, or never"]
    problems += [] if result["as_one_rank"] else ["a slot was another batch"]
    done = f"{kills} kills, {result['made_up']} lanes rebuilt from the last common state"
    return Row("elastic", "survivors of 3 ranks", done, f"{result['slots']:,} slots", ", ".join(problems))


def _ids(batches: Any) -> list[Any]:
    """Return the sample numbers of each pack of some batches."""
    return [pack for batch in batches for pack in batch["id"]]
