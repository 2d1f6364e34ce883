"""Measure packing, batches by length and balancing, on documents of known sizes and in real runs.

    python tools/bench/packing.py fill       packing efficiency and speed of each policy
    python tools/bench/packing.py buckets    padding and waiting of batches by length, with and without `same_bucket`
    python tools/bench/packing.py balance    how long ranks wait for the slowest, with `Balance` and `max_cost`
    python tools/bench/packing.py ranks      two processes that sleep for the cost of each pack, and their simulation
    python tools/bench/packing.py loading    CPU time of a pipeline with and without `Balance`
    python tools/bench/packing.py items      packs of about 64 short items, against batches of 64

There are 96 lanes. A step of W ranks is W consecutive slots, and takes as long as its most expensive batch. Tables show
the fraction of all ranks' time spent waiting, at 8, 32 and 96 ranks.

- `balance` measures packs 1,000 to 2,000 of each lane (`--last 2000`).
- `buckets` measures batches 500 to 1,000, padded to the bound of their bucket. It computes the cost of a batch once as
  its padded tokens, and once with attention.
- "delayed" is how long a pack waits in `Balance` (maximum and 99th percentile, in units of `candidates` slots), or an
  item in a bucket (99th percentile, in batches of the lane).

Without arguments it runs all of them.
"""

from __future__ import annotations

import json
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
from data import prepare, write_tar
from numpy.typing import NDArray
from ours import FunctionEncoder
from peers import decode_json
from rounds import Bench, Loader, called, console, main, run_ranks

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.chunked_stage import ChunkedStage
from savable_pipeline.stages.cost import Cost, Size, waiting_share
from savable_pipeline.stages.item_ref import Element, ItemRef
from savable_pipeline.stages.packing.packing_policies import Policy
from savable_pipeline.stages.stage import State
from savable_pipeline.stages.stage_info import StageInfo
from task_encoders import LanguageModelingEncoder

LANES, RANKS, CANDIDATES, SEED = 96, (8, 32, 96), 32, 1
HIDDEN = 2048
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Random documents of one kind.

    Args:
        name: The name in tables.
        draw: Draws the lengths and numbers of images of n documents.
        longest: The limit in tokens. Longer documents are skipped.
        cost: The cost of a document.
    """

    name: str
    draw: Callable[[np.random.Generator, int], tuple[Ints, Ints]]
    longest: int
    cost: Cost = sp.attention_cost(hidden=HIDDEN)  # noqa: RUF009

    def documents(self, seed: int) -> Iterator[Size]:
        """Yield lengths and numbers of images, endlessly."""
        rng = np.random.default_rng(seed)
        while True:
            lengths, images = self.draw(rng, 4096)
            fits = (lengths > 0) & (lengths <= self.longest)
            yield from zip(lengths[fits].tolist(), images[fits].tolist(), strict=True)


def lognormal(median: float, sigma: float, longest: int) -> Corpus:
    """Return a corpus of lognormal lengths, as in web text."""

    def draw(rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
        return rng.lognormal(np.log(median), sigma, n).astype(np.int64), np.zeros(n, np.int64)

    return Corpus(f"lognormal, median {median:,.0f}, sigma {sigma}, {longest // 1024} k", draw, longest)


def python_texts(longest: int) -> Corpus:
    """Return a corpus with the lengths of the sources of Python's library, at four bytes per token."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    known = np.array([path.stat().st_size for path in paths], np.int64) // 4
    name = f"Python's library, {len(known):,} texts, {longest // 1024} k"
    return Corpus(name, lambda rng, n: (rng.choice(known, n), np.zeros(n, np.int64)), longest)


