"""Random histories of rows in flight. No row may be lost, or be trained on twice by a saved model.

    take a step │ acknowledge, drop or requeue rows on any rank │ exclude samples │ save, merged or per rank
    │ kill all ranks and resume on another number

A history is a random sequence of these moves. It is compared with an `Oracle`, which has plain lists. All ranks run in
this process, each as a `Run`.
"""

from __future__ import annotations

import copy
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from report import Row

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.loader.acknowledgements import Acknowledgements
from savable_pipeline.run.loader.rows_in_flight import RowsInFlight
from savable_pipeline.run.loader.run import Run, voted_step
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.stages.pipeline import PipelineFunction

LANES, WORLD_SIZES = 4, (1, 2, 4)
Receipt = tuple[int, int]  # slot ID (epoch << 40 | slot) and row
Exclusions = tuple[tuple[int, tuple[int, ...]], ...]  # slots, and the samples that were excluded from each slot on


class Numbers(sp.TaskEncoder):
    """Encoder whose values show which samples and random numbers they are built from.

    An item is (sample number, random number), and a pack (items, random number). A batch has a random number too.
    """

    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"], rng.integers(1 << 30)

    def length(self, item: Any) -> int:
        return 1 + int(item[0]) % 5  # by the sample's number

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items, rng.integers(1 << 30)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"items": list(items), "drawn": rng.integers(1 << 30)}


def numbers_pipeline(shards: str, lane: sp.Lane, *, pack: bool, epochs: int | None, size: int) -> custom.Stage:
    """Build a lane with a shuffle buffer, an encoder, packs if `pack`, and batches."""
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane, epochs=epochs), size=5)
    stage: Any = sp.Encode(samples, Numbers())
    if pack:
        stage = sp.OnlinePacker(stage, max_length=7, open_packs=2)
    return sp.Batcher(stage, size=size)


@dataclass
class Oracle:
    """Model of acknowledgements: which rows are done, and which are in flight."""

    done: list[Receipt] = field(default_factory=list)
    open: list[Receipt] = field(default_factory=list)  # in flight: yielded and not acknowledged, the oldest first
    to_repeat: list[Receipt] = field(default_factory=list)  # receipts in `open` that must be yielded again
    excluded: set[int] = field(default_factory=set)  # samples that were excluded
    fully_excluded: set[Receipt] = field(default_factory=set)  # rows in flight whose samples were all excluded
    exclusions: Exclusions = ()

    def record_yield(self, receipt: Receipt) -> None:
        """Record that a row was yielded, for the first time or again."""
        if receipt in self.to_repeat:
            self.to_repeat.remove(receipt)
        else:
            assert receipt not in self.open and receipt not in self.done, f"{receipt} is given twice"
            self.open.append(receipt)

    def record_acknowledged(self, receipts: Sequence[Receipt]) -> None:
        """Record that rows are done or dropped."""
        for receipt in receipts:
            self.open.remove(receipt)
            self.done.append(receipt)

    def exclude(self, slot: int, numbers: Sequence[int], samples_of_row: dict[Receipt, set[int]]) -> None:
        """Record that samples are excluded from a slot on. `samples_of_row` has the samples of each row."""
        self.exclusions += ((slot, tuple(numbers)),)
        self.excluded |= set(numbers)
        self.fully_excluded |= {receipt for receipt in self.open if samples_of_row[receipt] <= self.excluded}
        self.open = [receipt for receipt in self.open if receipt not in self.fully_excluded]
        self.to_repeat = [receipt for receipt in self.to_repeat if receipt not in self.fully_excluded]

    def without_excluded(self, item: Any) -> Any:
        """Remove excluded samples from an item or a pack. Return None if nothing remains."""
        if isinstance(item[0], int):
            return None if item[0] in self.excluded else item
        remaining = [each for each in item[0] if each[0] not in self.excluded]
        return (remaining, item[1]) if remaining else None

    def after_resume(self) -> Oracle:
        """Return the model after a resume, which yields all rows in flight again."""
        return replace(copy.deepcopy(self), to_repeat=list(self.open))


