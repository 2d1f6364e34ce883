"""Rollouts as in NeMo-RL's asynchronous trainer, in virtual time: prompts in flight, and gaps filled.

prompts ──▶ 96 in generation, of different durations ──▶ finished ──▶ 32 at a time trained, then `acknowledge`
            each finished one is replaced
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.testing import steps_of_ranks

PROMPTS, IN_FLIGHT, TRAINED_TOGETHER = 736, 96, 32


class Prompts(sp.TaskEncoder):
    """An encoder whose batch is the numbers of its prompts."""

    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"]

    def batch(self, items: list[int], rng: sp.Rng) -> Any:
        return {"prompt": torch.tensor(items)}


def prompts(shards: str, lane: sp.Lane) -> custom.Stage:
    """Return batches of one prompt, each once per epoch."""
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane, epochs=1), Prompts()), size=1)


def loaders(shards: str, world_size: int, *, acknowledge: bool) -> list[sp.SavableLoader]:
    """Return one loader per rank. With padding, ranks that resume at a slot they do not divide lose no prompt."""
    make = partial(sp.SavableLoader, partial(prompts, shards), seed=3, lanes=8, tail="pad", acknowledge=acknowledge)
    return [make(ranks=(rank, world_size)) for rank in range(world_size)]


def duration(prompt: int) -> float:
    """Return the duration of a prompt's generation: mostly short, and a hundred times longer for a few."""
    return random.Random(prompt).paretovariate(1.1)


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint of a trainer and its loaders: how often the model was trained on each prompt, and their state."""

    seen: Counter[int]
    loader: dict[str, Any]


class Rollouts:
    """A trainer with a loader per rank, from the start or from a checkpoint."""

    def __init__(
        self, shards: str, world_size: int, checkpoint: Checkpoint | None = None, *, acknowledge: bool
    ) -> None:
        self._ranks, self._acknowledge = loaders(shards, world_size, acknowledge=acknowledge), acknowledge
        self.seen: Counter[int] = Counter()
        if checkpoint is not None:
            self.seen += checkpoint.seen
            for rank in self._ranks:
                rank.load_state_dict(checkpoint.loader)

    def updates(self) -> Iterator[int]:
        """Train to the end of the epoch; yields the number of prompts after each update."""
        steps = steps_of_ranks(self._ranks)
        now, running, finished = 0.0, [], []
        while True:
            while len(running) + len(self._ranks) <= IN_FLIGHT and (step := next(steps, None)) is not None:
                for taken in self._open(step):
                    heapq.heappush(running, (now + duration(taken[1]), *taken))
            if not running:
                break
            now, *rollout = heapq.heappop(running)
            finished.append(rollout)
            if len(finished) == TRAINED_TOGETHER or not running:
                self._train(finished)
                finished = []
                yield self.seen.total()

    def _open(self, step: list[Any]) -> Iterator[tuple[int, int, list[int]]]:
        """Yield rank, prompt and receipt of each row to roll out. Rows with receipt -1, or that are not valid, are
        omitted.
        """
        for rank, batch in enumerate(step):
            receipt = batch["receipts"][0].tolist() if self._acknowledge else [0, 0]
            if receipt[0] >= 0 and batch["valid"][0]:
                yield rank, int(batch["prompt"][0]), receipt

    def _train(self, rollouts: list[Any]) -> None:
        for rank, prompt, receipt in rollouts:
            self.seen[prompt] += 1
            if self._acknowledge:
                self._ranks[rank].acknowledge([receipt])

    def checkpoint(self) -> Checkpoint:
        """Return the state of the model and the loaders, between two updates."""
        return Checkpoint(Counter(self.seen), sp.merge_states(rank.state_dict() for rank in self._ranks))
