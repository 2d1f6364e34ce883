"""Random histories of rows in flight, against an oracle that is a list: nothing lost, nothing twice in a saved model.

    take a step │ done, dropped, again, on any rank │ exclude samples │ save, merged or by each rank │ kill │ resume on
                                                                                                       other ranks

All ranks run in this process, at the level of `Run`.
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
Receipt = tuple[int, int]
Plan = tuple[tuple[int, tuple[int, ...]], ...]  # places, and the samples that were excluded there


class Numbers(sp.TaskEncoder):
    """A batch is a dict of the numbers of its items, each with a number drawn for it, and one drawn for the batch."""

    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"], rng.integers(1 << 30)

    def length(self, item: Any) -> int:
        return 1 + int(item[0]) % 5

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items, rng.integers(1 << 30)

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"items": list(items), "drawn": rng.integers(1 << 30)}


def numbers_pipeline(shards: str, lane: sp.Lane, *, pack: bool, epochs: int | None, size: int) -> custom.Stage:
    """Reader, buffer, encoder, packs or none, and batches."""
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane, epochs=epochs), size=5)
    stage: Any = sp.Encode(samples, Numbers())
    if pack:
        stage = sp.OnlinePacker(stage, max_length=7, open_packs=2)
    return sp.Batcher(stage, size=size)


@dataclass
class Oracle:
    """What the model has seen, and what was given: lists of receipts."""

    done: list[Receipt] = field(default_factory=list)
    open: list[Receipt] = field(default_factory=list)  # given and not acknowledged, the oldest first
    coming: list[Receipt] = field(default_factory=list)  # of these, those that must come again
    gone: set[int] = field(default_factory=set)  # samples that were excluded
    closed: set[Receipt] = field(default_factory=set)  # rows of nothing else that were open then
    plan: Plan = ()

    def give(self, receipt: Receipt) -> None:
        """A row is given: one that is to come again, or a new one."""
        if receipt in self.coming:
            self.coming.remove(receipt)
        else:
            assert receipt not in self.open and receipt not in self.done, f"{receipt} is given twice"
            self.open.append(receipt)

    def end(self, receipts: Sequence[Receipt]) -> None:
        """Rows are done or dropped."""
        for receipt in receipts:
            self.open.remove(receipt)
            self.done.append(receipt)

    def exclude(self, slot: int, numbers: Sequence[int], samples_of_row: dict[Receipt, set[int]]) -> None:
        """These samples come no more; `samples_of_row` has those of each row."""
        self.plan += ((slot, tuple(numbers)),)
        self.gone |= set(numbers)
        self.closed |= {receipt for receipt in self.open if samples_of_row[receipt] <= self.gone}
        self.open = [receipt for receipt in self.open if receipt not in self.closed]
        self.coming = [receipt for receipt in self.coming if receipt not in self.closed]

    def drop_excluded(self, item: Any) -> Any:
        """An item or a pack without what was excluded; None if nothing remains."""
        if isinstance(item[0], int):
            return None if item[0] in self.gone else item
        remaining = [each for each in item[0] if each[0] not in self.gone]
        return (remaining, item[1]) if remaining else None

    def resumed(self) -> Oracle:
        """The one of a saved model: all that was in flight comes again."""
        return replace(copy.deepcopy(self), coming=list(self.open))


class History:
    """One random history, of as many slots; `settings` are those of all its loaders."""

    def __init__(self, draw: random.Random, settings: LoaderSettings, slots: int) -> None:
        self._draw, self._settings, self._slots = draw, settings, slots
        self._yielded: dict[Receipt, Any] = {}  # batches by epoch and slot
        self._samples_of_row: dict[Receipt, set[int]] = {}  # the samples of each row
        self.oracle, self._saved_oracle = Oracle(), Oracle()
        self._saved: dict[str, Any] | None = None
        self._files: list[dict[str, Any]] = []  # of each rank
        self._own_files = False  # whether each rank has just loaded its own
        self._passed: dict[int, list[Receipt]] = {}  # receipts that each rank holds
        self._whole: dict[int, list[Any]] = {}  # those of whole batches, as each rank was handed them
        self._runs = self._started(1)
        self.counts: Counter[str] = Counter()

    @property
    def _expected(self) -> dict[Receipt, Any]:
        return expected(self._settings, self._slots + 4 * LANES, self.oracle.plan)

    def _started(self, world_size: int) -> list[Run]:
        self._passed = {rank: [] for rank in range(world_size)}
        self._whole = {rank: [] for rank in range(world_size)}
        return [Run(replace(self._settings, ranks=(rank, world_size))) for rank in range(world_size)]

    def step(self) -> None:
        """Each rank takes a batch, those asked for again before."""
        self._even()
        self._take(self._runs)
        self._own_files = False

    def _even(self) -> None:
        """Let ranks that were asked for rows again take these batches; not before ranks with their own files vote."""
        least = min(len(table_of(run).waiting) for run in self._runs)
        for run in self._runs:
            while not self._own_files and len(table_of(run).waiting) > least:
                self._take([run])

    def _take(self, runs: Sequence[Run]) -> None:
        positions = [(run.position.epoch, run.position.own_slot) for run in runs]
        taken = voted_step([iter(run) for run in runs])
        again = [at == (run.position.epoch, run.position.own_slot) for run, at in zip(runs, positions, strict=True)]
        for run, batch, position, repeated_rows in zip(runs, taken, positions, again, strict=True):
            receipts = [tuple(each) for each in receipts_of(run).tolist()]
            assert isinstance(batch, dict) and batch["receipts"].tolist() == list(map(list, receipts))
            real = [each for each in receipts if each[0] >= 0]
            if not repeated_rows:
                self._compare(position, batch)
                assert {each[0] for each in real} <= {position[0] << 40 | position[1]}
                self._samples_of_row |= {each: _numbers(batch["items"][each[1]]) for each in real}
            elif real:
                self._compare_again(divmod(real[0][0], 1 << 40), batch, receipts)
            for receipt in real:
                self.oracle.give(receipt)
            self._passed[run.ranks.rank] += real
            self._whole[run.ranks.rank].append(receipts_of(run))
            self.counts["batches"] += 1

    def _compare_again(self, position: tuple[int, int], batch: Any, receipts: list[Receipt]) -> None:
        """With the batch that was given, without what is excluded, and with what was to come."""
        yielded, slot = self._yielded[position], position[0] << 40 | position[1]
        rows = len(yielded["items"]) if "valid" not in yielded else int(yielded["valid"].sum())
        rest = {row: item for row, item in enumerate(map(self.oracle.drop_excluded, yielded["items"][:rows])) if item}
        fill = len(yielded["items"]) - len(rest) if "valid" in yielded else 0
        assert batch["items"] == [*rest.values(), *[next(iter(rest.values()))] * fill], f"{position}: other rows"
        assert "valid" not in yielded or batch["valid"].tolist() == [True] * len(rest) + [False] * fill
        coming = [(slot, row) if (slot, row) in self.oracle.coming else (-1, -1) for row in rest]
        assert receipts == coming + [(-1, -1)] * fill, f"{position}: other receipts"
        assert batch["drawn"] == yielded["drawn"]
        self.counts["shorter"] += len(rest) < rows

    def _compare(self, position: tuple[int, int], batch: Any) -> None:
        self._yielded[position] = batch
        expected = self._expected.get(position)
        if expected is not None:
            found = {name: part for name, part in batch.items() if name != "receipts"}
            if "valid" in expected:
                assert found.pop("valid").tolist() == expected["valid"].tolist(), f"{position}: valid"
            assert all(expected[name] == part for name, part in found.items()), f"{position}: another batch"

    def acknowledge(self) -> None:
        """Some rows are done, dropped or asked for again, on their rank or on another."""
        rank = self._draw.randrange(len(self._runs))
        out = [each for each in self._passed[rank] if each in self.oracle.open and each not in self.oracle.coming]
        chosen = self._draw.sample(out, self._draw.randint(0, len(out)))
        reported: Any = [*chosen, (-1, -1)]
        if self._whole[rank] and self._draw.random() < 0.5:
            whole = self._draw.choice(self._whole[rank])
            rows = [(slot, row) for slot, row in whole.tolist() if slot >= 0]
            if all(row in out for row in rows):
                chosen, reported = rows, whole
        kind = self._draw.choice(["done", "done", "done", "dropped", "again"])
        self._passed[rank] = [each for each in self._passed[rank] if each not in chosen]
        if kind == "again":
            table_of(self._runs[rank]).acknowledge(reported, "again")
            self.oracle.coming += chosen
            return
        where = self._runs[rank if self._draw.random() < 0.7 else self._draw.randrange(len(self._runs))]
        table_of(where).acknowledge(reported, kind, "stale" if kind == "dropped" else "")  # type: ignore[arg-type]
        self.oracle.end(chosen)
        self.counts["rows"] += len(chosen)

    def exclude(self) -> None:
        """Samples of rows in flight, or others, come no more from here on."""
        self._even()
        numbers = sorted(set().union(*(self._samples_of_row[each] for each in self.oracle.open)) - self.oracle.gone)
        chosen = self._draw.sample(numbers, min(len(numbers), self._draw.randint(0, 3))) or [self._draw.randrange(107)]
        (slot,) = {run.reconfigure(exclude=[f"s{number:06d}" for number in chosen]) for run in self._runs}
        self.oracle.exclude(slot, chosen, self._samples_of_row)
        if len(self._runs) == 1:  # else a rank may not know yet what another acknowledged
            self._check_open()
        self.counts["excluded"] += len(chosen)

    def _check_open(self) -> None:
        rows = sum(table_of(run).in_flight().rows for run in self._runs)
        assert rows == len(self.oracle.open), f"{rows} rows in flight, which are {len(self.oracle.open)}"

    def save(self) -> None:
        """The state of all ranks, merged from files or gathered."""
        self._even()
        states = [copy.deepcopy(run.state_dict()) for run in self._runs]
        self._files, self._saved = states, sp.merge_states(self._draw.sample(states, len(states)))
        if self._draw.random() < 0.5:
            for run, own in zip(self._runs, states, strict=True):
                assert run.joined(own, states) == self._saved
        self._saved_oracle = copy.deepcopy(self.oracle)

    def kill(self) -> None:
        """Forget all, and resume from the last state on other ranks."""
        self.close()
        slot = self._saved["slot"] if self._saved else 0
        sizes = [size for size in WORLD_SIZES if slot % size == 0]  # else an epoch may leave its last slots to nobody
        self._runs = self._started(self._draw.choice(sizes))
        own = len(self._runs) == len(self._files) and not any("acks_" in "".join(state) for state in self._files)
        self._own_files = own
        for run, state in zip(self._runs, self._files if own else [self._saved] * len(self._runs), strict=True):
            if state is not None:
                run.load_state_dict(state)
        self.oracle = self._saved_oracle.resumed()
        self._check_open()
        self.counts["kills"] += 1

    def end(self) -> None:
        """Take and acknowledge all that is left, up to the last slot: each row of each slot was seen once."""
        while self.oracle.coming or self._slots_passed < self._slots:
            self.step()
        self.oracle.end(list(self.oracle.open))
        times_done = Counter(self.oracle.done)
        assert all(times == 1 for times in times_done.values()), "a row is twice in the model"
        slots = {each[0] for each in times_done}
        for (epoch, slot), batch in list(self._expected.items())[: self._slots]:
            valid = batch["valid"].tolist() if "valid" in batch else [True] * len(batch["items"])
            slot_id = epoch << 40 | slot
            for row, counts in enumerate(valid):
                found = (slot_id, row) in times_done or (slot_id, row) in self.oracle.closed
                assert not counts or found, f"{(epoch, slot, row)} is lost: {len(slots)} slots"

    @property
    def _slots_passed(self) -> int:
        """The number of slots that were given, through epochs."""
        at = self._runs[0].position
        return sum((epoch, slot) < (at.epoch, at.slot) for epoch, slot in self._expected)

    def close(self) -> None:
        """Close the runs."""
        for run in self._runs:
            run.close()


def receipts_of(run: Run) -> Any:
    """Those of the batch given last."""
    return run.observer(RowsInFlight).receipts(run.position)  # type: ignore[union-attr]


def table_of(run: Run) -> Acknowledgements:
    """The rows in flight of a run."""
    return run.observer(RowsInFlight).table  # type: ignore[union-attr]


@lru_cache
def expected(settings: LoaderSettings, slots: int, plan: Plan) -> dict[tuple[int, int], Any]:
    """The batch of each slot, from a run without acknowledgements in which the same was decided."""
    found = {}
    remaining = list(plan)
    with (run := Run(replace(settings, acknowledge=False, ranks=(0, 1)))):
        for _ in range(slots):
            while remaining and remaining[0][0] == run.position.next_batch:
                run.reconfigure(exclude=[f"s{number:06d}" for number in remaining.pop(0)[1]])
            batch = next(iter(run))
            at = run.position.previous or run.position
            found[at.epoch, at.slot - 1] = batch
    return found


def _numbers(item: Any) -> set[int]:
    """The samples of an item or a pack."""
    return {item[0]} if isinstance(item[0], int) else {each[0] for each in item[0]}


@lru_cache
def settings_of(shards: str, pack: bool, epochs: int | None, size: int, tail: Any, order: int) -> LoaderSettings:
    """Those of a history; few, so that `expected` is asked for the same again."""
    pipeline: PipelineFunction = partial(numbers_pipeline, shards, pack=pack, epochs=epochs, size=size)
    return LoaderSettings(pipeline, seed=order, lanes=LANES, ranks=(0, 1), tail=tail, acknowledge=True)


def history(seed: int, shards: str, slots: int = 40) -> Counter[str]:
    """Run one history. Raises AssertionError where it differs from the oracle's."""
    draw = random.Random(seed)
    pack, finite = draw.random() < 0.3, draw.random() < 0.5
    size, tail, order = draw.choice([1, 2, 3]), draw.choice(["stop", "pad"]), draw.randrange(2)
    settings = settings_of(shards, pack, 1 if finite else None, size, tail, order)
    found = History(draw, settings, slots)
    moves = [found.step] * 7 + [found.acknowledge] * 9 + [found.save] * 2 + [found.kill]
    moves += [found.exclude] * draw.choice([0, 1, 2])
    try:
        for _ in range(draw.randint(10, 60)):
            draw.choice(moves)()
        found.end()
    except BaseException as error:
        error.add_note(f"seed {seed}: pack {pack}, finite {finite}, tail {tail}")
        raise
    finally:
        found.close()
    return found.counts


def in_flight(folder: Path, histories: int) -> Iterator[Row]:
    """So many random histories, on shards of their own in this folder."""
    with sp.ShardWriter(folder, max_samples=40) as writer:
        for number in range(107):
            writer.write({"__key__": f"s{number:06d}", "json": {"id": number}})
    total, wrong = Counter[str](), ""
    logging.disable(logging.WARNING)  # of slots that an epoch's end leaves out
    try:
        for seed in range(histories):
            total += history(seed, str(folder))
    except AssertionError as error:
        wrong = f"{error} {' '.join(error.__notes__)}"
    finally:
        logging.disable(logging.NOTSET)
    done = f"{histories} histories, {total['kills']} kills, {total['excluded']} exclusions"
    yield Row("in_flight", "1, 2 and 4 ranks", done, f"{total['batches']} batches, {total['rows']} rows", wrong)
