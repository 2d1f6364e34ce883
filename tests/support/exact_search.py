"""Search for a batch that differs after a resume: random data, pipelines, cuts, chains, workers and ranks.

A run that excludes samples from a cut on is compared with the run that continues with all of them. It must keep the
promises of `exclude=`: samples are skipped and counted after the order is dealt, and at the restore they are removed
from buffers and open packs.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.testing import assert_exact_resume
from tests.support.streams import through_a_file
from tests.support.toy_chains import toy
from tests.support.toy_pipelines import numbers, reads_of
from tests.support.toy_stores import KEYED, READERS, WRITERS, write_captions

compared: Counter[str] = Counter()
"""What was compared in this process: pipelines, resumes, batches, kills, batches made again."""

POLICIES = ("sequential", "first_fit", "best_fit", "first_fit_decreasing")
shard_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=6)
pipelines = st.fixed_dictionaries(
    {
        "store": st.sampled_from(list(READERS)),
        "shuffle": st.booleans(),
        "block_size": st.sampled_from([None, 1, 2, 3, 5, 9]),
        "window": st.sampled_from([None, 1, 2, 32]),
        "subset": st.sampled_from([None, None, 0.7]),
        "buffer": st.sampled_from([None, 1, 2, 7, 30, 200]),
        "join": st.sampled_from([None, None, "skip", "empty"]),
        "blend": st.sampled_from([None, None, "samples", "items", "nested", "ending"]),
        "weights": st.sampled_from(["fixed", "fixed", "none", "zero", "step", "linear"]),
        "by": st.sampled_from(["samples", "tokens"]),
        "stride": st.sampled_from([1, 3, 8]),
        "point": st.sampled_from([1, 40, 150, 600]),
        "pack": st.sampled_from([None, "buckets", "groups", "both", "function", "items", *POLICIES]),
        "max_length": st.integers(4, 40),
        "max_images": st.sampled_from([None, 2, 5]),
        "too_long": st.sampled_from(["truncate", "split"]),
        "max_buffer_bytes": st.sampled_from([0, 1500, 1 << 30]),
        "open_packs": st.integers(1, 4),
        "size": st.integers(1, 5),
        "skip": st.sampled_from([0, 5, 7]),
        "fan_out": st.sampled_from([0, 1, 5]),
        "drop_last": st.booleans(),
        "max_cost": st.sampled_from([None, None, 30, 300]),
        "candidates": st.sampled_from([None, None, 1, 3, 8, 20]),
        "tells": st.booleans(),
        "chain": st.booleans(),
        "filters": st.sampled_from([(), ("samples",), ("items",), ("samples", "items")]),
        "own": st.sampled_from([(), (), ("samples",), ("items",), ("batches",), ("samples", "items", "batches")]),
    }
).map(lambda chosen: make_compatible(chosen))


def make_compatible(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, changed so that they are valid together.

    Windows of tokens have no keys to join by, a packing function gets no long items, and only chains have filters.
    """
    if not chosen["chain"]:
        chosen = {**chosen, "filters": ()}
    if chosen["store"] not in KEYED:
        chosen = {**chosen, "join": None}
    return {**chosen, "max_length": max(9, chosen["max_length"])} if chosen["pack"] == "function" else chosen


