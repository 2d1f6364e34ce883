"""Folders of MDS and LitData read in place: the parts that conversion makes, each group unpacked once, and damage."""

from __future__ import annotations

import json
import os
import struct
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.stores import shard_files
from savable_pipeline.data.stores.grouped_store import DecodedBlocks
from savable_pipeline.data.stores.opening import find_source, open_store
from savable_pipeline.data.stores.record_folder_store import RecordFolderStore
from tests.support.record_cases import CASES, U32, comparable_parts, raw_and_packed
from tests.support.toy_files import jpeg
from tests.support.toy_records import (
    LEAF,
    arrow_rows,
    write_arrow_litdata,
    write_captioned_litdata,
    write_captioned_mds,
    write_litdata,
    write_mds,
)

GOLDEN = json.loads(Path(__file__).with_name("golden_records.json").read_text())  # what conversion wrote of them


def store_of(folder: Path, **settings: Any) -> RecordFolderStore:
    store = open_store(folder, **settings)
    assert isinstance(store, RecordFolderStore)
    return store


def reader_of(folder: Path, lane: sp.Lane, **settings: Any) -> custom.SampleStage:
    return {"mds": custom.MdsReader, "litdata": custom.LitDataReader}[find_source(folder).format.name](
        folder, lane, **settings
    )


@pytest.mark.parametrize("case", CASES)
def test_store_returns_the_parts_and_bytes_of_a_conversion(tmp_path: Path, case: str) -> None:
    store = store_of(CASES[case](tmp_path / "in"))
    places = [(shard, row) for shard in store.listed_order() for row in range(store.entries[shard].samples)]
    rejected = {int(key) for _, key, _ in GOLDEN[case]["rejected"]}
    found = {}
    for number, (shard, row) in enumerate(places):
        if number in rejected:
            with pytest.raises(sp.ShardError, match=rf": row {row}: ") as caught:
                store.extensions(shard, row)
            assert caught.value.reason in [reason for _, key, reason in GOLDEN[case]["rejected"] if int(key) == number]
            continue
        extensions = store.extensions(shard, row)
        assert extensions == sorted(extensions)
        parts = {f"{number:09d}.{each}": store.read(shard, row, each) for each in extensions}
        found |= comparable_parts(parts)
        assert store.sizes(shard, row) == {each: len(store.read(shard, row, each)) for each in extensions}
    assert found == GOLDEN[case]["parts"]


def test_key_of_a_sample_is_its_position_or_a_field(tmp_path: Path) -> None:
    source = write_captioned_mds(tmp_path / "in")
    lane = sp.Lane()
    assert next(custom.MdsReader(source, lane, shuffle=False)).key == "shard.00000.mds:0"
    assert next(custom.MdsReader(source, lane, shuffle=False, key="caption")).key == "no. 0"
    with pytest.raises(sp.ShardError, match="row 0: 'nothing' of key= is missing or null"):
        _ = next(custom.MdsReader(source, lane, shuffle=False, key="nothing")).key


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (
            lambda path: write_mds(path, {"x": "pkl"}, [[b""]]),
            "index.json: the column 'x' has pickles, which could run code",
        ),
        (lambda path: write_litdata(path, ["pickle"], LEAF, [[b""]]), "index.json: the format pickle has pickles"),
        (
            lambda path: write_litdata(path, ["str"], LEAF, [[b""]], encryption={}),
            "index.json: encryption is not supported",
        ),
    ],
)
def test_unsupported_encodings_are_rejected_by_name_at_opening(
    tmp_path: Path, folder: Callable[[Path], Path], message: str
) -> None:
    source = folder(tmp_path / "in")
    for opened in (lambda: reader_of(source, sp.Lane()), lambda: sp.open_dataset(source)):
        with pytest.raises(sp.ShardError, match=message):
            opened()


