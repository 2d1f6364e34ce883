"""The reader: a lane's refs, from any position, for as many epochs as asked; the same subset in any format."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.data.shards.selection import without_ending
from savable_pipeline.stages.readers.reader import ReaderSettings
from tests.conftest import MakeShards, write_tar
from tests.support.draws import few_examples
from tests.support.toy_dataset import NumberDataset, dataset_key, drain, index_epoch_pairs, readers, take_refs

SIZES = st.lists(st.one_of(st.integers(0, 40), st.sampled_from([0, 1])), min_size=1, max_size=12).filter(sum)
SETTINGS = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "block_size": st.integers(1, 10),
        "window": st.one_of(st.none(), st.integers(1, 8)),
    }
)


@few_examples(40)
@given(SIZES, st.integers(1, 30), st.integers(1, 3), st.integers(0, 5), SETTINGS)
def test_the_lanes_of_an_epoch_have_every_sample_once(
    sizes: list[int], lanes: int, epochs: int, seed: int, how: dict[str, Any]
) -> None:
    make = readers(sizes, lanes=lanes, seed=seed, epochs=epochs, **how)
    given = [ref for lane in range(lanes) for ref in drain(make(lane), 7)]
    assert sorted(given) == sorted((index, epoch) for epoch in range(epochs) for index in range(sum(sizes)))


@few_examples(25)
@given(SIZES, st.integers(1, 8), SETTINGS, st.lists(st.integers(1, 50), min_size=1), st.data())
def test_refs_do_not_depend_on_chunk_size_or_restore(
    sizes: list[int], lanes: int, how: dict[str, Any], chunks: list[int], data: st.DataObject
) -> None:
    make = readers(sizes, lanes=lanes, **how)
    lane = data.draw(st.integers(0, lanes - 1))
    expected = take_refs(make(lane), 200, chunk=1)
    reader, given = make(lane), []
    for chunk in itertools.islice(itertools.cycle(chunks), 200):
        if len(given) + chunk > 200:
            break
        given += index_epoch_pairs(reader.take(chunk))
        if data.draw(st.booleans()):
            state = reader.save_state()
            reader = make(lane)
            reader.restore_state(state)
    assert given == expected[: len(given)]


def test_unshuffled_lanes_read_blocks_of_file_order_in_turn() -> None:
    make = readers([4, 1, 6], lanes=2, epochs=2, shuffle=False, block_size=2)
    assert drain(make(0)) == [(i, epoch) for epoch in (0, 1) for i in (0, 1, 4, 5, 8, 9)]
    assert drain(make(1)) == [(i, epoch) for epoch in (0, 1) for i in (2, 3, 6, 7, 10)]


def test_reader_is_endless_without_epochs_and_finite_with_epochs() -> None:
    assert {epoch for _, epoch in take_refs(readers([5])(0), 5000)} == set(range(1000))
    assert readers([5])(0).info.endless
    finite = readers([5], epochs=3)(0)
    assert not finite.info.endless
    assert len(drain(finite)) == 15
    assert len(finite.take(1)) == 0
    with pytest.raises(StopIteration):
        next(finite)


def test_a_lane_of_a_dataset_smaller_than_the_lanes_waits_for_its_turn() -> None:
    make = readers([1, 1], lanes=5, block_size=1)
    given = [take_refs(make(lane), 4) for lane in range(5)]
    assert all(len({epoch for _, epoch in refs}) == 4 for refs in given)
    by_epoch = sorted((epoch, index) for refs in given for index, epoch in refs if epoch < 9)
    assert by_epoch == [(epoch, index) for epoch in range(9) for index in (0, 1)]


def test_next_run_over_the_data_starts_with_the_next_epoch() -> None:
    shared: dict[Any, Any] = {dataset_key("numbers"): NumberDataset([5])}
    second = sp.TarShardReader("numbers", sp.Lane(0, 1, 0, epoch=1, worker=WorkerContext(shared=shared)), epochs=2)
    refs = drain(second)
    assert {epoch for _, epoch in refs} == {2, 3}
    assert refs == drain(readers([5], epochs=4)(0))[10:]


@few_examples(15)
@given(st.integers(8, 40), st.integers(2, 6), st.integers(1, 6), st.integers(0, 3))
def test_a_lane_reads_within_two_windows_of_shards_at_a_time(shards: int, window: int, lanes: int, epoch: int) -> None:
    if shards < 2 * window:
        return
    size = 30
    reader = readers([size] * shards, lanes=lanes, window=window, epochs=epoch + 1, block_size=4)(0)
    refs = [index // size for index, e in drain(reader) if e == epoch]
    within = window * size // 2  # so many refs in a row touch one window, or at its border two
    for start in range(0, len(refs), within):
        assert len(set(refs[start : start + within])) <= 2 * window


def test_upcoming_refs_are_announced_once_also_in_batches() -> None:
    """It wants to be told 30 refs ahead, then only what is taken, in chunks of 2,048, then again."""
    told: list[int] = []
    dataset = NumberDataset([5000])
    dataset.prefetch = lambda refs: told.extend(refs["index"].tolist())  # type: ignore[method-assign]
    shared: dict[Any, Any] = {dataset_key("numbers"): dataset}
    reader = sp.TarShardReader("numbers", sp.Lane(worker=WorkerContext(shared=shared)), epochs=1, shuffle=False)
    for ahead, taken, expected in [(30, 60, range(90)), (0, 60, range(60, 2108)), (30, 1990, range(2108, 2168))]:
        dataset.prefetch_refs = ahead
        told.clear()
        reader.take(taken)
        assert told == list(expected), ahead
    reader.restore_state({**reader.save_state(), "position": 400})
    told.clear()
    dataset.prefetch_refs = 30
    reader.take(1)
    assert told == list(range(400, 460))


def test_next_on_the_stage_returns_samples(make_shards: Any) -> None:
    reader = sp.TarShardReader(str(make_shards([3, 2])), sp.Lane(), shuffle=False, epochs=1)
    samples = list(reader)
    assert [sample.json()["id"] for sample in samples] == [0, 1, 2, 3, 4]
    assert reader.ref == (4, 0, 0)
    assert reader.fetch(reader.ref).json() == reader.fetch(samples[4].ref).json() == {"id": 4}
    assert (reader.info.population, reader.info.depth, reader.info.encoder) == (5, 0, None)


def test_readers_of_new_equal_lists_do_not_mix_up_shards(make_shards: Any) -> None:
    folders = [make_shards([2], "one"), make_shards([3], "two")]
    lane = sp.Lane()
    counts = [sp.TarShardReader((folder / name for name in ["0000.tar"]), lane).population for folder in folders]
    assert counts == [2, 3]


def test_shards_are_indexed_once_for_all_lanes_of_a_process(make_shards: Any) -> None:
    shared: dict[Any, Any] = {}
    folder = make_shards([2])
    lanes = [sp.TarShardReader(folder, sp.Lane(i, 2, worker=WorkerContext(shared=shared))) for i in range(2)]
    assert lanes[0].dataset is lanes[1].dataset


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("lanes", "rows"), [(1, 1), (4, 2), (7, 3)])
def test_fraction_of_an_epoch_is_the_start_of_its_order_over_all_lanes(shuffle: bool, lanes: int, rows: int) -> None:
    def given(epochs: float, in_pass: int = 0) -> tuple[Counter[tuple[int, int]], int | None]:
        make = readers([30, 10], lanes=lanes, shuffle=shuffle, epochs=epochs)
        found: Counter[tuple[int, int]] = Counter()
        counted = 0
        for number in range(lanes):
            reader = make(number)
            reader.set_batch_size(rows, aligned=True)
            refs = drain(reader, 3)
            found.update(refs)
            assert reader.count_of(number, 0) == len(refs)
            counted += len(refs)
        return found, counted

    whole, total = given(3)
    part, count = given(2.25)
    assert (total, count) == (120, 90)
    assert part <= whole and set(part.values()) == {1}
    assert Counter(epoch for _, epoch in part.elements()) == {0: 40, 1: 40, 2: 10}
    if not shuffle:
        assert {index for index, epoch in part if epoch == 2} == set(range(10))
    assert given(2.0)[0] == given(2)[0]


def test_dataset_without_samples_is_an_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("README", b"")])
    with pytest.raises(sp.ShardError, match="no sample in 1 shard"):
        sp.TarShardReader(tmp_path, sp.Lane())


def test_a_position_that_the_lane_does_not_have_is_a_mismatch() -> None:
    reader = readers([5])(0)
    with pytest.raises(sp.CheckpointMismatchError, match="is at sample 6 of 5"):
        reader.restore_state({"epoch": 0, "position": 6, "lane": {}})
    with pytest.raises(sp.CheckpointMismatchError, match="no state of TarShardReader"):
        reader.restore_state({"refs": b""})


def test_named_random_numbers_of_the_lane_are_saved_with_the_reader() -> None:
    make = readers([5])
    before, after = make(0), make(0)
    expected = [before.lane.rng("mine").random() for _ in range(5)]
    fresh = make(0)
    assert [fresh.lane.rng("mine").random() for _ in range(2)] == expected[:2]
    after.restore_state(fresh.save_state())
    assert [after.lane.rng("mine").random() for _ in range(3)] == expected[2:]


def test_settings_name_what_changes_the_order(make_shards: Any) -> None:
    reader = sp.TarShardReader(str(make_shards([2, 1])), sp.Lane(), block_size=4)
    settings = reader.settings()
    assert [settings[name] for name in ("epochs", "shuffle", "block_size", "window")] == [None, True, 4, 128]
    assert [(name, samples) for name, samples, _ in settings["shards"]] == [("0000.tar", 2), ("0001.tar", 1)]


def test_epoch_of_a_billion_samples_starts_instantly_at_any_position() -> None:
    make = readers([10**6] * 1000, lanes=3)
    reader = make(1)
    reader.restore_state({"epoch": 5, "position": 333_000_000, "lane": {}})
    refs = reader.take(2000)
    assert len(np.unique(refs["index"])) == 2000


# Shares of a finite pass, and file order.


def batch_sizes(count: int, lanes: int, rows: int, *, pad: bool = False, **settings: Any) -> list[list[int]]:
    """Of each lane, how many samples its batches hold in one pass."""
    sizes = []
    for number in range(lanes):
        shared: dict[Any, Any] = {dataset_key("numbers"): NumberDataset([count])}
        lane = sp.Lane(number, lanes, pad=pad, worker=WorkerContext(shared=shared))
        reader = sp.TarShardReader("numbers", lane, epochs=1, **settings)
        reader.set_batch_size(rows, aligned=True)
        given = len(drain(reader))
        sizes.append([rows] * (given // rows) + [given % rows] * bool(given % rows))
    return sizes


@pytest.mark.parametrize("shuffle", [True, False])
def test_spans_of_a_finite_epoch_are_whole_batches(shuffle: bool) -> None:
    assert batch_sizes(480, 12, 8, shuffle=shuffle) == [[8] * 5] * 12
    assert batch_sizes(500, 12, 8, shuffle=shuffle)[:3] == [[8] * 6, [8] * 6, [8] * 5 + [4]]
    assert batch_sizes(400, 96, 8, pad=True, shuffle=shuffle) == [[8]] * 50 + [[]] * 46


def test_span_smaller_than_a_batch_is_a_smaller_batch_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert batch_sizes(480, 96, 8) == [[5]] * 96
    assert "480 samples are 60 batches of 8, too few for 96 lanes" in caplog.text
    assert "Start with lanes=60 or fewer" in caplog.text


def test_epochs_in_file_order_are_equal_and_slots_follow_file_order() -> None:
    def slots(lanes: int, epoch: int) -> list[list[int]]:
        lists = []
        for number in range(lanes):
            shared: dict[Any, Any] = {dataset_key("numbers"): NumberDataset([10, 9])}
            reader = sp.TarShardReader(
                "numbers",
                sp.Lane(number, lanes, epoch=epoch, worker=WorkerContext(shared=shared)),
                epochs=2,
                shuffle=False,
            )
            reader.set_batch_size(3, aligned=True)
            lists.append([index for index, _ in drain(reader)])
        batches = [[share[i : i + 3] for i in range(0, len(share), 3)] for share in lists]
        return [batch for step in itertools.zip_longest(*batches) for batch in step if batch]

    assert slots(4, 0) == slots(4, 5)
    first_epoch = [index for batch in slots(1, 0) for index in batch][:19]
    assert first_epoch == list(range(19))
    assert [index for batch in slots(4, 0)[:6] for index in batch] == list(range(18))


def test_spans_of_an_epoch_stay_when_the_batch_size_changes() -> None:
    make = readers([100], lanes=4, epochs=1)
    given, states = [], []
    for number in range(4):
        reader = make(number)
        reader.set_batch_size(7, aligned=True)
        given += [index for index, _ in take_refs(reader, 9)]
        states.append(reader.save_state())
    for number, state in enumerate(states):
        again = make(number)
        again.set_batch_size(5, aligned=True)
        again.restore_state(state)
        given += [index for index, _ in drain(again)]
    assert sorted(given) == list(range(100))


def test_remainders_of_many_sources_go_to_different_lanes() -> None:
    sizes = []
    for number in range(10):
        shared: dict[Any, Any] = {dataset_key("numbers"): NumberDataset([25])}
        lane = sp.Lane(number, 10, worker=WorkerContext(shared=shared))
        sources = {f"s{i}": sp.TarShardReader("numbers", lane, epochs=1) for i in range(6)}
        sizes.append(len(drain(sp.Blend(sources, weights=dict.fromkeys(sources, 1)))))
    assert sum(sizes) == 6 * 25
    assert max(sizes) - min(sizes) <= 5 and min(sizes) >= 12  # 5 samples of 25 are left over, 6 times


@pytest.mark.parametrize(
    ("epochs", "fault"),
    [
        (0, "epochs must be above 0 or None, not 0"),
        (-1, "epochs must be above 0 or None, not -1"),
        (float("inf"), "epochs must be above 0 or None, not inf"),
        (0.1, r"epochs=0\.1 of 2 samples is less than one sample"),
    ],
)
def test_error_about_epochs_names_its_reader(tmp_path: Path, epochs: float, fault: str) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n{}\n")
    with pytest.raises(ValueError, match=f"^JsonlReader: {fault}"):
        custom.JsonlReader(tmp_path, sp.Lane(), epochs=epochs)


@pytest.mark.parametrize(
    "reader", [sp.TarShardReader, custom.ParquetReader, custom.ArrowReader, custom.JsonlReader, custom.TokenReader]
)
def test_every_reader_has_the_common_settings_with_their_defaults(reader: Any, tmp_path: Path) -> None:
    usual, shown = (inspect.signature(each).parameters for each in (custom.RecordReader, reader))
    common = [name for name in usual if name not in ("store", "lane")]
    assert common == list(ReaderSettings.__annotations__)
    assert [str(shown[name]) for name in common] == [str(usual[name]) for name in common]
    with pytest.raises(TypeError, match="shufle"):
        reader(tmp_path, sp.Lane(), shufle=True)
    with pytest.raises(ValueError, match=f"{reader.__name__}: window must be at least 1, not 0"):
        reader(tmp_path, sp.Lane(), window=0)


def test_users_reader_shows_its_own_settings() -> None:
    class Mine(sp.TarShardReader):
        def __init__(self, lane: sp.Lane, **more: Any) -> None:
            super().__init__("mine/", lane, **more)

    assert list(inspect.signature(Mine).parameters) == ["lane", "more"]


def test_reader_without_a_lane_or_for_other_files_says_what_to_write(make_shards: MakeShards, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"needs a lane after 'x', not None. Use sp\.read\('x'\)"):
        sp.TarShardReader("x")  # type: ignore[call-arg]
    (tmp_path / "chat.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(sp.ShardError, match=r"a file of the kind jsonl, not tar\. sp\.read\(…\) reads any kind"):
        sp.TarShardReader(str(tmp_path / "chat.jsonl"), sp.Lane())
    with pytest.raises(AttributeError, match=r"no attribute 'shuffle': sp\.read\(…\)\.shuffle\(…\) makes a chain"):
        sp.TarShardReader(str(make_shards([3])), sp.Lane()).shuffle(100)  # type: ignore[attr-defined]


ROWS = {"a/train.001": 40, "a/train.002": 25, "b.x/0": 30}


def write_kind(folder: Path, kind: str) -> None:
    """The same rows in files of the same names, but for the ending."""
    for name, rows in ROWS.items():
        path = folder / f"{name}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        named = [f"{name}-{row:02d}" for row in range(rows)]
        table = pa.table({"id": named})
        if kind == "tar":
            write_tar(path, [(f"{row:02d}.id", key.encode()) for row, key in enumerate(named)])
        elif kind == "parquet":
            pq.write_table(table, path)
        elif kind == "arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        else:
            path.write_text("".join(f'{{"id": "{key}"}}\n' for key in named))


@pytest.mark.parametrize("subset", [0.3, (0.5, 0.75), 17])
def test_the_same_shards_in_any_format_have_the_same_subset(tmp_path: Path, subset: Any) -> None:
    readers = {
        "tar": sp.TarShardReader,
        "parquet": custom.ParquetReader,
        "arrow": custom.ArrowReader,
        "jsonl": custom.JsonlReader,
        "ndjson": custom.JsonlReader,
    }
    found = {}
    for kind, reader in readers.items():
        write_kind(tmp_path / kind, kind)
        samples = reader(tmp_path / kind, sp.Lane(), subset=subset, shuffle=False, epochs=1)  # type: ignore[operator]
        found[kind] = [sample["id"].decode() for sample in samples]
    assert len(found["tar"]) in (17, *range(23, 32))
    assert all(keys == found["tar"] for keys in found.values()), found


@pytest.mark.parametrize(
    ("name", "endings", "expected"),
    [
        ("a/train.001.tar", (".tar",), "a/train.001"),
        ("train.001.tar.gz", (".tar", ".tar.gz"), "train.001"),
        ("x.jsonl.gz", (".jsonl", ".jsonl.gz"), "x"),
        ("x.jsonl.gz", (".jsonl",), "x.jsonl.gz"),
        ("a.tar/b", (".tar",), "a.tar/b"),
        ("all", (), "all"),
    ],
)
def test_extension_belongs_to_the_format(name: str, endings: tuple[str, ...], expected: str) -> None:
    assert without_ending(name, endings) == expected
