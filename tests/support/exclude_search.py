"""The search for a sample that moves: random pipelines leave out random samples from a random cut on.

The batches are compared with those of the run that goes on with all samples, by what is promised of `exclude=`: a skip
that is counted, after the order is dealt and, at the restore, out of buffers, open packs and held ones.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.stages.pipeline import upstream
from tests.conftest import write_numbered_shards
from tests.support.streams import through_a_file
from tests.support.toy_pipelines import numbers, toy_pipeline

exclusions = st.fixed_dictionaries({"cut": st.integers(0, 20), "share": st.sampled_from([0.03, 0.15, 0.4])})
"""After how many batches which share of the samples is excluded."""


def _draw_gone(folder: Path, samples: int, share: float, seed: int) -> tuple[frozenset[int], str]:
    """Numbers of samples, and the file that names them."""
    drawn = random.Random(seed)
    gone = frozenset(number for number in range(samples) if drawn.random() < share)
    file = folder / "gone"
    file.write_text("".join(f"s{number:06d}\n" for number in gone))
    return gone, str(file)


def _stays_in_order(chosen: dict[str, Any]) -> bool:
    """Whether each lane gives items in the order in which its samples were dealt."""
    regrouped = chosen["pack"] or chosen["hold"] or {"items", "batches"} & set(chosen["own"])
    return not regrouped and chosen["blend"] in (None, "readers")


def check_excluded_from_a_cut_on(
    sizes: list[int], chosen: dict[str, Any], seed: int, *, lanes: int, cut: int, share: float
) -> None:
    """An endless run whose file names samples since a cut gives none of them, resumes exactly, and counts by source."""
    sizes = [*sizes, 80 * lanes]
    with tempfile.TemporaryDirectory() as name:
        write_numbered_shards(Path(name) / "shards", sizes)
        gone, file = _draw_gone(Path(name), sum(sizes), share, seed)
        build = partial(toy_pipeline, str(Path(name) / "shards"), **chosen)
        loader = partial(sp.SavableLoader, seed=seed, lanes=lanes)
        plain = loader(build)
        for _ in range(cut):
            next(plain)
        state = through_a_file(plain.state_dict())
        own = loader(partial(build, exclude=file))
        own.load_state_dict(state, allow={"exclude"})
        half, batches = 10, []
        for step in range(2 * half):
            if step == half:
                state = through_a_file(own.state_dict())
            batches.append(next(own))
            named = [sample.ref.index for sample in own.trace().samples]
            assert not gone & {*numbers(batches[-1]), *named}
            assert {*numbers(batches[-1])} <= {*named}
        _check_counts(own.stats())
        if _stays_in_order(chosen):
            _check_order(batches, plain, gone, lanes, first=cut)
        again = loader(partial(build, exclude=file))
        again.load_state_dict(state)
        assert [numbers(next(again)) for _ in range(half)] == list(map(numbers, batches[half:]))


def _check_counts(stats: dict[str, Any]) -> None:
    by_source = [number for name, number in stats.items() if name.startswith("source/") and name.endswith("/skipped")]
    by_reason = [number for name, number in stats.items() if "/skipped/" in name and "source/" not in name]
    assert not any(name.startswith("source/") for name in stats) or sum(by_source) == sum(by_reason)


def _check_order(batches: list[Any], plain: sp.SavableLoader, gone: frozenset[int], lanes: int, *, first: int) -> None:
    """The lanes give what they would have given, in that order, without the excluded samples."""
    found: dict[int, list[int]] = {}
    expected: dict[int, list[int]] = {}
    for slot, batch in enumerate(batches, first):
        found.setdefault(slot % lanes, []).extend(numbers(batch))
    while any(len(expected.get(lane, [])) < len(ids) for lane, ids in found.items()):
        batch = next(plain)
        expected.setdefault(plain.trace().lane, []).extend(number for number in numbers(batch) if number not in gone)
    for lane, ids in found.items():
        assert ids == expected[lane][: len(ids)]


def check_excluded_in_an_epoch(
    size: int, chosen: dict[str, Any], seed: int, *, cut: int, share: float, lane: sp.Lane | None = None
) -> None:
    """A lane gives each other sample of its epoch as often as it would, and counts each one that it leaves out."""
    lane = lane or sp.Lane(1, 3, seed)
    chosen = {**chosen, "drop_last": False, "skip": 0, "own": ()}
    with tempfile.TemporaryDirectory() as name:
        write_numbered_shards(Path(name) / "shards", [size, 1, 30])
        gone, file = _draw_gone(Path(name), size + 31, share, seed)
        build = partial(toy_pipeline, str(Path(name) / "shards"), lane, epochs=1, **chosen)
        every = Counter(number for batch in build() for number in numbers(batch))
        stage = build()
        given = Counter(number for _, batch in zip(range(cut), stage, strict=False) for number in numbers(batch))
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state()))
        own: Any = build(exclude=file)
        own.restore_state(state)
        after = Counter(number for batch in own for number in numbers(batch))
        assert not gone & set(after)
        assert given + after == Counter({n: given[n] if n in gone else times for n, times in every.items()})
        if not chosen["fan_out"] and chosen["pack"] != "sequential" and chosen["too_long"] != "split":
            counted = sum(each.counts["skipped/excluded"] for each in upstream(own))
            assert counted == sum(every[number] - given[number] for number in gone)
