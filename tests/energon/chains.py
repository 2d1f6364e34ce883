"""Runs of an Energon encoder in legs: of other ranks and workers, some killed, each from the state before it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from typing import Any

import savable_pipeline as sp
from savable_pipeline import energon as ours
from tests.energon.prepared import config, plain
from tests.support.processes import workers
from tests.support.streams import through_a_file

LANES = 6


def by_slots(make: Any, slots: int) -> list[str]:
    """The batches of an undisturbed run in this process: each as a text."""
    loader = ours.get_savable_loader(make(config()))
    return [repr(plain(next(loader))) for _ in range(slots)]


def check_chain(make: Any, expected: list[str], seed: int, *, most_workers: int = 0) -> tuple[int, int]:
    """A chain of legs gives each slot its batch; returns the numbers of resumes and of kills."""
    draw, state, slot, resumes, kills = random.Random(seed), None, 0, -1, 0
    while slot < len(expected):
        world = draw.choice([each for each in (1, 2, 3) if each <= len(expected) - slot])
        count = draw.randint(0, most_workers)
        loaders = [ours.get_savable_loader(make(config(count, rank, world))) for rank in range(world)]
        try:
            for loader in loaders:
                loader.restore_state_rank(state)
            for _ in range(min(draw.randrange(8), (len(expected) - slot) // world)):
                for rank in range(world):
                    loader = loaders[(slot + rank) % world]
                    if count and draw.random() < 0.3 and (running := workers(loader)):
                        with contextlib.suppress(ProcessLookupError):  # killed already
                            os.kill(draw.choice(running), signal.SIGKILL)
                            kills += 1
                    found = repr(plain(next(loader)))
                    assert found == expected[slot + rank], f"slot {slot + rank}, seed {seed}"
                slot += world
            state = through_a_file(sp.merge_states([loader.save_state_rank() for loader in loaders]))
            resumes += 1
        finally:
            for loader in loaders:
                loader.close()
    return resumes, kills