class History:
    """One random history of at least `slots` slots. All its loaders have these settings."""

    def __init__(self, rng: random.Random, settings: LoaderSettings, slots: int) -> None:
        self._rng, self._settings, self._slots = rng, settings, slots
        self._yielded: dict[tuple[int, int], Any] = {}  # batches by epoch and slot
        self._samples_of_row: dict[Receipt, set[int]] = {}
        self.oracle, self._saved_oracle = Oracle(), Oracle()
        self._saved: dict[str, Any] | None = None
        self._files: list[dict[str, Any]] = []  # the saved state of each rank
        self._own_files = False  # whether each rank has just loaded its own state, not a merged one
        self._receipts: dict[int, list[Receipt]] = {}  # receipts of each rank that are not acknowledged yet
        self._batch_receipts: dict[int, list[Any]] = {}  # array of receipts of each batch, by rank
        self._runs = self._open_runs(1)
        self.counts: Counter[str] = Counter()

    @property
    def _expected(self) -> dict[tuple[int, int], Any]:
        """The expected batches, by epoch and slot."""
        return expected(self._settings, self._slots + 4 * LANES, self.oracle.exclusions)

    def _open_runs(self, world_size: int) -> list[Run]:
        """Open the runs of all ranks, which have no receipts yet."""
        self._receipts = {rank: [] for rank in range(world_size)}
        self._batch_receipts = {rank: [] for rank in range(world_size)}
        return [Run(replace(self._settings, ranks=(rank, world_size))) for rank in range(world_size)]

    def step(self) -> None:
        """Take one batch on each rank, after all batches that are to be repeated."""
        self._take_repeats()
        self._take_batches(self._runs)
        self._own_files = False

    def _take_repeats(self) -> None:
        """Take repeated batches until all ranks have equally many left.

        Ranks that have loaded their own states must first vote on the next step.
        """
        least = min(len(table_of(run).waiting) for run in self._runs)
        for run in self._runs:
            while not self._own_files and len(table_of(run).waiting) > least:
                self._take_batches([run])

    def _take_batches(self, runs: Sequence[Run]) -> None:
        """Take one batch of each run, compare it with the expected one, and record its receipts."""
        positions = [(run.position.epoch, run.position.own_slot) for run in runs]
        batches = voted_step([iter(run) for run in runs])
        # a batch that is repeated does not advance the position
        repeated = [at == (run.position.epoch, run.position.own_slot) for run, at in zip(runs, positions, strict=True)]
        for run, batch, position, is_repeated in zip(runs, batches, positions, repeated, strict=True):
            receipts = [tuple(each) for each in receipts_of(run).tolist()]
            assert isinstance(batch, dict) and batch["receipts"].tolist() == list(map(list, receipts))
            real = [each for each in receipts if each[0] >= 0]  # without receipts of padding rows
            if not is_repeated:
                self._compare_with_expected(position, batch)
                assert {each[0] for each in real} <= {position[0] << 40 | position[1]}
                self._samples_of_row |= {each: _numbers(batch["items"][each[1]]) for each in real}
            elif real:
                self._compare_repeated(divmod(real[0][0], 1 << 40), batch, receipts)
            for receipt in real:
                self.oracle.record_yield(receipt)
            self._receipts[run.ranks.rank] += real
            self._batch_receipts[run.ranks.rank].append(receipts_of(run))
            self.counts["batches"] += 1

    def _compare_repeated(self, position: tuple[int, int], batch: Any, receipts: list[Receipt]) -> None:
        """Compare a repeated batch with the one yielded first, without excluded samples."""
        yielded, slot_id = self._yielded[position], position[0] << 40 | position[1]
        rows = len(yielded["items"]) if "valid" not in yielded else int(yielded["valid"].sum())
        items = map(self.oracle.without_excluded, yielded["items"][:rows])
        rest = {row: item for row, item in enumerate(items) if item}
        padding = len(yielded["items"]) - len(rest) if "valid" in yielded else 0
        assert batch["items"] == [*rest.values(), *[next(iter(rest.values()))] * padding], f"{position}: other rows"
        assert "valid" not in yielded or batch["valid"].tolist() == [True] * len(rest) + [False] * padding
        to_repeat = [(slot_id, row) if (slot_id, row) in self.oracle.to_repeat else (-1, -1) for row in rest]
        assert receipts == to_repeat + [(-1, -1)] * padding, f"{position}: other receipts"
        assert batch["drawn"] == yielded["drawn"]
        self.counts["shorter"] += len(rest) < rows

    def _compare_with_expected(self, position: tuple[int, int], batch: Any) -> None:
        """Compare the batch of an epoch and slot with the expected one."""
        self._yielded[position] = batch
        expected = self._expected.get(position)
        if expected is not None:
            found = {name: part for name, part in batch.items() if name != "receipts"}
            if "valid" in expected:
                assert found.pop("valid").tolist() == expected["valid"].tolist(), f"{position}: valid"
            assert all(expected[name] == part for name, part in found.items()), f"{position}: another batch"

    def acknowledge(self) -> None:
        """Acknowledge, drop or requeue random rows, on their rank or on another."""
        rank = self._rng.randrange(len(self._runs))
        unreported = [receipt for receipt in self.oracle.open if receipt not in self.oracle.to_repeat]
        waiting = [receipt for receipt in self._receipts[rank] if receipt in unreported]
        chosen = self._rng.sample(waiting, self._rng.randint(0, len(waiting)))
        reported: Any = [*chosen, (-1, -1)]
        if self._batch_receipts[rank] and self._rng.random() < 0.5:
            whole = self._rng.choice(self._batch_receipts[rank])
            rows = [(slot, row) for slot, row in whole.tolist() if slot >= 0]
            if all(row in waiting for row in rows):
                chosen, reported = rows, whole
        kind = self._rng.choice(["done", "done", "done", "dropped", "again"])
        self._receipts[rank] = [receipt for receipt in self._receipts[rank] if receipt not in chosen]
        if kind == "again":
            table_of(self._runs[rank]).acknowledge(reported, "again")
            self.oracle.to_repeat += chosen
            return
        reporter = self._runs[rank if self._rng.random() < 0.7 else self._rng.randrange(len(self._runs))]
        table_of(reporter).acknowledge(reported, kind, "stale" if kind == "dropped" else "")  # type: ignore[arg-type]
        self.oracle.record_acknowledged(chosen)
        self.counts["rows"] += len(chosen)

    def exclude(self) -> None:
        """Exclude random samples, of rows in flight or others."""
        self._take_repeats()
        numbers = sorted(set().union(*(self._samples_of_row[each] for each in self.oracle.open)) - self.oracle.excluded)
        chosen = self._rng.sample(numbers, min(len(numbers), self._rng.randint(0, 3))) or [self._rng.randrange(107)]
        (slot,) = {run.reconfigure(exclude=[f"s{number:06d}" for number in chosen]) for run in self._runs}
        self.oracle.exclude(slot, chosen, self._samples_of_row)
        if len(self._runs) == 1:  # otherwise a rank may not know yet what another has acknowledged
            self._check_open()
        self.counts["excluded"] += len(chosen)

    def _check_open(self) -> None:
        """Check that the ranks have as many rows in flight as the oracle."""
        rows = sum(table_of(run).in_flight().rows for run in self._runs)
        assert rows == len(self.oracle.open), f"{rows} rows in flight, which are {len(self.oracle.open)}"

    def save(self) -> None:
        """Save the state of all ranks, merged from files or gathered."""
        self._take_repeats()
        states = [copy.deepcopy(run.state_dict()) for run in self._runs]
        self._files, self._saved = states, sp.merge_states(self._rng.sample(states, len(states)))
        if self._rng.random() < 0.5:
            for run, own in zip(self._runs, states, strict=True):
                assert run.joined(own, states) == self._saved
        self._saved_oracle = copy.deepcopy(self.oracle)

    def kill(self) -> None:
        """Close all ranks, and resume another number of ranks from the last state."""
        self.close()
        slot = self._saved["slot"] if self._saved else 0
        sizes = [size for size in WORLD_SIZES if slot % size == 0]  # otherwise the last slots of an epoch may be unused
        self._runs = self._open_runs(self._rng.choice(sizes))
        own = len(self._runs) == len(self._files) and not any("acks_" in "".join(state) for state in self._files)
        self._own_files = own
        for run, state in zip(self._runs, self._files if own else [self._saved] * len(self._runs), strict=True):
            if state is not None:
                run.load_state_dict(state)
        self.oracle = self._saved_oracle.after_resume()
        self._check_open()
        self.counts["kills"] += 1

    def finish(self) -> None:
        """Take and acknowledge all remaining slots. Check that each row of each slot is done exactly once."""
        while self.oracle.to_repeat or self._slots_passed < self._slots:
            self.step()
        self.oracle.record_acknowledged(list(self.oracle.open))
        times_done = Counter(self.oracle.done)
        assert all(times == 1 for times in times_done.values()), "a row is twice in the model"
        slots = {slot for slot, _ in times_done}
        for (epoch, slot), batch in list(self._expected.items())[: self._slots]:
            valid = batch["valid"].tolist() if "valid" in batch else [True] * len(batch["items"])
            slot_id = epoch << 40 | slot
            for row, is_valid in enumerate(valid):
                is_done = (slot_id, row) in times_done or (slot_id, row) in self.oracle.fully_excluded
                assert not is_valid or is_done, f"{(epoch, slot, row)} is lost: {len(slots)} slots"

    @property
    def _slots_passed(self) -> int:
        """The number of slots yielded, over all epochs."""
        position = self._runs[0].position
        return sum((epoch, slot) < (position.epoch, position.slot) for epoch, slot in self._expected)

    def close(self) -> None:
        """Close all ranks."""
        for run in self._runs:
            run.close()


