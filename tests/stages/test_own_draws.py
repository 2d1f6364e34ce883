"""Albumentations draws from generators of its own: an encoder that does not seed them is named in a warning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.stages.encode import _WARNED_CLASSES, KeyedEncoder


class Compose:
    """Stands for `albumentations.Compose`, whose generator is its own."""

    def __init__(self) -> None:
        self.set_random_seed(None)

    def set_random_seed(self, seed: int | None) -> None:
        self.draw = np.random.default_rng(seed)

    def __call__(self) -> float:
        return float(self.draw.random())


Compose.__module__ = "albumentations.core.composition"


class Unseeded(sp.TaskEncoder):
    def __init__(self) -> None:
        self.transform = Compose()

    def encode(self, sample: Any, rng: sp.Rng) -> float:
        return self.transform()


class Seeded(Unseeded):
    def encode(self, sample: Any, rng: sp.Rng) -> float:
        self.transform.set_random_seed(rng.integers(2**32))
        return self.transform()


class OfTheClass(sp.TaskEncoder):
    transform = Compose()


@pytest.mark.parametrize(("encoder", "warned"), [(Unseeded, 1), (OfTheClass, 1), (Seeded, 0), (sp.TaskEncoder, 0)])
def test_unseeded_albumentations_warns_once_with_the_encoder(
    encoder: type[sp.TaskEncoder], warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    _WARNED_CLASSES.clear()
    for _ in range(2):
        KeyedEncoder(encoder(), sp.Lane(), check=None)
    found = [message for message in caplog.messages if "Albumentations" in message]
    assert len(found) == warned and all(encoder.__name__ in message for message in found)


def test_a_seed_for_each_sample_makes_its_draws_repeat() -> None:
    assert Seeded().encode(None, sp.Rng(7)) == Seeded().encode(None, sp.Rng(7)) != Seeded().encode(None, sp.Rng(8))
    assert Unseeded().encode(None, sp.Rng(7)) != Unseeded().encode(None, sp.Rng(7))
