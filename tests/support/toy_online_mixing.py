"""A mixture that follows the losses of its domains by exponentiated gradient, as in DoReMi and ODM.

Every few steps, a domain's weight is multiplied by exp(rate · its running loss). A fixed share is spread evenly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import savable_pipeline as sp
from savable_pipeline import custom

DOMAINS = ("flat", "steep", "noisy")
EVERY, RATE, EVEN, KEPT = 6, 1.0, 0.05, 0.8


class Points(sp.TaskEncoder):
    """An encoder of points of a line, with a slope per domain. Those of the last domain are noisy."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        domain, x = DOMAINS.index(sample.source), sample.json()["id"] % 11 / 11
        return domain, x, (0.1, 3.0, 0.5)[domain] * x + (rng.normal() if domain == 2 else 0.0)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        domains, *points = zip(*items, strict=True)
        return {"domain": torch.tensor(domains), "points": torch.tensor(points)}


def domains(shards: str, lane: sp.Lane) -> custom.Stage:
    """Return the domains, with equal weights until others are decided."""
    sources = {name: sp.TarShardReader(f"{shards}/{name}", lane) for name in DOMAINS}
    blend = sp.Blend(sources, weights=dict.fromkeys(DOMAINS, 1))
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(blend, size=5), Points()), size=8)


def mixed_loader(shards: str, rank: int = 0, world_size: int = 1) -> sp.SavableLoader:
    """Return the loader of a rank."""
    return sp.SavableLoader(partial(domains, shards), seed=3, lanes=4, ranks=(rank, world_size))


class Mixed(nn.Module):
    """A model with a slope per domain. Its state includes the running losses and the weights."""

    losses: Tensor  # float32 (domains,)
    weights: Tensor  # float32 (domains,)

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.zeros(len(DOMAINS)))
        self.register_buffer("losses", torch.ones(len(DOMAINS)))
        self.register_buffer("weights", torch.full((len(DOMAINS),), 1 / len(DOMAINS)))

    def train_on(self, batch: Any) -> None:
        """Make one step of gradient descent, and update the running losses of the batch's domains."""
        x, y = batch["points"]
        each = (self.slopes[batch["domain"]] * x - y).square()
        (gradient,) = torch.autograd.grad(each.mean(), self.slopes)
        with torch.no_grad():
            self.slopes -= 0.2 * gradient
            for domain in batch["domain"].unique():
                loss = each[batch["domain"] == domain].mean()
                self.losses[domain] = KEPT * self.losses[domain] + (1 - KEPT) * loss

    def new_weights(self) -> dict[str, float]:
        """Compute the weights of the next steps from the running losses."""
        grown = self.weights * torch.exp(RATE * self.losses)
        self.weights = (1 - EVEN) * grown / grown.sum() + EVEN / len(DOMAINS)
        return dict(zip(DOMAINS, self.weights.tolist(), strict=True))


class MixedTraining:
    """A model and its loader. `batches` lists what it was trained on, and `decided` the weights by their first slot."""

    def __init__(self, shards: str, saved: Any = None) -> None:
        self.model, self._loader = Mixed(), mixed_loader(shards)
        self.batches: list[Any] = []
        self.decided: dict[int, dict[str, float]] = {}
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self._loader.load_state_dict(saved["loader"])

    def train(self, steps: int) -> None:
        """Train up to a step of the run."""
        while (step := self._loader.state_dict()["slot"]) < steps:
            if step and step % EVERY == 0 and step not in self.decided:
                weights = self.model.new_weights()
                self.decided[self._loader.reconfigure(weights=weights)] = weights
            self.batches.append(next(self._loader))
            self.model.train_on(self.batches[-1])

    def saved(self) -> dict[str, Any]:
        """Return the states of model and loader."""
        return {"model": self.model.state_dict(), "loader": self._loader.state_dict()}
