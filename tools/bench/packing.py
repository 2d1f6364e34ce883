"""Packs, batches by length and balance, by the stages themselves on documents of known sizes; and in real runs.

    python tools/bench/packing.py fill       how full packs are and how fast items find their place, for each policy
    python tools/bench/packing.py buckets    what batches by length cost, with and without `same_bucket`, beside packs
    python tools/bench/packing.py balance    how long ranks wait for the slowest, with `Balance` and `max_cost`
    python tools/bench/packing.py ranks      two processes that train for as long as a pack costs, against `balance`
    python tools/bench/packing.py loading    processor time of a pipeline with and without `Balance`

A step takes W consecutive slots of 96 lanes, and lasts as long as its dearest batch: shown is the share of all ranks'
time spent waiting at 8, 32 and 96 ranks. `balance` looks at packs 1,000 to 2,000 of each lane (`--last 2000`),
`buckets` at batches 500 to 1,000, padded to the bound of their bucket, if a batch costs its padded tokens, and if it
costs attention, too. "held" is the longest, and the 99th percentile, of the time that a pack or an item is held, in
units of `candidates` slots, or in batches of the lane. Without a word, all is measured.
"""

from __future__ import annotations

import json
import os
import socket
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
from data import write_tar
from numpy.typing import NDArray
from rounds import Bench, called, console, main

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.cost import Cost, Size, waiting_share
from savable_pipeline.stages.item_ref import Element, ItemRef
from savable_pipeline.stages.packing.packing_policies import Policy
from savable_pipeline.stages.stage import State
from savable_pipeline.stages.stage_info import StageInfo
from task_encoders import LanguageModelingEncoder

LANES, RANKS, CANDIDATES, SEED = 96, (8, 32, 96), 32, 1
HIDDEN = 2048
Ints: TypeAlias = NDArray[np.int64]


# The documents.


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind: (length, images) of as many as asked for, and what one costs."""

    name: str
    draw: Callable[[np.random.Generator, int], tuple[Ints, Ints]]
    longest: int  # tokens; a longer document is left out
    cost: Cost = sp.attention_cost(hidden=HIDDEN)  # noqa: RUF009

    def documents(self, seed: int) -> Iterator[Size]:
        """Endless (length, images)."""
        rng = np.random.default_rng(seed)
        while True:
            lengths, images = self.draw(rng, 4096)
            fits = (lengths > 0) & (lengths <= self.longest)
            yield from zip(lengths[fits].tolist(), images[fits].tolist(), strict=True)


def lognormal(median: float, sigma: float, longest: int) -> Corpus:
    """Lengths of many a web corpus."""

    def draw(rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
        return rng.lognormal(np.log(median), sigma, n).astype(np.int64), np.zeros(n, np.int64)

    return Corpus(f"lognormal, median {median:,.0f}, sigma {sigma}, {longest // 1024} k", draw, longest)


def python_texts(longest: int) -> Corpus:
    """The lengths of Python's library sources, four bytes a token, drawn again and again."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    known = np.array([path.stat().st_size for path in paths], np.int64) // 4
    name = f"Python's library, {len(known):,} texts, {longest // 1024} k"
    return Corpus(name, lambda rng, n: (rng.choice(known, n), np.zeros(n, np.int64)), longest)


