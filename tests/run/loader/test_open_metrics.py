"""`open_metrics`: text that a reader of the format takes, with every number in it."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from tests.run.loader.test_stats import blended
from tests.support.streams import take
from tests.support.toy_pipelines import toy_pipeline

_LINE = re.compile(r'([a-zA-Z_]\w*)\{((?:[a-z]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\} (-?[\d.e+-]+)$')
_LABEL = re.compile(r'([a-z]\w*)="((?:[^"\\\n]|\\["\\n])*)"')
_SUFFIXES = {"counter": "_total", "gauge": "", "summary": ""}

Point = tuple[str, tuple[tuple[str, str], ...]]


def parsed(text: str) -> dict[Point, float]:
    """The points of an OpenMetrics text; asserts what OpenMetrics 1.0 demands of the lines that we write."""
    *lines, end, rest = text.split("\n")
    assert (end, rest) == ("# EOF", "")
    found: dict[Point, float] = {}
    families: set[str] = set()
    family, kind = "", ""
    for line in lines:
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family not in families and not family.endswith("_total")  # a family stands together
            families.add(family)
        elif line.startswith("# HELP "):
            assert line.split(" ", 3)[2] == family
        else:
            match = _LINE.match(line)
            assert match is not None and match[1] == family + _SUFFIXES[kind], line
            labels = tuple((label[1], label[2]) for label in _LABEL.finditer(match[2]))
            assert len(dict(labels)) == len(labels) and (match[1], labels) not in found
            assert kind != "summary" or "quantile" in dict(labels)
            found[match[1], labels] = float(match[3])
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_holds_every_number_that_is_no_rate_once(make_shards: Any, num_workers: int) -> None:
    own = sp.SavableLoader(partial(toy_pipeline, str(make_shards([60]))), seed=3, lanes=4, num_workers=num_workers)
    with own:
        take(own, 20)
        found, numbers = parsed(sp.open_metrics(own)), own.stats()
    assert len(found) == len([name for name in numbers if not name.endswith("_per_s")])
    rank = ("rank", "0")
    assert found["savable_batches_total", (rank,)] == 20
    assert found["savable_samples_total", (rank,)] == numbers["samples"]
    labels = (rank, ("stage", "Encode"), ("reason", "every 7th"))
    assert found["savable_skipped_total", labels] == numbers["Encode/skipped/every 7th"]
    assert found["savable_wait_seconds_recent", (rank, ("quantile", "0.5"))] > 0


def test_sources_and_strange_texts_are_labels(make_shards: Any) -> None:
    own = sp.SavableLoader(partial(blended, str(make_shards([40])), first=True), seed=3, lanes=4)
    take_plain(own, 8)
    own._run.stats.count({'Encode/skipped/a "b"\\\n': 2})
    found = parsed(sp.open_metrics(own))
    assert found["savable_source_samples_total", (("rank", "0"), ("source", "a"))] == 24
    labels = (("rank", "0"), ("stage", "Encode"), ("reason", 'a \\"b\\"\\\\\\n'))
    assert found["savable_skipped_total", labels] == 2


def test_it_leaves_the_rates_of_stats_alone(make_shards: Any) -> None:
    own = sp.SavableLoader(partial(toy_pipeline, str(make_shards([40]))), seed=3, lanes=4)
    take(own, 5)
    sp.open_metrics(own)
    assert own.stats()["batches_per_s"] > 0


def take_plain(own: sp.SavableLoader, n: int) -> None:
    for _ in range(n):
        next(own)
