"""Pipelines of noisy vectors, and a model that logs its batches, for the tests of trainers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.batch_difference import digest
from tests.support.shards import write_numbered_shards

LANES = 6
SAMPLES = 72  # 18 batches per epoch, of 4 rows: 3 of each lane
ROWS = 4


class Noisy(sp.TaskEncoder):
    """An encoder of vectors with random noise."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        return {"x": torch.tensor([number % 7, number % 5, 1.0, rng.normal()]), "label": number % 3}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        labels = torch.tensor([item["label"] for item in items])
        return {"x": torch.stack([item["x"] for item in items]) + rng.normal(), "label": labels}


class Tokens(Noisy):
    """The same numbers for a causal language model: int64 (rows, 4), of 64 words."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        tokens = (100 * super().batch(items, rng)["x"]).long() % 64
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


class Prompts(Noisy):
    """The same numbers as prompts for GRPO, each twice."""

    generations = 2

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        texts = [" ".join(map(str, row.tolist())) for row in super().batch(items, rng)["x"]]
        return [{"prompt": text} for text in texts for _ in range(self.generations)]


class ToyPipeline:
    """Pipeline of a KIND: "endless"; "counted", with epochs of known length; "packed", with epochs of unknown
    length.
    """

    def __init__(self, shards: str, kind: str, *, shuffle: bool = True, encoder: type[Noisy] = Noisy) -> None:
        self.shards = shards
        self.kind = kind
        self.shuffle = shuffle
        self.encoder = encoder

    def __call__(self, lane: sp.Lane) -> custom.Stage:
        epochs = None if self.kind == "endless" else 1
        samples: Any = sp.TarShardReader(self.shards, lane, epochs=epochs, shuffle=self.shuffle)
        if self.shuffle:
            samples = sp.ShuffleBuffer(samples, size=5)
        encoder = self.encoder()
        encoder.one_to_one = self.kind == "counted"
        return sp.Batcher(sp.Encode(samples, encoder), size=ROWS)


def write_training_shards(folder: Path) -> None:
    write_numbered_shards(folder, [SAMPLES // 2, SAMPLES // 2])


class Notes:
    """A log with a line for each batch of a model: its hash and its loss.

    `kill_at` is the number of batches after which the process kills itself; `kill_evaluating`, of evaluation batches.
    """

    def __init__(self, log: Path, *, kill_at: int | None, kill_evaluating: int | None = None) -> None:
        self.log = log
        self.kill_at = kill_at
        self.kill_evaluating = kill_evaluating
        self.trained = self.evaluated = 0

    def before(self, training: bool) -> None:
        done, end = (self.trained, self.kill_at) if training else (self.evaluated, self.kill_evaluating)
        if done == end:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, batch: Any, loss: Tensor, training: bool) -> None:
        entry = {"batch": digest(batch), "loss": float(loss).hex(), "train": training}
        with self.log.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self.trained += training
        self.evaluated += not training


class Recorder(nn.Module):
    """A small model that logs its batches."""

    def __init__(self, log: Path, *, kill_at: int | None, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))
        self.notes = Notes(log, kill_at=kill_at)

    def forward(self, x: Tensor, label: Tensor, valid: Tensor | None = None) -> Tensor:
        self.notes.before(self.training)
        loss = nn.functional.cross_entropy(self.layers(x), label)
        self.notes.after({"x": x, "label": label}, loss, self.training)
        return loss


def read_log(log: Path, *, train: bool = True) -> list[tuple[str, str]]:
    """Return the hash and the loss of each batch of a process's training or evaluation."""
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [(entry["batch"], entry["loss"]) for entry in entries if entry["train"] == train]