def captions_with_images(longest: int) -> Corpus:
    """Return a corpus of captions of lognormal length with 0 to 4 images.

    An image has 64 to 1,280 tokens of four patches each. The cost depends on the number of images, not on their sizes,
    so each counts as an image of the mean size.
    """

    def draw(rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
        images = rng.integers(0, 5, n)
        tokens = rng.integers(64, 1281, (n, 4)) * (np.arange(4) < images[:, None])
        return rng.lognormal(np.log(200), 1.0, n).astype(np.int64) + tokens.sum(axis=1), images

    cost = sp.attention_cost(hidden=HIDDEN, per_image=6 * 1024 * 4 * 672)  # 672 tokens on average
    return Corpus(f"captions with 0 to 4 images, {longest // 1024} k", draw, longest, cost)


SHORT, LONG = lognormal(400, 1.0, 4 << 10), lognormal(1500, 1.4, 32 << 10)


class Lengths(sp.TaskEncoder):
    """Encoder whose items and packs are just their lengths in tokens."""

    global_rng = False

    def length(self, item: int) -> int:
        """Return the item, which is its length."""
        return item

    def cut(self, item: int, start: int, stop: int) -> int:
        """Return the length of the tokens `start` to `stop - 1`."""
        return stop - start

    def images(self, item: int) -> int:
        """Return 1 for every tenth length, else 0."""
        return item % 10 == 0

    def pack(self, items: list[int], rng: sp.Rng) -> int:
        """Return the sum of the lengths."""
        return sum(items)

    def batch(self, items: list[int], rng: sp.Rng) -> list[int]:
        """Return the items."""
        return items


class KnownSizes(ChunkedStage, custom.ItemStage):
    """Source of documents of known sizes.

    Without `encoded` its elements have sizes but no values, otherwise the values are the lengths. `taken` is the number
    of documents yielded.
    """

    ref: ItemRef = ()

    def __init__(self, sizes: Iterator[Size], lane: sp.Lane, *, encoded: bool = False) -> None:
        self._sizes = sizes
        self._lane = lane
        self._encoded = encoded
        self.taken = 0

    def take(self, n: int) -> list[Element]:
        """Return the next document, whatever `n` is."""
        size = next(self._sizes, None)
        if size is None:
            return []
        self.taken += 1
        ref = (self.taken - 1, 0, 0)  # index of the document, epoch, part
        length, _ = size
        return [Element(ref, length) if self._encoded else Element(ref, sizes=(size,))]

    def fetch(self, ref: Any) -> Any:
        """Return the index of the document, the first number of its ref."""
        return ref[0]

    def save_state(self) -> State:
        """Return the number of documents yielded."""
        return {"taken": self.taken}

    def describe(self) -> StageInfo:
        """Describe a source without settings."""
        only_source = frozenset([0])  # its tag and its origin are 0, as without a `Blend`
        info = StageInfo(self._lane, depth=0, population=1, endless=False, tags=only_source, origins=only_source)
        return replace(info, encoder=Lengths(), declared=not self._encoded)  # declared: unbuilt elements with sizes


def pack_costs(corpus: Corpus, cost: Cost, packs: int, /, **settings: Any) -> tuple[Ints, float]:
    """Return the costs of the packs of all lanes, (lanes, packs), and the packing efficiency."""
    costs, tokens = np.empty((LANES, packs), np.int64), 0
    for index in range(LANES):
        packer = sp.OnlinePacker(
            KnownSizes(corpus.documents(SEED * 1000 + index), sp.Lane(index, LANES, SEED)), **settings
        )
        for n in range(packs):
            sizes = packer.take(1)[0].sizes or ()
            costs[index, n] = sum(cost(length, images) for length, images in sizes)
            tokens += sum(length for length, _ in sizes)
    return costs, tokens / costs.size / settings["max_length"]


def balance_costs(costs: Ints, *, candidates: int, slots: int) -> tuple[Ints, Ints, float]:
    """Reorder the packs of all lanes by `Balance`.

    Args:
        costs: The costs of the packs, (lanes, packs).
        candidates: That of `Balance`.
        slots: The number of packs to yield of each lane.

    Returns:
        The costs in the order yielded, the slots for which each pack was delayed, and the CPU microseconds per pack.
    """
    costs_yielded = np.empty((len(costs), slots), np.int64)
    waits = np.empty_like(costs_yielded)
    start = time.process_time()
    for index, lane_costs in enumerate(costs.tolist()):
        source = KnownSizes(((cost, 0) for cost in lane_costs), sp.Lane(index, len(costs), SEED))
        stage = sp.Balance(source, candidates=candidates, cost=length_as_cost)
        arrival_slots: list[int] = []  # arrival slots of the packs that `stage` has read
        for slot in range(slots):
            number = stage.take(1)[0].value
            arrival_slots += [slot] * (source.taken - len(arrival_slots))
            costs_yielded[index, slot], waits[index, slot] = lane_costs[number], slot - arrival_slots[number]
    return costs_yielded, waits, 1e6 * (time.process_time() - start) / costs_yielded.size


def length_as_cost(length: int, images: int) -> int:
    """Return the length, as a cost."""
    return length


def format_waiting(costs: Ints) -> str:
    """Format the percentage of time spent waiting at each number of ranks. `costs` is (lanes, slots)."""
    return "/".join(f"{100 * waiting_share(costs.T.reshape(-1, ranks).tolist()):.1f}" for ranks in RANKS)


def compare_policies(bench: Bench) -> None:
    """Compare the packing policies on lognormal lengths."""
    drawn = np.random.default_rng(0).lognormal(np.log(400), 1.0, bench.options.items)
    lengths = np.maximum(1, drawn.astype(int)).tolist()
    efficiencies: dict[str, float] = {}
    ways = {
        policy: called(partial(pack_by, lengths, policy, efficiencies), len(lengths)) for policy in get_args(Policy)
    }
    bench.compare("median 400, limit 4096, 16 open packs", "item", ways)
    console.print("efficiency:", ", ".join(f"{policy} {share:.2%}" for policy, share in efficiencies.items()))


def pack_by(lengths: list[int], policy: Policy, efficiencies: dict[str, float]) -> None:
    """Pack documents of these lengths, and add the packing efficiency to `efficiencies`."""
    source = KnownSizes(((length, 0) for length in lengths), sp.Lane(), encoded=True)
    packer = sp.OnlinePacker(source, max_length=4096, policy=policy, open_packs=16)
    packs, counts = sum(1 for _ in packer), packer.counts
    assert packs == counts["packs"]
    assert sum(lengths) == counts["tokens"] + counts["skipped_tokens"] + counts["truncated_tokens"]
    efficiencies[policy] = counts["tokens"] / (counts["tokens"] + counts["room"])


def balance(bench: Bench) -> None:
    """Print the waiting time with and without `Balance`, for each corpus."""
    last = bench.options.last
    for corpus in (LONG, SHORT, python_texts(16 << 10), captions_with_images(8 << 10)):
        if bench.only not in corpus.name:
            continue
        console.print(f"\n{corpus.name}: waiting at 8/32/96 ranks")
        limit, double = corpus.longest, 2 * corpus.longest
        by_cost = {"max_length": double, "max_cost": corpus.cost(limit, 0), "cost": corpus.cost}
        for settings in ({"max_length": limit}, {"max_length": double}, by_cost):
            costs, efficiency = pack_costs(corpus, corpus.cost, last + 64, **settings)
            name = f"{settings['max_length']:,} tokens{', cost of ' + f'{limit:,}' if 'cost' in settings else ''}"
            console.print(f"{name:34}{format_waiting(costs[:, last // 2 : last]):>20}  efficiency {efficiency:.1%}")
            for candidates in (16, 32, 64):
                yielded, waits, pack_us = balance_costs(costs, candidates=candidates, slots=last)
                longest, p99 = waits.max() / candidates, np.percentile(waits, 99) / candidates
                name = f"  Balance(candidates={candidates:2})"
                delays = f"delayed {longest:.1f}, {p99:.1f}, {pack_us:.0f} µs a pack"
                console.print(f"{name:39}{format_waiting(yielded[:, last // 2 :]):>15}  {delays}")


def buckets(bench: Bench) -> None:
    """Print padding and waiting of `BucketBatcher`, for short and long documents, and of packs."""
    last = bench.options.last // 2
    for corpus in (SHORT, LONG):
        if bench.only not in corpus.name:
            continue
        console.print(
            f"\n{corpus.name}: padding, of 8 ranks with one bucket, waiting by tokens, by attention, 99 % delayed"
        )
        bounds = [corpus.longest >> n for n in reversed(range(6))]
        for size in ({"size": 8}, {"max_tokens": 2 * corpus.longest}):
            for candidates in (0, 16, 32, 64):
                same: dict[str, Any] = {"same_bucket": True, "candidates": candidates} if candidates else {}
                print_batches(corpus, last, bounds=bounds, **size, **same)
        waits = []
        for cost in (length_as_cost, corpus.cost):
            costs, efficiency = pack_costs(corpus, cost, last + CANDIDATES, max_length=corpus.longest)
            yielded, *_ = balance_costs(costs, candidates=CANDIDATES, slots=last)
            waits.append(format_waiting(yielded[:, last // 2 :]))
        console.print(f"OnlinePacker, Balance(candidates={CANDIDATES}): {1 - efficiency:.1%}, {', '.join(waits)}")


def print_batches(corpus: Corpus, last: int, **settings: Any) -> None:
    """Print padding and waiting of `BucketBatcher(**settings)`, for the second half of `last` batches per lane."""
    sizes = np.zeros((3, LANES, last), np.int64)  # for each batch: its longest item, its items, its tokens
    waits: list[Ints] = []
    for index in range(LANES):
        source = KnownSizes(corpus.documents(SEED * 1000 + index), sp.Lane(index, LANES, SEED), encoded=True)
        stage, taken = custom.BucketBatcher(source, **settings), []
        for n, lengths in enumerate(islice(stage, last)):
            taken.append(source.taken)
            sizes[:, index, n] = max(lengths), len(lengths), sum(lengths)
            if n >= last // 2:
                waits.append(n - np.searchsorted(taken, [ref[0] for ref in stage.ref[1:]], side="right"))
    longest, rows, tokens = sizes[:, :, last // 2 :]
    bounds = np.array(settings.pop("bounds"))
    padded = bounds[np.searchsorted(bounds, longest)]
    steps = padded.T.reshape(-1, RANKS[0])
    # the mean fraction of ranks whose batch has the most frequent bound of the step
    alike = np.mean([np.unique(step, return_counts=True)[1].max() / RANKS[0] for step in steps])
    attention = rows * np.vectorize(lambda bound: corpus.cost(bound, 0))(padded)
    name = ", ".join(f"{name}={value:,}" for name, value in settings.items())
    shares = f"{1 - tokens.sum() / (padded * rows).sum():.1%}, {alike:.0%}, {format_waiting(padded * rows)}"
    console.print(f"{name}: {shares}, {format_waiting(attention)}, {np.percentile(np.concatenate(waits), 99):.0f}")


class Costs(Lengths):
    """Encoder whose items are lengths, and whose packs are the sum of the costs of their items."""

    cost = staticmethod(sp.attention_cost(hidden=HIDDEN))

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        """Return the length that the sample states."""
        return int(sample.json()["length"])

    def pack(self, items: list[int], rng: sp.Rng) -> Any:
        """Return the sum of the items' costs."""
        return {"cost": sum(self.cost(length, 0) for length in items)}

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        """Return the only pack of the batch."""
        return items[0]


def packs_of(folder: str, encoder: sp.TaskEncoder, max_length: int, candidates: int, lane: sp.Lane) -> custom.Stage:
    """Build a lane of batches of one pack each. They are balanced over `candidates` packs, or not if it is 0."""
    packs: custom.ItemStage = sp.OnlinePacker(
        sp.Encode(sp.TarShardReader(folder, lane), encoder), max_length=max_length
    )
    return sp.Batcher(sp.Balance(packs, candidates=candidates, cost=Costs.cost) if candidates else packs, size=1)


def write(folder: str, corpus: Corpus, samples: int, part: str, content: Callable[[int], bytes]) -> None:
    """Write shards of 1,000 samples. Each has one part, `content(length)` of a document."""
    lengths = [length for length, _ in islice(corpus.documents(SEED), samples)]
    for first in range(0, samples, 1000):
        chunk = ({part: content(length)} for length in lengths[first : first + 1000])
        write_tar(Path(folder) / f"{first // 1000:04d}.tar", chunk)


def ranks(bench: Bench) -> None:
    """Compare the time that `Balance` saves two ranks with the simulated time."""
    costs, _ = pack_costs(LONG, LONG.cost, 600, max_length=LONG.longest)
    unit = 0.2 / float(costs.mean())  # seconds per unit of cost, so that a pack takes 0.2 s on average
    simulated = [
        waiting_share(each[:, 100:500].T.reshape(-1, 2).tolist())
        for each in (costs, balance_costs(costs, candidates=CANDIDATES, slots=500)[0])
    ]
    with tempfile.TemporaryDirectory(dir=bench.data) as folder:
        write(folder, LONG, 24_000, "json", lambda length: json.dumps({"length": length}).encode())
        measured = [two_ranks(folder, candidates, unit, bench.options.steps) for candidates in (0, CANDIDATES)]
    for name, (before, after) in ("simulated", simulated), ("measured", measured):
        saved = 1 - (1 - before) / (1 - after)
        console.print(f"two ranks, waiting, {name}: {before:.1%}, with Balance {after:.1%}, which saves {saved:.1%}")


def two_ranks(folder: str, candidates: int, unit: float, steps: int) -> float:
    """Run two ranks, and return the fraction of their time that they do not train."""
    trained_s, total_s = zip(*run_ranks(one_rank, 2, folder, candidates, unit, steps), strict=True)
    return 1 - float(sum(trained_s) / sum(total_s))


def one_rank(rank: int, folder: str, candidates: int, unit: float, steps: int, results: Any) -> None:
    """Run one rank, which sleeps for the cost of each pack and then waits for the other rank.

    Puts the seconds of sleep and of the whole run in `results`.
    """
    import torch
    import torch.distributed as dist

    trained = 0.0
    with sp.SavableLoader(partial(packs_of, folder, Costs(), 32 << 10, candidates), seed=SEED, lanes=8) as loader:
        batches = iter(loader)
        for _ in islice(batches, 2 * steps):  # warm up until `Balance` of every lane has all its candidates
            pass
        dist.barrier()
        start = time.perf_counter()
        batch = next(batches)
        for _ in range(steps):
            train_s = int(batch["cost"]) * unit
            end_of_step = time.perf_counter() + train_s
            batch = next(batches)  # while the step is computed
            time.sleep(max(0.0, end_of_step - time.perf_counter()))
            trained += train_s
            dist.all_reduce(torch.ones(1))
        results.put((trained, time.perf_counter() - start))


def loading(bench: Bench) -> None:
    """Measure the CPU time of a batch with and without `Balance`."""
    for corpus in (SHORT, LONG):
        letters = np.random.default_rng(SEED).integers(97, 123, corpus.longest, dtype=np.uint8).tobytes()
        with tempfile.TemporaryDirectory(dir=bench.data) as folder:
            write(folder, corpus, 20_000, "txt", lambda length, text=letters: text[: max(1, length - 2)])  # type: ignore[misc]
            packs = partial(packs_of, folder, LanguageModelingEncoder(max_length=corpus.longest), corpus.longest)
            ways = {f"candidates={each}": partial(of_packs, partial(packs, each)) for each in (CANDIDATES, 0)}
            bench.loaders(f"packs of {corpus.longest:,}", "pack", ways)


def of_packs(packs: Callable[[sp.Lane], custom.Stage]) -> Loader:
    """Run batches of one pack on 16 lanes."""
    return Loader(iter(sp.SavableLoader(packs, seed=SEED, lanes=16)), lambda batch: 1, warm=16 * 2 * CANDIDATES)


class Documents(FunctionEncoder):
    """Encoder of documents, whose packs are lists of them."""

    def length(self, item: Any) -> int:
        """Return the number of tokens."""
        return len(item)

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        """Return the items."""
        return items


def document(sample: Any) -> list[int]:
    """Return 5 to 64 tokens, by the number in the sample's JSON."""
    return [0] * (5 + decode_json(sample)["id"] % 60)


def items(bench: Bench) -> None:
    """Compare packs of about 64 items with batches of 64 items, with default settings."""
    documents = sp.read(str(prepare(bench.data, "short-json"))).shuffle(10_000).encode(Documents(document, list))
    packs, warm = documents.pack(64 * 34).batch(1), 150_000  # units until all open packs are filled
    ways = {
        "batches": lambda: Loader(iter(sp.SavableLoader(documents.batch(64), seed=SEED)), warm=warm),
        "packs": lambda: Loader(iter(sp.SavableLoader(packs, seed=SEED)), lambda batch: len(batch[0]), warm=warm),
    }
    bench.loaders("items of 34 tokens", "item", ways)


if __name__ == "__main__":
    measures = {"fill": compare_policies, "buckets": buckets, "balance": balance, "ranks": ranks}
    main(__doc__, {**measures, "loading": loading, "items": items}, items=200_000, last=2_000, steps=160)