def test_damaged_records_are_errors_or_skipped_and_counted(tmp_path: Path) -> None:
    source = CASES["damaged columns"](tmp_path / "in")
    with pytest.raises(
        sp.ShardError, match=r"shard\.00000\.mds: row 1: damaged record: a: 7 bytes for float32"
    ) as caught:
        [list(sample) for sample in custom.MdsReader(source, sp.Lane(), shuffle=False, epochs=1)]
    assert caught.value.reason == "damaged record"

    class Parts(sp.TaskEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> list[str]:
            return list(sample)

    stage = sp.Encode(custom.MdsReader(source, sp.Lane(), epochs=1, on_error="skip"), Parts(), on_error="skip")
    assert len(list(stage)) == 3
    skipped = {name: count for name, count in stage.counts.items() if name.startswith("skipped")}
    assert skipped == {"skipped/damaged record": 4}


def test_shard_that_cannot_be_decompressed_is_an_error_per_sample_and_read_once(tmp_path: Path) -> None:
    source = write_captioned_mds(tmp_path / "in", packed="zstd")
    path = source / "shard.00001.mds.zstd"
    path.write_bytes(path.read_bytes()[:20] + bytes(path.stat().st_size - 20))
    store = store_of(source)
    for row in range(4):
        with pytest.raises(sp.ShardError, match=r"shard\.00001\.mds\.zstd: damaged: .*Copy it again") as caught:
            store.extensions(1, row)
        assert caught.value.reason == "damaged shard"
    assert store.extensions(2, 1)


@pytest.mark.parametrize(
    ("write", "groups"),
    [
        (partial(write_captioned_mds, packed="zstd"), 5),
        (partial(write_captioned_litdata, level="chunk"), 5),
        (write_arrow_litdata, 5),
    ],
)
def test_each_group_is_decompressed_once_per_epoch_within_the_cache_limit(
    tmp_path: Path, write: Callable[..., Path], groups: int
) -> None:
    source = write(tmp_path / "in", 20)
    blocks = DecodedBlocks[Any](1 << 14)
    store = store_of(source, blocks=blocks)
    assert store.row_groups(0) is not None and store.decoded_bytes == 1 << 14
    lanes = 3
    readers = [custom.RecordReader(store, sp.Lane(i, lanes, 7), epochs=1) for i in range(lanes)]
    given = Counter[str]()
    while readers:
        for reader in list(readers):
            sample = next(reader, None)
            if sample is None:
                readers.remove(reader)
                continue
            given[sample.json()["caption"]] += 1
            assert blocks.bytes <= blocks.limit
    assert given == Counter({f"no. {i}": 1 for i in range(20)})
    assert blocks.decoded == groups


def test_timestamps_and_durations_are_formatted_without_pandas(tmp_path: Path) -> None:
    """pyarrow itself makes other objects of them where pandas is installed, and none of a nanosecond elsewhere."""
    source = write_arrow_litdata(tmp_path / "in", 2)
    rows = [
        {"at": np.datetime64(1_600_000_000_000_000_000 + i, "ns"), "took": np.timedelta64(20 + i, "ms"), "bytes": b"a"}
        for i in range(2)
    ]
    next(source.glob("*.bin")).write_bytes(arrow_rows(rows))
    data = sp.open_dataset(source)
    assert [sample.json() for sample in data] == [
        {"at": "2020-09-13T12:26:40", "took": 0.02},
        {"at": "2020-09-13T12:26:40.000000001", "took": 0.021},
    ]


def test_uncompressed_shards_are_read_record_by_record(tmp_path: Path) -> None:
    for write in (write_captioned_mds, write_captioned_litdata, partial(write_captioned_litdata, level="sample")):
        source = write(tmp_path / f"{len(list(tmp_path.iterdir()))}")
        store = store_of(source)
        assert store.row_groups(0) is None and store.decoded_bytes == 0
        assert store.read(1, 1, "jpg") == jpeg(5) and store.blocks.decoded == 0


def test_uncompressed_shard_wins_over_its_compressed_copy(tmp_path: Path) -> None:
    store = store_of(raw_and_packed(tmp_path / "in"))
    assert [entry.name for entry in store.entries] == [
        "shard.00000.mds.zstd",
        "shard.00001.mds",
        "shard.00002.mds.zstd",
    ]
    assert [store.row_groups(shard)[0] for shard in range(3)] == [[4], [4], [2]]  # type: ignore[index]


def test_arrow_rows_that_decompress_to_too_much_are_rejected(tmp_path: Path) -> None:
    source = write_arrow_litdata(tmp_path / "in", compression="zstd")
    with pytest.raises(sp.ShardError, match=r"rows in Arrow of .* bytes, more than 256"):
        store_of(source, blocks=DecodedBlocks(1), unpacked_bytes=1 << 8).read(0, 0, "json")


def test_forged_counts_use_no_memory(tmp_path: Path) -> None:
    bombs = {
        "pixels": (["pil"], U32(1 << 31) + U32(1 << 31) + U32(3) + b"RGB" + bytes(9)),
        "wide": (["pil"], U32((1 << 32) - 1) + U32(0) + U32(3) + b"RGB" + bytes(9)),
        "images": (["jpeg_array"], U32((1 << 32) - 1)),
        "shape": (["numpy"], U32(1) + U32(3) + U32(1 << 31) + U32(1 << 31) + U32(4)),
    }
    for name, (formats, data) in bombs.items():
        store = store_of(write_litdata(tmp_path / name, formats, LEAF, [[data]]))
        with pytest.raises(sp.ShardError, match="damaged record") as caught:
            [store.read(0, 0, each) for each in store.extensions(0, 0)]
        assert caught.value.reason == "damaged record", name


@pytest.mark.parametrize("samples", [-1, 5, 1 << 40])
def test_wrong_count_in_the_index_is_an_error(tmp_path: Path, samples: int) -> None:
    for packed in ("", "zstd"):
        source = write_captioned_mds(tmp_path / f"in{packed}", 4, packed=packed)
        change(source, lambda index: index["shards"][0].update(samples=samples))
        with pytest.raises(sp.ShardError, match="Copy it again"):
            store_of(source).extensions(0, 0)


def test_wrong_offsets_are_damage_of_their_records(tmp_path: Path) -> None:
    source = write_captioned_mds(tmp_path / "in", 4)
    path = source / "shard.00000.mds"
    raw = bytearray(path.read_bytes())
    raw[8:12] = U32((1 << 32) - 1)  # where the second record starts
    path.write_bytes(raw)
    store = store_of(source)
    for row in (0, 1):
        with pytest.raises(sp.ShardError, match=f"row {row}: damaged record"):
            store.extensions(0, row)
    assert store.read(0, 2, "jpg") == jpeg(2)


def change(source: Path, act: Callable[[Any], object]) -> None:
    """Write the index.json again."""
    index = json.loads((source / "index.json").read_text())
    act(index)
    time.sleep(0.02)  # a tick of the clock that stamps files
    (source / "index.json").write_text(json.dumps(index))


def rename(index: Any) -> None:
    for shard in index["shards"]:
        shard["column_names"][0] = "text"


@pytest.mark.parametrize("packed", ["", "zstd"])
def test_changed_index_is_a_mismatch(tmp_path: Path, packed: str) -> None:
    source = write_captioned_mds(tmp_path / "in", packed=packed)

    def loader() -> sp.SavableLoader:
        return sp.SavableLoader(lambda lane: custom.MdsReader(source, lane), seed=0, lanes=1)

    with loader() as run:
        assert next(run).json().keys() == {"caption", "label"}
        state = run.state_dict()
    os.utime(source / "index.json")
    with loader() as run:
        run.load_state_dict(state)
    change(source, rename)
    with loader() as run:
        assert next(run).json().keys() == {"text", "label"}
    with loader() as run, pytest.raises(sp.CheckpointMismatchError, match=r"shard\.00000\.mds"):
        run.load_state_dict(state)


@pytest.mark.parametrize("name", ["index.json", "shard.00001.mds.zstd"])
@pytest.mark.parametrize("workers", [0, 1])
def test_file_overwritten_during_a_run_is_an_error(
    tmp_path: Path, name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "_CHECK_S", 0.0)
    monkeypatch.setattr(shard_files, "_CHECK_MULTIPLE", 0)
    source = write_captioned_mds(tmp_path / "in", packed="zstd")

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(custom.MdsReader(source, lane), Captions()), size=1)

    with sp.SavableLoader(pipeline, seed=0, lanes=1, num_workers=workers) as loader:
        for _ in range(20):
            next(loader)
        time.sleep(0.02)
        (source / name).write_bytes((source / name).read_bytes())
        with pytest.raises(sp.ShardError, match=rf"{name}: it was overwritten while") as caught:
            for _ in range(100):
                next(loader)
        assert caught.value.reason == "changed shard"