def pictures(longest: int) -> Corpus:
    """A caption of lognormal length and 0 to 4 pictures.

    A picture has 64 to 1,280 tokens, and a token covers four patches.
    The cost knows the number of pictures, not their sizes: each counts as one of the mean size.
    """

    def draw(rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
        images = rng.integers(0, 5, n)
        tokens = rng.integers(64, 1281, (n, 4)) * (np.arange(4) < images[:, None])
        return rng.lognormal(np.log(200), 1.0, n).astype(np.int64) + tokens.sum(axis=1), images

    cost = sp.attention_cost(hidden=HIDDEN, per_image=6 * 1024 * 4 * 672)
    return Corpus(f"captions with 0 to 4 pictures, {longest // 1024} k", draw, longest, cost)


SHORT, LONG = lognormal(400, 1.0, 4 << 10), lognormal(1500, 1.4, 32 << 10)


# The stages.


class Lengths(sp.TaskEncoder):
    """An item is its length; a pack is what its items add up to, a batch the list of them."""

    global_rng = False

    def length(self, item: int) -> int:
        """Itself."""
        return item

    def cut(self, item: int, start: int, stop: int) -> int:
        """The length of the part."""
        return stop - start

    def images(self, item: int) -> int:
        """One in ten items has one."""
        return item % 10 == 0

    def pack(self, items: list[int], rng: sp.Rng) -> int:
        """What they add up to."""
        return sum(items)

    def batch(self, items: list[int], rng: sp.Rng) -> list[int]:
        """The items."""
        return items


class Known(custom.ItemStage):
    """Gives documents of known sizes: nothing is made of them, or, if `encoded`, their lengths. `taken` counts them."""

    ref: ItemRef = ()

    def __init__(self, sizes: Iterator[Size], lane: sp.Lane, *, encoded: bool = False) -> None:
        self._sizes = sizes
        self._lane = lane
        self._encoded = encoded
        self.taken = 0

    def take(self, n: int) -> list[Element]:
        """The next one."""
        size = next(self._sizes, None)
        if size is None:
            return []
        self.taken += 1
        ref = (self.taken - 1, 0, 0)
        return [Element(ref, size[0]) if self._encoded else Element(ref, sizes=(size,))]

    def fetch(self, ref: Any) -> Any:
        """The number of the document."""
        return ref[0]

    def save_state(self) -> State:
        """Where it stands."""
        return {"taken": self.taken}

    def describe(self) -> StageInfo:
        """A source of nothing else."""
        none = frozenset([0])
        alone = StageInfo(self._lane, 0, population=1, endless=False, tags=none, origins=none, encoder=Lengths())
        return replace(alone, declared=not self._encoded)


def packed(corpus: Corpus, measured: Cost, packs: int, **settings: Any) -> tuple[Ints, float]:
    """The costs of the packs of all lanes, (lanes, packs), and the mean share of `max_length` that they fill."""
    costs, tokens = np.empty((LANES, packs), np.int64), 0
    for index in range(LANES):
        packer = sp.OnlinePacker(Known(corpus.documents(SEED * 1000 + index), sp.Lane(index, LANES, SEED)), **settings)
        for n in range(packs):
            sizes = packer.take(1)[0].sizes or ()
            costs[index, n] = sum(measured(length, images) for length, images in sizes)
            tokens += sum(length for length, _ in sizes)
    return costs, tokens / costs.size / settings["max_length"]


def balanced(costs: Ints, *, candidates: int, slots: int) -> tuple[Ints, Ints, float]:
    """Such costs as `Balance` of every lane gives them, the slots for which each was held, and µs a pack."""
    costs_yielded = np.empty((len(costs), slots), np.int64)
    waits = np.empty_like(costs_yielded)
    start = time.process_time()
    for index, own in enumerate(costs.tolist()):
        known = Known(((cost, 0) for cost in own), sp.Lane(index, len(costs), SEED))
        stage = sp.Balance(known, candidates=candidates, cost=first_of)
        arrived: list[int] = []
        for slot in range(slots):
            number = stage.take(1)[0].value
            arrived += [slot] * (known.taken - len(arrived))
            costs_yielded[index, slot], waits[index, slot] = own[number], slot - arrived[number]
    return costs_yielded, waits, 1e6 * (time.process_time() - start) / costs_yielded.size


def first_of(length: int, images: int) -> int:
    """A cost that is the length."""
    return length


def waiting(costs: Ints) -> str:
    """The share of the ranks' time spent waiting, when a step is so many consecutive slots of (lanes, slots)."""
    return "/".join(f"{100 * waiting_share(costs.T.reshape(-1, ranks).tolist()):.1f}" for ranks in RANKS)


# What is shown.


def fill(bench: Bench) -> None:
    """Lognormal lengths up to the limit, placing alone."""
    drawn = np.random.default_rng(0).lognormal(np.log(400), 1.0, bench.options.items)
    lengths = np.maximum(1, drawn.astype(int)).tolist()
    fills: dict[str, float] = {}
    ways = {policy: called(partial(pack_all, lengths, policy, fills), len(lengths)) for policy in get_args(Policy)}
    bench.compare("median 400, limit 4096, 16 open packs", "item", ways)
    console.print("filled:", ", ".join(f"{policy} {share:.2%}" for policy, share in fills.items()))


def pack_all(lengths: list[int], policy: Policy, fills: dict[str, float]) -> None:
    """Pack all of them."""
    known = Known(((length, 0) for length in lengths), sp.Lane(), encoded=True)
    packer = sp.OnlinePacker(known, max_length=4096, policy=policy, open_packs=16)
    packs, counts = sum(1 for _ in packer), packer.counts
    assert packs == counts["packs"]
    assert sum(lengths) == counts["tokens"] + counts["skipped_tokens"] + counts["truncated_tokens"]
    fills[policy] = counts["tokens"] / (counts["tokens"] + counts["room"])


def balance(bench: Bench) -> None:
    """Print a table for each kind of documents."""
    last = bench.options.last
    for corpus in (LONG, SHORT, python_texts(16 << 10), pictures(8 << 10)):
        if bench.only not in corpus.name:
            continue
        console.print(f"\n{corpus.name}: waiting at 8/32/96 ranks")
        limit, ample = corpus.longest, 2 * corpus.longest
        capped = {"max_length": ample, "max_cost": corpus.cost(limit, 0), "cost": corpus.cost}
        for settings in ({"max_length": limit}, {"max_length": ample}, capped):
            costs, full = packed(corpus, corpus.cost, last + 64, **settings)
            name = f"{settings['max_length']:,} tokens{', cost of ' + f'{limit:,}' if 'cost' in settings else ''}"
            console.print(f"{name:34}{waiting(costs[:, last // 2 : last]):>20}  fill {full:.1%}")
            for candidates in (16, 32, 64):
                yielded, waits, us = balanced(costs, candidates=candidates, slots=last)
                longest, p99 = waits.max() / candidates, np.percentile(waits, 99) / candidates
                waited = f"held {longest:.1f}, {p99:.1f}, {us:.0f} µs a pack"
                console.print(
                    f"  Balance(candidates={candidates:2}){'':15}{waiting(yielded[:, last // 2 :]):>20}  {waited}"
                )


def buckets(bench: Bench) -> None:
    """Print a table for short and for long documents."""
    last = bench.options.last // 2
    for corpus in (SHORT, LONG):
        if bench.only not in corpus.name:
            continue
        console.print(f"\n{corpus.name}: padding, ranks of 8 alike, waiting by tokens, by attention, 99 % held")
        bounds = [corpus.longest >> n for n in reversed(range(6))]
        for sized in ({"size": 8}, {"max_tokens": 2 * corpus.longest}):
            for candidates in (0, 16, 32, 64):
                same: dict[str, Any] = {"same_bucket": True, "candidates": candidates} if candidates else {}
                show_batches(corpus, last, bounds=bounds, **sized, **same)
        shares = []
        for cost in (first_of, corpus.cost):
            costs, full = packed(corpus, cost, last + CANDIDATES, max_length=corpus.longest)
            shares.append(waiting(balanced(costs, candidates=CANDIDATES, slots=last)[0][:, last // 2 :]))
        console.print(f"OnlinePacker, Balance(candidates={CANDIDATES}): {1 - full:.1%}, {', '.join(shares)}")


def show_batches(corpus: Corpus, last: int, **settings: Any) -> None:
    """Print the line of the second half of the batches of each lane that `BucketBatcher(**settings)` makes."""
    found = np.zeros((3, LANES, last), np.int64)
    waits: list[Ints] = []
    for index in range(LANES):
        known = Known(corpus.documents(SEED * 1000 + index), sp.Lane(index, LANES, SEED), encoded=True)
        stage, taken = custom.BucketBatcher(known, **settings), []
        for n, lengths in enumerate(islice(stage, last)):
            taken.append(known.taken)
            found[:, index, n] = max(lengths), len(lengths), sum(lengths)
            if n >= last // 2:
                waits.append(n - np.searchsorted(taken, [ref[0] for ref in stage.ref[1:]], side="right"))
    longest, rows, tokens = found[:, :, last // 2 :]
    bounds = np.array(settings.pop("bounds"))
    padded = bounds[np.searchsorted(bounds, longest)]
    steps = padded.T.reshape(-1, RANKS[0])
    alike = np.mean([np.unique(step, return_counts=True)[1].max() / RANKS[0] for step in steps])
    attention = rows * np.vectorize(lambda bound: corpus.cost(bound, 0))(padded)
    name = ", ".join(f"{name}={value:,}" for name, value in settings.items())
    shares = f"{1 - tokens.sum() / (padded * rows).sum():.1%}, {alike:.0%}, {waiting(padded * rows)}"
    console.print(f"{name}: {shares}, {waiting(attention)}, {np.percentile(np.concatenate(waits), 99):.0f}")


# Real runs.


class Costs(Lengths):
    """An item is its length, a pack what it costs."""

    cost = staticmethod(sp.attention_cost(hidden=HIDDEN))

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        """The length."""
        return int(sample.json()["length"])

    def pack(self, items: list[int], rng: sp.Rng) -> Any:
        """The sum of their costs."""
        return {"cost": sum(self.cost(length, 0) for length in items)}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        """Of one pack."""
        return items[0]


def packs_of(folder: str, encoder: sp.TaskEncoder, max_length: int, candidates: int, lane: sp.Lane) -> custom.Stage:
    """Batches of one pack each, balanced over `candidates` packs (0: not balanced)."""
    packs: custom.ItemStage = sp.OnlinePacker(
        sp.Encode(sp.TarShardReader(folder, lane), encoder), max_length=max_length
    )
    return sp.Batcher(sp.Balance(packs, candidates=candidates, cost=Costs.cost) if candidates else packs, size=1)


def write(folder: str, corpus: Corpus, samples: int, part: str, content: Callable[[int], bytes]) -> None:
    """Shards of 1,000 samples with documents of these lengths."""
    lengths = [length for length, _ in islice(corpus.documents(SEED), samples)]
    for first in range(0, samples, 1000):
        chunk = ({part: content(length)} for length in lengths[first : first + 1000])
        write_tar(Path(folder) / f"{first // 1000:04d}.tar", chunk)


def ranks(bench: Bench) -> None:
    """What `Balance` saves two ranks, and what the simulation says."""
    costs, _ = packed(LONG, LONG.cost, 600, max_length=LONG.longest)
    unit = 0.2 / float(costs.mean())  # the mean time of a pack
    shares = [
        waiting_share(each[:, 100:500].T.reshape(-1, 2).tolist())
        for each in (costs, balanced(costs, candidates=CANDIDATES, slots=500)[0])
    ]
    with tempfile.TemporaryDirectory(dir=bench.data) as folder:
        write(folder, LONG, 24_000, "json", lambda length: json.dumps({"length": length}).encode())
        runs = [two_ranks(folder, candidates, unit, bench.options.steps) for candidates in (0, CANDIDATES)]
    for name, (before, after) in ("simulated", shares), ("measured", runs):
        saved = 1 - (1 - before) / (1 - after)
        console.print(f"two ranks, waiting, {name}: {before:.1%}, with Balance {after:.1%}, which saves {saved:.1%}")


def two_ranks(folder: str, candidates: int, unit: float, steps: int) -> float:
    """The share of the time of two processes that is not training."""
    from torch.multiprocessing import get_context
    from torch.multiprocessing.spawn import spawn

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    results = get_context("spawn").SimpleQueue()
    spawn(one_rank, args=(folder, candidates, unit, steps, port, results), nprocs=2)  # type: ignore[no-untyped-call]
    trained, took = zip(*[results.get() for _ in range(2)], strict=True)
    return 1 - float(sum(trained) / sum(took))


def one_rank(rank: int, folder: str, candidates: int, unit: float, steps: int, port: int, results: Any) -> None:
    """One rank: sleeps for as long as its pack costs, and waits for the other."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    trained = 0.0
    with sp.SavableLoader(partial(packs_of, folder, Costs(), 32 << 10, candidates), seed=SEED, lanes=8) as loader:
        batches = iter(loader)
        for _ in islice(batches, 2 * steps):  # until all lanes candidates what they will
            pass
        dist.barrier()
        start = time.perf_counter()
        batch = next(batches)
        for _ in range(steps):
            train_s = int(batch["cost"]) * unit
            ends = time.perf_counter() + train_s
            batch = next(batches)  # while the step is computed
            time.sleep(max(0.0, ends - time.perf_counter()))
            trained += train_s
            dist.all_reduce(torch.ones(1))
        results.put((trained, time.perf_counter() - start))
    dist.destroy_process_group()


def loading(bench: Bench) -> None:
    """The processor time of a batch with and without `Balance`, bytes as tokens, and a lane's state."""
    for corpus in (SHORT, LONG):
        letters = np.random.default_rng(SEED).integers(97, 123, corpus.longest, dtype=np.uint8).tobytes()
        with tempfile.TemporaryDirectory(dir=bench.data) as folder:
            write(folder, corpus, 20_000, "txt", lambda length, text=letters: text[: max(1, length - 2)])  # type: ignore[misc]
            encoder = LanguageModelingEncoder(max_length=corpus.longest)
            loaders = {
                candidates: sp.SavableLoader(
                    partial(packs_of, folder, encoder, corpus.longest, candidates), seed=SEED, lanes=16
                )
                for candidates in (CANDIDATES, 0)
            }
            running = {candidates: iter(loader) for candidates, loader in loaders.items()}
            for batches in running.values():
                take(batches, 16 * 2 * CANDIDATES)
            ways = {
                f"candidates={candidates}": called(partial(take, batches, 300), 300)
                for candidates, batches in running.items()
            }
            bench.compare(f"packs of {corpus.longest:,}", "pack", ways)
            state = loaders[CANDIDATES].state_dict().values()
            console.print(
                f"a lane's state: {sum(len(each) for each in state if isinstance(each, bytes)) // 16:,} bytes"
            )
            for loader in loaders.values():
                loader.close()


def take(batches: Iterator[Any], count: int) -> None:
    """Take so many."""
    for _ in islice(batches, count):
        pass


if __name__ == "__main__":
    measures = {"fill": fill, "buckets": buckets, "balance": balance, "ranks": ranks, "loading": loading}
    main(__doc__, measures, items=200_000, last=2_000, steps=160)
