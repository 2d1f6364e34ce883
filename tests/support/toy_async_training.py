"""A small model that is trained on rollouts of a thread pool as they finish, without those that finish too late.

A rollout is generated in parts, each a task of the pool. While a long rollout is generated, the model is updated.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import savable_pipeline as sp
from savable_pipeline import custom

THREADS, IN_FLIGHT, TRAINED_TOGETHER = 3, 16, 8
OLDEST, SAVED_EVERY = 3, 4  # greatest age of a rollout, and interval of saves, both in updates


class Vectors(sp.TaskEncoder):
    """An encoder of prompts: a number and a random vector."""

    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"], [rng.normal() for _ in range(4)]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"prompt": torch.tensor([each for each, _ in items]), "x": torch.tensor([each for _, each in items])}


def vectors(shards: str, lane: sp.Lane) -> custom.Stage:
    """Return batches of four prompts, each once per epoch."""
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane, epochs=1), Vectors()), size=4)


class Policy(nn.Module):
    """A linear layer whose state includes the fate of each prompt, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.updates = 0
        self.fates: dict[int, list[str]] = {}

    def note(self, prompt: int, fate: str) -> None:
        """Record the fate of a prompt."""
        self.fates.setdefault(prompt, []).append(fate)

    def get_extra_state(self) -> Any:
        """Return the records and the number of updates."""
        return {"fates": self.fates, "updates": self.updates}

    def set_extra_state(self, state: Any) -> None:
        """Restore the records of a saved model."""
        self.fates, self.updates = state["fates"], state["updates"]


@dataclass(frozen=True, eq=False)
class Rollout:
    """The part of a rollout generated so far; `version` is the number of updates before it was started."""

    prompt: int
    receipt: Tensor
    version: int
    weight: Tensor
    x: Tensor
    parts: int

    def extended(self) -> Rollout:
        """Return the rollout with one more part."""
        return replace(self, x=torch.tanh(self.weight @ self.x), parts=self.parts - 1)


class Killed(Exception):
    """Raised in place of a kill of the process."""


class Trainer:
    """A trainer that trains one epoch, and saves model and loader into one file."""

    def __init__(self, loader: sp.SavableLoader, file: Path) -> None:
        self.model, self._loader, self._file = Policy(), loader, file
        if file.exists():
            saved = torch.load(file, weights_only=True)
            self.model.load_state_dict(saved["model"])
            loader.load_state_dict(saved["loader"])

    def train(self, *, kill_at: int | None = None) -> None:
        """Train to the end of the epoch. Raises `Killed` at update `kill_at`."""
        running: set[Future[Rollout]] = set()
        finished: list[Rollout] = []
        has_more = True
        with ThreadPoolExecutor(THREADS) as pool:
            while has_more or running or finished:
                while has_more and len(running) <= IN_FLIGHT:
                    batch = next(self._loader, None)
                    has_more = batch is not None
                    running |= {pool.submit(begun.extended) for begun in self._new_rollouts(batch or {})}
                ended, running = wait(running, return_when=FIRST_COMPLETED) if running else (set(), running)
                parts = [each.result() for each in ended]
                running |= {pool.submit(rollout.extended) for rollout in parts if rollout.parts}
                finished += self._recent([rollout for rollout in parts if not rollout.parts])
                while len(finished) >= TRAINED_TOGETHER or (finished and not (has_more or running)):
                    self._update(finished[:TRAINED_TOGETHER])
                    finished = finished[TRAINED_TOGETHER:]
                    if self.model.updates == kill_at:
                        raise Killed

    def _new_rollouts(self, batch: Any) -> list[Rollout]:
        """Return a new rollout for each valid row. Every ninth prompt has a long one."""
        rows = zip(batch.get("prompt", ()), batch.get("receipts", ()), batch.get("x", ()), strict=True)
        version, weight = self.model.updates, self.model.layer.weight.detach().clone()
        return [
            Rollout(int(prompt), receipt, version, weight, x, parts=1 if prompt % 9 else 40)
            for prompt, receipt, x in rows
            if receipt[0] >= 0
        ]

    def _recent(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the rollouts that are recent enough, and drop the others."""
        stale = [each for each in rollouts if self.model.updates - each.version > OLDEST]
        for each in stale:
            self._loader.drop(each.receipt[None], "stale")
            self.model.note(each.prompt, "dropped")
        return [each for each in rollouts if each not in stale]

    def _update(self, rollouts: list[Rollout]) -> None:
        loss = self.model.layer(torch.stack([each.x for each in rollouts])).square().mean()
        (gradient,) = torch.autograd.grad(loss, self.model.layer.weight)
        with torch.no_grad():
            self.model.layer.weight -= 0.01 * gradient
        self._loader.acknowledge(torch.stack([each.receipt for each in rollouts]))
        for each in rollouts:
            self.model.note(each.prompt, "trained")
        self.model.updates += 1
        if self.model.updates % SAVED_EVERY == 0:
            torch.save({"model": self.model.state_dict(), "loader": self._loader.state_dict()}, self._file)
