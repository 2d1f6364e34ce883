"""The ledger of a run: everything that was given is in it, cut where the run was resumed, and can be made again."""

from __future__ import annotations

import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.ledger import records
from savable_pipeline.run.ledger.reader import LedgerFiles
from savable_pipeline.run.ledger.records import Batch, Start, framed, pack_column, read_records, unpack_column
from savable_pipeline.run.loader.ledger import rebuild_batch
from savable_pipeline.run.loader.prefetcher import Prefetcher
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.savable_loader import run_of
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.tools.cli.main import app
from tests.conftest import write_numbered_shards
from tests.support.streams import next_hashes
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import numbers, toy_pipeline


@pytest.fixture
def shards(make_shards: Any) -> str:
    return str(make_shards([40, 7, 60]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def loader(pipeline: Any, folder: Path, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, seed=3, lanes=12, ledger=folder, **settings)


def kept(ledger: LedgerFiles) -> dict[tuple[int, int], list[int]]:
    """The indices of the samples of each batch that counts, by epoch and slot."""
    found: dict[tuple[int, int], list[int]] = {}
    for given in ledger.batches():
        if not given.lost:
            assert given.batch.position not in found
            found[given.batch.position] = given.batch.samples.refs[:, 0].tolist() if given.batch.items else []
    return found


@pytest.mark.parametrize(("num_workers", "pack"), [(0, None), (2, "best_fit")])
def test_the_ledger_has_every_row_of_every_yielded_batch(
    shards: str, folder: Path, num_workers: int, pack: str | None
) -> None:
    with loader(partial(toy_pipeline, shards, pack=pack), folder, num_workers=num_workers) as own:
        traced = [(own.trace(), numbers(batch)) for _, batch in zip(range(30), own, strict=False)]
    found = list(LedgerFiles(folder).batches())
    assert [given.batch.position for given in found] == [(0, slot) for slot in range(30)]
    for given, (trace, ids) in zip(found, traced, strict=True):
        assert given.batch.samples.refs[:, 0].tolist() == ids
        assert [len(row) for row in given.batch.samples.by_row()] == [len(row) for row in trace.rows]


def test_batches_after_the_resumed_state_are_lost_and_each_slot_has_one(shards: str, folder: Path) -> None:
    pipeline = partial(toy_pipeline, shards)
    draw = random.Random(5)
    expected: dict[tuple[int, int], list[int]] = {}
    states = [sp.SavableLoader(pipeline, seed=3, lanes=12).state_dict()]
    for _ in range(12):
        state = draw.choice(states[-8:])
        world_size = draw.choice([1, 2, 3])
        expected = {place: ids for place, ids in expected.items() if place[1] < state["slot"]}
        ranks = [loader(pipeline, folder, ranks=(rank, world_size)) for rank in range(world_size)]
        for own in ranks:
            own.load_state_dict(state)
        for _ in range(draw.randint(1, 9)):
            for own in ranks:
                ids = numbers(next(own))
                expected[(0, own.trace().slot)] = ids
            states.append(sp.merge_states([own.state_dict() for own in ranks]))
        for own in ranks:
            own.close()
    assert kept(LedgerFiles(folder)) == expected
    assert any(given.lost for given in LedgerFiles(folder).batches())


def test_a_killed_run_loses_no_record_of_a_yielded_batch(shards: str, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.support.toy_ledger", shards, str(folder), "2"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    given = [int(next(run.stdout)) for _ in range(20)]
    run.send_signal(signal.SIGKILL)
    given += [int(line) for line in run.stdout]
    run.wait()
    slots = [slot for _, slot in kept(LedgerFiles(folder))]
    assert slots[: len(given)] == given and len(slots) <= len(given) + 1


def test_loading_a_state_starts_a_new_ledger_file(shards: str, folder: Path) -> None:
    own = loader(partial(toy_pipeline, shards), folder)
    next_hashes(own, 3)
    state = own.state_dict()
    lost = next_hashes(own, 4)
    own.load_state_dict(state)
    assert next_hashes(own, 2) == lost[:2]
    ledger = LedgerFiles(folder)
    assert [start.slot for start in ledger.starts] == [0, 3]
    assert [given.batch.slot for given in ledger.batches() if given.lost] == [3, 4, 5, 6]
    assert sorted(kept(ledger)) == [(0, slot) for slot in range(5)]


@pytest.mark.parametrize(("back", "skipped"), [(1, 0), (2, 0), (4, 0), (1, 1), (2, 1)])
def test_batches_after_an_earlier_position_to_which_the_run_returns_do_not_count(
    shards: str, folder: Path, back: int, skipped: int
) -> None:
    own = loader(partial(toy_pipeline, shards), folder)
    given, run = list[list[int]](), run_of(own)
    positions = [run.position]
    for batch in islice(own, 6):
        given.append(numbers(batch))
        positions.append(run.position)
    run.return_to(positions[6 - back])
    own.skip(skipped)
    given[6 - back :] = map(numbers, islice(own, 2))
    slots = [*range(6 - back), *(slot + skipped for slot in range(6 - back, 8 - back))]
    assert kept(LedgerFiles(folder)) == {(0, slot): ids for slot, ids in zip(slots, given, strict=True)}


@pytest.mark.parametrize("resumes", [False, True])
def test_batches_skipped_after_a_resume_are_lost_in_the_ledger(shards: str, folder: Path, resumes: bool) -> None:
    """The spike of the loss: back to a state, and over the batches after it."""
    own = loader(partial(toy_pipeline, shards), folder)
    next_hashes(own, 5)
    state = own.state_dict()
    next_hashes(own, 5)
    own.load_state_dict(state)
    own.skip(3)
    if resumes:
        state = own.state_dict()
        own = loader(partial(toy_pipeline, shards), folder)
        own.load_state_dict(state)
    next_hashes(own, 2)
    ledger = LedgerFiles(folder)
    assert sorted(kept(ledger)) == [(0, slot) for slot in (0, 1, 2, 3, 4, 8, 9)]
    assert [given.batch.slot for given in ledger.batches() if given.lost] == [5, 6, 7, 8, 9]


def test_start_with_a_wrong_clock_is_ordered_after_the_others(
    shards: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2 ranks that cannot talk; each later start is killed before the next, on a node that is farther behind."""
    states: list[Any] = []
    now, behind = time.time_ns, 0
    monkeypatch.setattr(time, "time_ns", lambda: now() - behind)
    for start, steps in enumerate([6, 4, 2]):
        behind = start * 86_400 * 10**9
        ranks = [loader(partial(toy_pipeline, shards), folder, ranks=(rank, 2)) for rank in range(2)]
        for own in ranks * bool(states):
            own.load_state_dict(states[2 * start])
        for _ in range(steps):
            states += [sp.merge_states([own.state_dict() for own in ranks])] * (not start)
            for own in ranks:
                next(own)
    ledger = LedgerFiles(folder)  # the last start is from slot 8 on
    assert sorted(kept(ledger)) == [(0, slot) for slot in range(12)]
    assert [sum(given.lost for given in ledger.batches() if given.start is each) for each in ledger.starts] == [
        *(4, 4),
        *(2, 2),
        *(0, 0),
    ]


def write_starts(folder: Path, *starts: tuple[int, int, int]) -> None:
    """Files of two ranks, each of one batch: number, rank and the first slot of the start."""
    folder.mkdir()
    for each, (number, rank, slot) in enumerate(starts):
        begun = Start(records.FORMAT, number, rank, 2, 4, 7, 0, slot, [], b"")
        batch = Batch.of(0, slot + rank, BatchSamples())
        (folder / f"{each}.ledger").write_bytes(framed(begun) + framed(batch))


def counted(folder: Path) -> list[tuple[int, int]]:
    """Number of the start and rank of each batch that counts."""
    return sorted((given.start.number, given.start.rank) for given in LedgerFiles(folder).batches() if not given.lost)


@pytest.mark.parametrize(
    ("starts", "counts"),
    [
        # rank 0 was killed before it started; then both started at the same place, as they agreed
        ([(1, 1, 0), (5, 0, 0), (5, 1, 0)], [(5, 0), (5, 1)]),
        ([(1, 0, 0), (1, 1, 0), (5, 0, 0)], [(5, 0)]),
        # the same of ranks that cannot talk
        ([(1, 1, 0), (5, 0, 0), (6, 1, 0)], [(5, 0), (6, 1)]),
        # rank 0 has gone on at slot 2 before rank 1 started at all
        ([(1, 0, 0), (2, 0, 2), (3, 1, 0), (4, 1, 2)], [(1, 0), (2, 0), (3, 1), (4, 1)]),
        # rank 1 has not started again yet
        ([(1, 0, 0), (2, 1, 0), (3, 0, 0), (4, 1, 0), (5, 0, 2)], [(3, 0), (4, 1), (5, 0)]),
    ],
)
def test_ranks_of_a_start_belong_together_regardless_of_time(
    folder: Path, starts: list[tuple[int, int, int]], counts: list[tuple[int, int]]
) -> None:
    write_starts(folder, *starts)
    assert counted(folder) == counts


# Making a batch again.


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"pack": None, "blend": "nested"},
        {"pack": "buckets", "epochs": 1, "skip": 0},
        {"own": ("samples", "items", "batches"), "max_buffer_bytes": 0, "too_long": "split"},
    ],
)
def test_any_batch_can_be_rebuilt_byte_for_byte(
    shards: str, folder: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(records, "STATE_EVERY", 2)
    pipeline = partial(toy_pipeline, shards, **how)
    own = loader(pipeline, folder)
    given = {}
    for _ in range(2):
        for _, batch in zip(range(26), own, strict=False):
            given[own.epoch, own.trace().slot] = digest(batch)
        state = own.state_dict()
        own.close()
        own = loader(pipeline, folder, num_workers=1)
        own.load_state_dict(state)
    own.close()
    assert len(given) > 20
    for (epoch, slot), expected in random.Random(1).sample(sorted(given.items()), 6):
        assert digest(rebuild_batch(pipeline, LedgerFiles(folder), epoch, slot).batch) == expected


def test_without_a_state_the_lane_runs_from_the_start_of_its_epoch(shards: str, folder: Path) -> None:
    pipeline = partial(counted_pipeline, shards)
    with loader(pipeline, folder, tail="pad") as own:
        given = [next_hashes(own, 1000) for _ in range(2)]
    for epoch, batches in enumerate(given):
        for slot in (0, len(batches) - 1):
            assert digest(rebuild_batch(pipeline, LedgerFiles(folder), epoch, slot).batch) == batches[slot]


def test_another_pipeline_is_rejected(shards: str, folder: Path) -> None:
    next_hashes(loader(partial(toy_pipeline, shards), folder), 13)
    with pytest.raises(sp.CheckpointMismatchError, match="max_length"):
        rebuild_batch(partial(toy_pipeline, shards, max_length=21), LedgerFiles(folder), 0, 12)
    with pytest.raises(sp.SavableError, match="slot 13 of epoch 0 is not in the ledger"):
        rebuild_batch(partial(toy_pipeline, shards), LedgerFiles(folder), 0, 13)


# The file.


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within it, a file that would be larger than `size` bytes cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_batch_that_cannot_be_recorded_is_not_yielded(shards: str, folder: Path) -> None:
    pipeline = partial(toy_pipeline, shards)
    expected = next_hashes(sp.SavableLoader(pipeline, seed=3, lanes=12), 10)
    own = loader(pipeline, folder)
    found = next_hashes(own, 2)
    (path,) = folder.iterdir()
    with largest_file(path.stat().st_size + 20), pytest.raises(sp.SavableError, match=r"ledger .*Free space or set"):
        next(own)
    found += next_hashes(own, 8)
    assert found == expected
    assert sorted(kept(LedgerFiles(folder))) == [(0, slot) for slot in range(10)]


def test_a_batch_that_is_not_yielded_is_not_in_the_ledger(
    shards: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where workers must be started again and there are no more processes."""

    def fails(*_: Any) -> None:
        raise BlockingIOError("no more processes")

    own = loader(partial(toy_pipeline, shards), folder)
    next_hashes(own, 2)
    with monkeypatch.context() as patch, pytest.raises(BlockingIOError):
        patch.setattr(Prefetcher, "prefetch", fails)
        next(own)
    own.close()
    assert (
        sorted(kept(LedgerFiles(folder))) == [(0, slot) for slot in range(own.state_dict()["slot"])] == [(0, 0), (0, 1)]
    )


# Ranks that can talk.


class Meeting:
    """Where two ranks, each in a thread, say what they have at a time."""

    def __init__(self) -> None:
        self._barrier = Barrier(2, timeout=60)
        self._said: list[Any] = [None, None]

    def said(self, ranks: Ranks, value: Any) -> list[Any]:
        self._said[ranks.rank] = value
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found

    def largest(self, ranks: Ranks, value: int, *, smallest: bool) -> int:
        assert not smallest
        return int(max(self.said(ranks, value)))


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting()
    monkeypatch.setattr(Ranks, "has_group", True)
    monkeypatch.setattr(Ranks, "agree", lambda ranks, value, smallest: meeting.largest(ranks, value, smallest=smallest))
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: meeting.said(ranks, value))


def next_of_each(ranks: list[sp.SavableLoader]) -> list[str]:
    """The slot that each of the ranks gives at a time, or the error that it raises."""

    def given(own: sp.SavableLoader) -> str:
        try:
            next(own)
        except sp.SavableError as error:
            return str(error)
        return f"slot {own.trace().slot}"

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(given, ranks))


@pytest.mark.usefixtures("meeting")
def test_a_rank_that_cannot_write_stops_all_ranks_once(shards: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [folder, tmp_path / "file" / "ledger"]
    ranks = [loader(partial(toy_pipeline, shards), at, ranks=(rank, 2)) for rank, at in enumerate(folders)]
    told = next_of_each(ranks)
    assert told[0] == told[1] and told[0].startswith(f"rank 1: ledger {folders[1]}") and "rank 0" not in told[0]
    assert not list(folder.iterdir())
    (tmp_path / "file").unlink()
    assert next_of_each(ranks) == ["slot 0", "slot 1"]
    assert len({LedgerFiles(at).starts[0].number for at in folders}) == 1


@pytest.mark.usefixtures("meeting")
def test_communicating_ranks_agree_on_the_largest_start_number(shards: str, folder: Path, tmp_path: Path) -> None:
    folders = [folder, tmp_path / "other"]
    tomorrow = time.time_ns() + 86_400 * 10**9
    folders[1].mkdir()
    (folders[1] / f"{tomorrow:020d}-rank-00000.ledger").touch()  # a crash has left it empty
    (folders[1] / "note.ledger").touch()
    ranks = [loader(partial(toy_pipeline, shards), at, ranks=(rank, 2)) for rank, at in enumerate(folders)]
    assert next_of_each(ranks) == ["slot 0", "slot 1"]
    assert [LedgerFiles(at).starts[0].number for at in folders] == [tomorrow + 1] * 2


@pytest.mark.usefixtures("meeting")
def test_closed_rank_continues_without_the_others(shards: str, folder: Path) -> None:
    ranks = [loader(partial(toy_pipeline, shards), folder, ranks=(rank, 2)) for rank in range(2)]
    next_of_each(ranks)
    ranks[1].close()
    next(ranks[1])
    ledger = LedgerFiles(folder)
    assert sorted(kept(ledger)) == [(0, 0), (0, 1), (0, 3)] and len(ledger.starts) == 2


def test_a_record_cut_short_by_a_crash_is_ignored(shards: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    next_hashes(loader(partial(toy_pipeline, shards), folder), 5)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for cut in range(1, 12):
        path.write_bytes(whole[:-cut])
        assert len(list(LedgerFiles(folder).batches())) == 4
    assert "the last record is incomplete" in caplog.text
    path.write_bytes(whole[:-5] + b"\xff" * 5)
    assert len(list(LedgerFiles(folder).batches())) == 4


def test_a_sample_takes_few_bytes(make_shards: Any, folder: Path) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.TarShardReader(shards, lane), size=8)

    shards = str(make_shards([300, 300]))
    next_hashes(loader(pipeline, folder), 120)
    (path,) = folder.iterdir()
    batches = [record for record in read_records(path) if isinstance(record, Batch)]
    size = sum(len(records.framed(batch)) for batch in batches)
    assert size / sum(batch.items for batch in batches) <= 12


@pytest.mark.parametrize("values", [[0], [5, 5, 5], [0, 255], [0, 256], [1 << 40, 3], [(1 << 62) + 1, 0], []])
def test_packed_columns_unpack_to_equal_columns(values: list[int]) -> None:
    packed = pack_column(np.array(values)) if values else b""
    assert unpack_column(packed, len(values)).tolist() == values


def test_a_forged_column_is_rejected() -> None:
    for packed in (b"\x01ab", b"\x03abcabc", b"\x0b", b"\x09ab"):
        with pytest.raises(sp.SavableError, match="damaged"):
            unpack_column(packed, 3)


def test_forged_number_of_items_uses_no_memory(folder: Path) -> None:
    folder.mkdir()
    start = Start(records.FORMAT, 1, 0, 1, 1, 0, 0, 0, [], b"")
    forged = Batch(0, 0, 1 << 60, b"\x09\x00", b"\x09\x00", b"\x09\x00")
    (folder / "0.ledger").write_bytes(framed(start) + framed(forged))
    with pytest.raises(sp.SavableError, match="damaged ledger"):
        list(LedgerFiles(folder).batches())


def test_batches_without_samples_have_a_record() -> None:
    assert Batch.of(1, 7, BatchSamples()).items == 0


def test_a_folder_without_a_ledger_of_one_run_is_an_error(tmp_path: Path, shards: str) -> None:
    with pytest.raises(sp.SavableError, match="no ledger"):
        LedgerFiles(tmp_path)
    (tmp_path / "0-rank.ledger").write_bytes(b"not a ledger")
    with pytest.raises(sp.SavableError, match="not a ledger of this version"):
        LedgerFiles(tmp_path)
    with pytest.raises(ValueError, match="ledger= does not apply"):
        loader(partial(toy_pipeline, shards), tmp_path, on_iter="restart")
    for seed in (1, 2):
        next_hashes(sp.SavableLoader(partial(toy_pipeline, shards), seed=seed, ledger=tmp_path / f"run{seed}"), 1)
        shutil.copytree(tmp_path / f"run{seed}", tmp_path / "two", dirs_exist_ok=True)
    with pytest.raises(sp.SavableError, match="ledgers of several runs"):
        LedgerFiles(tmp_path / "two")


# The commands.


def test_seen_returns_each_time_that_a_sample_was_yielded(shards: str, folder: Path) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.TarShardReader(shards, lane, epochs=1, shuffle=False), size=4)

    with loader(pipeline, folder) as own:
        next_hashes(own, 1000)
        next_hashes(own, 1)
    shown = CliRunner().invoke(app, ["ledger", "find", str(folder), "s000000", "s000005"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines() == [
        "s000000: epoch 0, slot 0, step 0, rank 0 of 1",
        "s000000: epoch 1, slot 0, step 0, rank 0 of 1",
        "s000005: epoch 0, slot 1, step 1, rank 0 of 1",
    ]
    shown = CliRunner().invoke(app, ["ledger", "find", str(folder), "nothing"])
    assert (shown.exit_code, shown.output) == (1, "nothing: no sample has this key\n")


PIPELINE = """
import savable_pipeline as sp
from savable_pipeline import custom
from tests.support.toy_pipelines import toy_pipeline

def pipeline(lane):
    return toy_pipeline({shards!r}, lane)
"""


def test_batch_writes_a_page_and_the_batch(shards: str, folder: Path, tmp_path: Path) -> None:
    import torch

    own = loader(partial(toy_pipeline, shards), folder)
    batches = [batch for _, batch in zip(range(15), own, strict=False)]
    file = tmp_path / "train_ledger.py"
    file.write_text(PIPELINE.format(shards=shards))
    command = ["ledger", "batch", str(folder), f"{file}:pipeline", "--slot", "14"]
    targets = [str(tmp_path / "page.html"), str(tmp_path / "batch.pt")]
    shown = CliRunner().invoke(app, [*command, "-o", targets[0], "--save", targets[1]])
    assert shown.exit_code == 0, shown.output
    assert digest(torch.load(targets[1], weights_only=False)) == digest(batches[14])
    assert "epoch 0, slot 14" in Path(targets[0]).read_text()
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 2 and "nothing to write" in shown.output


# Together with what else a run may do.


class Ids(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"], "drawn": rng.random()}


def growing(folder: Path, epochs: int | None, lane: sp.Lane) -> custom.Stage:
    sources = {
        name: sp.TarShardReader(folder / name, lane, block_size=2, epochs=epochs, subset=(0.0, 0.9)) for name in "ab"
    }
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(sp.Blend(sources, weights={"a": 2, "b": 1}), size=5), Ids()), size=2)


@pytest.mark.parametrize("epochs", [1, None])
def test_batches_before_and_after_added_shards_can_be_rebuilt(tmp_path: Path, folder: Path, epochs: int | None) -> None:
    """Also those of epochs that begin later in the same start, of which a lane has no state in the ledger."""
    data, source = tmp_path / "now", tmp_path / "all"
    write_numbered_shards(source, [30, 30, 30, 30, 30])

    def add(shard: int, *names: str) -> None:
        for name in names:
            (data / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(source / f"{shard:04d}.tar", data / name)

    add(0, "a", "b")
    add(1, "a", "b")
    given: dict[tuple[int, int], str] = {}
    lengths: list[int] = []
    state = None
    pipeline = partial(growing, data, epochs)
    for joining in (None, ("a",), ("a", "b")):
        if joining is not None:
            add(1 + len(lengths), *joining)
        with sp.SavableLoader(pipeline, seed=3, lanes=4, ledger=folder, tail="pad" if epochs else "stop") as own:
            if state is not None:
                own.load_state_dict(state, allow="shards")
            for batches in [own, own, islice(own, 3)] if epochs else [islice(own, 160)]:
                for batch in batches:
                    given[own.epoch, own.trace().slot] = digest(batch)
            state = own.state_dict()
        lengths.append(len(given))
    ledger = LedgerFiles(folder)
    growth = list(ledger.batches())[-1].facts.growth
    assert growth["a"][-1][1] == 4 and set(growth) == {"a", "b"}
    for epoch, slot in random.Random(1).sample(sorted(given), 12):
        assert digest(rebuild_batch(pipeline, ledger, epoch, slot).batch) == given[epoch, slot], (epoch, slot)


def test_with_epoch_slots_the_slot_numbers_continue(shards: str, folder: Path) -> None:
    pipeline = partial(toy_pipeline, shards)
    given: list[str] = []
    with loader(pipeline, folder, epoch_slots=24) as own:
        for _ in range(2):
            given += next_hashes(own, 1000)
        given += next_hashes(own, 5)
        state = own.state_dict()
    with loader(pipeline, folder, epoch_slots=24) as own:
        own.load_state_dict(state)
        given += next_hashes(own, 1000)
    ledger = LedgerFiles(folder)
    assert sorted(kept(ledger)) == [(0, slot) for slot in range(72)]
    for slot in (23, 24, 52, 53):
        assert digest(rebuild_batch(pipeline, ledger, 0, slot).batch) == given[slot]


def test_excluded_samples_are_not_yielded_again(make_shards: Any, folder: Path, tmp_path: Path) -> None:
    shards = str(make_shards([12, 12]))
    (tmp_path / "forget").write_text("s000003\ns000020\n")
    first = loader(partial(toy_pipeline, shards, candidates=3, skip=0), folder)
    next_hashes(first, 30)
    state = first.state_dict()
    first.close()
    pipeline = partial(toy_pipeline, shards, candidates=3, skip=0, exclude=str(tmp_path / "forget"))
    own = loader(pipeline, folder)
    own.load_state_dict(state, allow="exclude")
    expected = next_hashes(own, 60)
    own.close()

    def slots(key: str) -> list[int]:
        shown = CliRunner().invoke(app, ["ledger", "find", str(folder), key]).output
        return [int(slot) for slot in re.findall(r"slot (\d+)", shown)]

    for key in ("s000003", "s000020"):
        assert slots(key) and max(slots(key)) < 30
    assert max(slots("s000004")) >= 30
    for slot in (30, 50, 89):
        assert digest(rebuild_batch(pipeline, LedgerFiles(folder), 0, slot).batch) == expected[slot - 30]
    with pytest.raises(sp.CheckpointMismatchError, match="exclude"):
        rebuild_batch(pipeline, LedgerFiles(folder), 0, 29)


def test_another_run_in_a_ledger_folder_is_rejected_before_it_writes(folder: Path, shards: str) -> None:
    next_hashes(loader(partial(toy_pipeline, shards), folder), 3)
    before = sorted(folder.iterdir())
    other = sp.SavableLoader(partial(toy_pipeline, shards), seed=4, lanes=12, ledger=folder)
    with pytest.raises(sp.SavableError, match="has the ledger of seed=3 and lanes=12, not 4 and 12"):
        next(iter(other))
    assert sorted(folder.iterdir()) == before
    LedgerFiles(folder)
