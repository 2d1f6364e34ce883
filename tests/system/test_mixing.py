"""How well a batch is mixed when the data are not: classes in file order, batches of one lane."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.core.keyed_random import below, words
from tests.support.toy_dataset import readers, take_refs

CLASSES, BATCH = 100, 256


def entropy(classes: np.ndarray) -> float:
    """Of the classes in a batch, in nats."""
    shares = np.bincount(classes) / len(classes)
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


def random_entropy() -> float:
    """Of batches drawn at random."""
    drawn = below(words(1, 0, 1000 * BATCH), CLASSES).reshape(1000, BATCH)
    return median(entropy(batch) for batch in drawn)


@pytest.mark.parametrize(("shards", "share"), [(50, 0.95), (500, 0.89)])  # the latter in several windows
def test_batches_of_sorted_classes_have_nearly_the_entropy_of_random_ones(shards: int, share: float) -> None:
    count = 100_000
    make = readers([count // shards] * shards, lanes=96)  # all settings as they are by default
    begin, later = list[float](), list[float]()
    for lane in range(0, 96, 24):
        refs = take_refs(sp.ShuffleBuffer(make(lane), size=2000), 24 * BATCH)
        classes = np.array([index * CLASSES // count for index, _ in refs]).reshape(-1, BATCH)
        begin += map(entropy, classes[:2])
        later += map(entropy, classes[2:])
    assert median(later) > share * random_entropy()
    # The buffer has no more than the lane's 1,041 samples of an epoch, so the first batches are mixed a little less.
    assert shards > 50 or median(begin) > 0.93 * random_entropy()