def receipts_of(run: Run) -> Any:
    """Return the receipts of the rank's last batch."""
    return run.observer(RowsInFlight).receipts(run.position)  # type: ignore[union-attr]


def table_of(run: Run) -> Acknowledgements:
    """Return the table of a rank's rows in flight."""
    return run.observer(RowsInFlight).table  # type: ignore[union-attr]


@lru_cache
def expected(settings: LoaderSettings, slots: int, exclusions: Exclusions) -> dict[tuple[int, int], Any]:
    """Return the batch of each epoch and slot, from a run without acknowledgements but with the same exclusions."""
    found = {}
    remaining = list(exclusions)
    with (run := Run(replace(settings, acknowledge=False, ranks=(0, 1)))):
        for _ in range(slots):
            while remaining and remaining[0][0] == run.position.next_batch_number:
                run.reconfigure(exclude=[f"s{number:06d}" for number in remaining.pop(0)[1]])
            batch = next(iter(run))
            after = run.position.previous or run.position
            found[after.epoch, after.slot - 1] = batch
    return found


def _numbers(item: Any) -> set[int]:
    """Return the numbers of the samples of an item or a pack."""
    return {item[0]} if isinstance(item[0], int) else {each[0] for each in item[0]}


@lru_cache
def settings_of(shards: str, pack: bool, epochs: int | None, size: int, tail: Any, order: int) -> LoaderSettings:
    """Return settings for a history. They are cached, because `expected` is cached by them."""
    pipeline: PipelineFunction = partial(numbers_pipeline, shards, pack=pack, epochs=epochs, size=size)
    return LoaderSettings(pipeline, seed=order, lanes=LANES, ranks=(0, 1), tail=tail, acknowledge=True)