def finite_settings(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the settings for a finite run that omits nothing. A schedule has no end."""
    weights = "fixed" if chosen["weights"] in ("step", "linear") else chosen["weights"]
    nothing: dict[str, Any] = {"drop_last": False, "skip": 0, "subset": None, "join": None, "filters": ()}
    return {**chosen, **nothing, "weights": weights}


def sufficient_sizes(sizes: list[int], chosen: dict[str, Any], lanes: int) -> list[int]:
    """Return sizes with which each lane gets samples that are not omitted, even in file order.

    In file order, all passes of a lane may be equal. So a lane has at least two blocks, which are not both skipped
    because no
    number of lanes is a multiple of 5 or 7. It has eight blocks, of 32 samples, if other settings omit samples too. Two
    mixtures read a source in file order.
    """
    others = chosen["subset"] or chosen["join"] or chosen["filters"] or chosen["weights"] != "fixed"
    in_file_order = not chosen["shuffle"] or chosen["blend"] in ("samples", "items")
    block = chosen["block_size"] or 8
    blocks = max(8, 32 // block) if others and in_file_order else 2
    return [*sizes, blocks * lanes * block + 5] if others or chosen["skip"] else sizes


@contextmanager
def written_pipeline(sizes: list[int], chosen: dict[str, Any], **settings: Any) -> Iterator[Any]:
    """Write shards, and yield a pipeline over them, a function or a chain. The folder is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        WRITERS[chosen["store"]](Path(folder, "data"), sizes)
        write_captions(Path(folder, "joined"), sum(sizes) + 60)
        yield toy(f"{folder}/data", joined=f"{folder}/joined", **chosen, **settings)


def check_endless(sizes: list[int], chosen: dict[str, Any], seed: int, lanes: int, **settings: Any) -> None:
    """Check every cut of 20 steps of an endless run, and a chain, in one process with all numbers of ranks."""
    worlds = [world for world in (1, 2, 3, 4) if lanes % world == 0]
    wide: dict[str, Any] = {"steps": 20, "world_sizes": worlds, "chains": 1, **settings}
    with written_pipeline(sufficient_sizes(sizes, chosen, lanes), chosen) as pipeline:
        _count_resumes(assert_exact_resume(pipeline, seed=seed, lanes=lanes, **wide))


def check_chains(sizes: list[int], chosen: dict[str, Any], seed: int, **settings: Any) -> None:
    """Check chains of resumes of an endless run in 0 to 3 workers."""
    wide: dict[str, Any] = {"workers": (0, 1, 2, 3), "world_sizes": (1, 2, 3, 4), **settings}
    with written_pipeline(sufficient_sizes(sizes, chosen, lanes=12), chosen) as pipeline:
        _count_resumes(assert_exact_resume(pipeline, seed=seed, steps=20, chains=1, after=1, **wide))


def check_finite(size: int, chosen: dict[str, Any], epochs: float, seed: int, tail: Any, **settings: Any) -> None:
    """Check every cut of a run of `epochs` epochs and of the epochs after them, with either tail, and chains."""
    chosen = finite_settings({**chosen, "block_size": min(chosen["block_size"] or 4, 4)})
    if tail == "pad":  # a user's own stage of batches does not pad the tail
        chosen["own"] = tuple(kind for kind in chosen["own"] if kind != "batches")
    wide: dict[str, Any] = {"workers": (0, 1, 2), "world_sizes": (1, 2, 3), "after": 2, "chains": 2, "steps": 40}
    with written_pipeline([size, 1, 3], chosen, epochs=epochs) as pipeline:
        _count_resumes(assert_exact_resume(pipeline, seed=seed, lanes=6, tail=tail, **{**wide, **settings}))


def _count_resumes(resumes: int) -> None:
    compared["resumes"] += resumes
    compared["pipelines"] += 1


def check_once(sizes: list[int], chosen: dict[str, Any], lanes: int, seed: int) -> None:
    """Check that an epoch gives each sample once over all lanes."""
    chosen = {**finite_settings(chosen), "fan_out": 0, "own": (), "weights": "fixed"}
    given = Counter[int]()
    with written_pipeline(sizes, chosen, epochs=1) as pipeline:
        for lane in range(lanes):
            for batch in pipeline(sp.Lane(lane, lanes, seed)):
                given.update(numbers(batch))
    assert given == Counter(dict.fromkeys(range(sum(sizes)), reads_of(chosen["blend"])))
    compared["pipelines"] += 1


# Samples that are excluded from a cut on.

exclusions = st.fixed_dictionaries({"cut": st.integers(0, 20), "share": st.sampled_from([0.03, 0.15, 0.4])})
"""After how many batches which share of the samples is excluded."""


@contextmanager
def _drawn_exclusions(samples: int, share: float, seed: int) -> Iterator[tuple[frozenset[int], str]]:
    """Draw numbers of samples, and write a file that names them."""
    drawn = random.Random(seed)
    gone = frozenset(number for number in range(samples) if drawn.random() < share)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("".join(f"s{number:06d}\n" for number in gone))
        file.flush()
        yield gone, file.name


def _with_keys(chosen: dict[str, Any]) -> dict[str, Any]:
    store = chosen["store"] if chosen["store"] in KEYED else "tar"
    return {**chosen, "store": store, "chain": False, "filters": ()}


def _stays_in_order(chosen: dict[str, Any]) -> bool:
    """Return whether each lane gives items in the order in which its samples were dealt."""
    regrouped = chosen["pack"] or chosen["candidates"] or {"items", "batches"} & set(chosen["own"])
    return not regrouped and chosen["blend"] in (None, "samples")


def check_excluded_from_a_cut_on(
    sizes: list[int], chosen: dict[str, Any], seed: int, *, lanes: int, cut: int, share: float
) -> None:
    """Check an endless run that excludes samples from a cut on: none of them comes, and it resumes exactly."""
    chosen = _with_keys(chosen)
    sizes = sufficient_sizes([*sizes, 80 * lanes], chosen, lanes)
    with written_pipeline(sizes, chosen) as build, _drawn_exclusions(sum(sizes), share, seed) as (gone, file):
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
    _count_resumes(2)


def _check_counts(stats: dict[str, Any]) -> None:
    by_source = [number for name, number in stats.items() if name.startswith("source/") and name.endswith("/skipped")]
    by_reason = [number for name, number in stats.items() if "/skipped/" in name and "source/" not in name]
    assert not any(name.startswith("source/") for name in stats) or sum(by_source) == sum(by_reason)


def _check_order(batches: list[Any], plain: sp.SavableLoader, gone: frozenset[int], lanes: int, *, first: int) -> None:
    """Check that the lanes give the same samples in the same order, without the excluded ones."""
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
    """Check that a lane gives each other sample of its epoch as often as before, and counts the excluded ones."""
    lane = lane or sp.Lane(1, 3, seed)
    chosen = {**finite_settings(_with_keys(chosen)), "own": ()}
    with (
        written_pipeline([size, 1, 30], chosen, epochs=1) as pipeline,
        _drawn_exclusions(size + 31, share, seed) as (gone, file),
    ):
        build = partial(pipeline, lane)
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
    _count_resumes(1)