class Captions(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> str:
        caption: str = sample.json()["caption"]
        return caption


def test_chunks_added_at_the_end_are_read_from_the_next_epoch_on_and_the_state_loads(tmp_path: Path) -> None:
    write_captioned_mds(tmp_path / "in", 20)
    index = (tmp_path / "in/index.json").read_bytes()
    change(tmp_path / "in", lambda index: index["shards"].pop())
    reader = custom.MdsReader(tmp_path / "in", sp.Lane())
    assert len({next(reader).key for _ in range(16)}) == 16
    state = reader.save_state()
    (tmp_path / "in/index.json").write_bytes(index)
    grown = custom.MdsReader(tmp_path / "in", sp.Lane())
    grown.restore_state(state)
    assert "shard.00004.mds:0" in {next(grown).key for _ in range(40)}


def test_wrong_path_is_an_error_with_the_right_one(tmp_path: Path) -> None:
    source = write_captioned_mds(tmp_path / "in")
    with pytest.raises(sp.ShardError, match=r"in: no index\.json\. Name the one folder"):
        custom.MdsReader(source / "shard.00000.mds", sp.Lane())
    with pytest.raises(sp.ShardError, match=r"index\.json: not a readable index of LitData"):
        custom.LitDataReader(source, sp.Lane())
    (source / "shard.00001.mds").unlink()
    with pytest.raises(sp.ShardError, match=r"shard\.00001\.mds: named by index\.json, and not there\. Copy the whole"):
        custom.MdsReader(source, sp.Lane())
    with pytest.raises(ValueError, match=r"columns= does not apply to mds files, only to .*"):
        open_any(source, columns=("a",))


def with_index(folder: Path, change: Callable[[Path], object]) -> Path:
    """A folder of MDS whose index.json is changed so."""
    source = write_captioned_mds(folder)
    change(source / "index.json")
    return source


def piped(index: Path) -> None:
    index.unlink()
    os.mkfifo(index)


def endless(index: Path) -> None:
    index.unlink()
    index.symlink_to("/dev/zero")


def with_name(name: str) -> Callable[[Path], object]:
    return lambda index: index.write_text(index.read_text().replace('"shard.00001.mds"', json.dumps(name)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_name("x" * 5000), "x+: named by index.json, and not there. Copy the whole"),
        (with_name("x" * 300), "x+: named by index.json, and not there. Copy the whole"),
        (piped, "no index.json. Name the one folder that has it"),
        (endless, "no index.json. Name the one folder that has it"),
        (lambda index: index.write_bytes(index.read_bytes()[:-2] + b"\xff"), "not a readable index of MDS"),
        (lambda index: index.write_bytes(b'{"shards": [{"format": "\xff"}]}'), "not a readable index of MDS"),
    ],
    ids=["name of 5000", "name of 300", "pipe", "endless", "cut", "no UTF-8"],
)
def test_invalid_index_is_an_immediate_error(tmp_path: Path, change: Callable[[Path], object], told: str) -> None:
    source = with_index(tmp_path / "in", change)
    with pytest.raises(sp.ShardError, match=told):
        custom.MdsReader(source, sp.Lane())
    with pytest.raises(sp.ShardError):
        sp.open_dataset(source)


def test_pipe_named_like_a_shard_is_damaged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.tar")
    with pytest.raises(sp.ShardError, match=r"0\.tar: not a regular file but a folder, pipe or device"):
        sp.open_dataset(tmp_path)


def test_numbers_that_are_not_finite_are_those_of_python(tmp_path: Path) -> None:
    values = [float("nan"), float("inf"), -float("inf"), 1.5]
    write_mds(tmp_path, {"x": "float64"}, [[struct.pack("<d", value)] for value in values])
    found = [sample.json()["x"] for sample in sp.open_dataset(tmp_path)]
    assert list(map(repr, found)) == list(map(repr, values))