def history(seed: int, shards: str, slots: int = 40) -> Counter[str]:
    """Run one random history. Raises AssertionError if it differs from its oracle."""
    rng = random.Random(seed)
    pack, finite = rng.random() < 0.3, rng.random() < 0.5
    size, tail, order = rng.choice([1, 2, 3]), rng.choice(["stop", "pad"]), rng.randrange(2)
    settings = settings_of(shards, pack, 1 if finite else None, size, tail, order)
    run = History(rng, settings, slots)
    moves = [run.step] * 7 + [run.acknowledge] * 9 + [run.save] * 2 + [run.kill]
    moves += [run.exclude] * rng.choice([0, 1, 2])
    try:
        for _ in range(rng.randint(10, 60)):
            rng.choice(moves)()
        run.finish()
    except BaseException as error:
        error.add_note(f"seed {seed}: pack {pack}, finite {finite}, tail {tail}")
        raise
    finally:
        run.close()
    return run.counts


def in_flight(folder: Path, histories: int) -> Iterator[Row]:
    """Run random histories, on shards that are written to `folder`."""
    with sp.ShardWriter(folder, max_samples=40) as writer:
        for number in range(107):
            writer.write({"__key__": f"s{number:06d}", "json": {"id": number}})
    total, problem = Counter[str](), ""
    logging.disable(logging.WARNING)  # about slots that the end of an epoch leaves unused
    try:
        for seed in range(histories):
            total += history(seed, str(folder))
    except AssertionError as error:
        problem = f"{error} {' '.join(error.__notes__)}"
    finally:
        logging.disable(logging.NOTSET)
    done = f"{histories} histories, {total['kills']} kills, {total['excluded']} exclusions"
    yield Row("in_flight", "1, 2 and 4 ranks", done, f"{total['batches']} batches, {total['rows']} rows", problem)
