"""Parquet and Arrow: rows as parts, a bounded cache of row groups, and damage that is named."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import subprocess
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.data.stores.grouped_store import DecodedBlocks
from savable_pipeline.data.stores.opening import open_store
from savable_pipeline.tools.check.dataset_check import check_dataset
from tests.support.draws import scaled_range
from tests.support.processes import run_forked
from tests.support.toy_samples import plain_png

ROWS: list[dict[str, Any]] = [
    {"id": 7, "txt": "a ü", "raw": b"\xff\0", "score": 1.5, "tags": ["x", None], "when": datetime(2026, 1, 2)},
    {"id": None, "txt": "", "raw": None, "score": None, "tags": [], "when": None},
]
PARTS: list[dict[str, bytes]] = [
    {"id": b"7", "txt": "a ü".encode(), "raw": b"\xff\0", "score": b"1.5", "tags": b'["x", null]',
     "when": b'"2026-01-02T00:00:00"'},
    {"txt": b"", "tags": b"[]"},
]  # fmt: skip


def write(path: Path, table: Any, rows: int = 1000, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, **how)
        return path
    with pa.ipc.new_stream(path, table.schema, **how) as stream:
        stream.write_table(table, max_chunksize=rows)
    return path


STORES: dict[str, Any] = {
    "a.parquet": partial(open_store, format="parquet"),
    "a.arrow": partial(open_store, format="arrow"),
}
every_store = pytest.mark.parametrize("name", STORES)


def parts_of(store: Any, row: int) -> dict[str, bytes]:
    return {part: store.read(0, row, part) for part in store.extensions(0, row)}


@every_store
def test_each_column_is_a_part_and_null_is_missing(tmp_path: Path, name: str) -> None:
    store = STORES[name](write(tmp_path / name, pa.Table.from_pylist(ROWS)))
    assert [parts_of(store, row) for row in range(2)] == PARTS
    with pytest.raises(KeyError, match="no part 'raw'; the sample has txt, tags"):
        store.read(0, 1, "raw")
    assert store.read(0, 0, "TXT") == PARTS[0]["txt"]


@every_store
def test_large_strings_and_string_views_are_read_equally(tmp_path: Path, name: str) -> None:
    kinds = [pa.large_string(), *([pa.string_view()] if name == "a.arrow" else []), pa.large_binary()]
    for number, kind in enumerate(kinds):
        table = pa.table({"txt": pa.array(["one", None, "a text that is longer than twelve bytes"]).cast(kind)})
        store = STORES[name](write(tmp_path / str(number) / name, table))
        assert [parts_of(store, row).get("txt") for row in (0, 1)] == [b"one", None]
        assert len(store.read(0, 2, "txt")) == 39


@every_store
def test_images_are_parts_named_by_their_path_or_by_their_bytes(tmp_path: Path, name: str) -> None:
    png = plain_png(2, 3)
    rows = [
        {"image": {"bytes": png, "path": "a/b.v2.PNG"}},
        {"image": {"bytes": png, "path": None}},
        {"image": None},
        {"image": {"bytes": b"?", "path": "folder.d/name"}},
    ]
    write(tmp_path / name, pa.Table.from_pylist(rows))
    reader = {"a.parquet": custom.ParquetReader, "a.arrow": custom.ArrowReader}[name]
    samples = list(reader(tmp_path / name, sp.Lane(), shuffle=False, epochs=1))
    assert [list(sample) for sample in samples] == [["PNG"], ["png"], [], ["bin"]]
    assert samples[1].image().size == samples[0].image("image").size == (2, 3)


@every_store
def test_several_image_columns_are_named_by_column(tmp_path: Path, name: str) -> None:
    image = {"bytes": b"b", "path": "x.jpg"}
    store = STORES[name](write(tmp_path / name, pa.Table.from_pylist([{"left": image, "right": image}])))
    assert store.extensions(0, 0) == ["left.jpg", "right.jpg"]
    assert store.read(0, 0, "left") == store.read(0, 0, "right.jpg") == b"b"


@every_store
def test_columns_key_and_partitions_can_be_chosen(tmp_path: Path, name: str) -> None:
    write(tmp_path / "lang=d%C3%A9" / name, pa.table({"a": [1, 2], "b": [3, 4], "c": ["k", "l"]}))
    store = STORES[name](tmp_path, columns=("b",), key="c")
    assert parts_of(store, 1) == {"b": b"4", "lang": "dé".encode()}
    assert store.key(0, 1) == "l"
    assert STORES[name](tmp_path).key(0, 1) == f"lang=d%C3%A9/{name}:1"
    with pytest.raises(ValueError, match="no column x; it has a, b, c"):
        STORES[name](tmp_path, columns=("x",))


@every_store
@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (pa.array(["a", None]), "is missing or null"),
        (pa.array([b"a", b"\xff"]), "is not UTF-8"),
        (pa.array([1, None]), "is missing or null"),
    ],
)
def test_row_without_a_text_key_is_an_error_that_names_it(tmp_path: Path, name: str, keys: Any, fault: str) -> None:
    store = STORES[name](write(tmp_path / name, pa.table({"k": keys, "b": [3, 4]})), columns=("b",), key="k")
    assert store.key(0, 0) in ("a", "1")
    with pytest.raises(sp.ShardError, match=rf"{name}: row 1: 'k' of key= {fault}\. .*leave out key="):
        store.key(0, 1)


@every_store
def test_a_later_file_without_the_column_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    write(tmp_path / f"0{name}", pa.table({"k": ["a"], "b": [3]}))
    write(tmp_path / name, pa.table({"b": [4]}))
    store = STORES[name](tmp_path, key="k")
    assert store.key(0, 0) == "a"
    for ask in (lambda: store.key(1, 0), lambda: store.read(1, 0, "b")):
        with pytest.raises(sp.ShardError, match=rf"/{name}: no column k; it has b\. Pass") as error:
            ask()
        assert error.value.reason == "missing column"


@pytest.mark.parametrize("unit", [0, 1])  # months, and days with milliseconds
def test_type_without_python_values_is_named(tmp_path: Path, unit: int) -> None:
    sink = io.BytesIO()
    table = pa.table({"span": pa.array([pa.MonthDayNano([1, 2, 3])]), "id": [1]})
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data = bytearray(sink.getvalue())
    units = (at for at in range(8, 400) if data[at] == 2)
    at = next(at for at in units if "interval" in schema_of(data[:at] + bytes([unit]) + data[at + 1 :]))
    data[at] = unit
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(sp.ShardError, match=r"pyarrow does not read a column's type, such as"):
        sp.open_dataset(tmp_path)[0]["id"]
    assert sp.open_dataset(tmp_path, columns=["id"])[0]["id"] == b"1"


def schema_of(data: bytes) -> str:
    """The schema of a stream whose unit of intervals is another; "" where that byte is no unit."""
    try:
        found = str(pa.ipc.open_stream(io.BytesIO(data)).schema)
    except (pa.ArrowException, OSError, ValueError):
        return ""
    return "" if "month_day_nano" in found else found


def test_row_groups_are_decoded_once_and_cached_within_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"txt": ["x" * 1000] * 400}), rows=100)
    whole = DecodedBlocks[Any]()
    store = open_store(path, format="parquet", blocks=whole)
    for row in [*range(400), *range(0, 400, 7)]:
        store.read(0, row, "txt")
    assert whole.decoded == 4
    small = DecodedBlocks[Any](limit=whole.bytes // 4 + 1)
    store = open_store(path, format="parquet", blocks=small)
    for row in [0, 100, 0, 300]:
        store.read(0, row, "txt")
        assert small.bytes <= small.limit
    assert small.decoded == 4


def test_each_row_group_is_decoded_once_per_epoch_over_epochs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"txt": ["x" * 1000] * 400}), rows=100)
    blocks = DecodedBlocks[Any](limit=150_000)
    store: Any = open_store(path, format="parquet", blocks=blocks)
    for _ in range(3):
        order = np.arange(400).reshape(4, 100).T.ravel()  # row 0 of each group, then row 1, …
        store.prefetch(order)
        for row in np.sort(order).tolist():
            store.read(0, row, "txt")
            store.extensions(0, row)
        assert repr(store.awaited) == "AwaitedRows(0 rows of 0 groups)"
    assert blocks.decoded == 12


def test_lanes_of_a_process_share_the_decoded_row_groups(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"id": range(400)}), rows=100)
    shared: dict[Any, Any] = {}
    readers = [
        custom.ParquetReader(path, sp.Lane(i, 4, worker=WorkerContext(shared=shared)), epochs=1) for i in range(4)
    ]
    assert sorted(sample.json("id") for reader in readers for sample in reader) == list(range(400))
    assert readers[0].dataset is readers[3].dataset
    assert readers[0].dataset.store.blocks.decoded == 4  # type: ignore[attr-defined]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def other_footer(path: Path) -> None:
    """A footer whose length is a lie."""
    with path.open("r+b") as file:
        file.seek(-8, io.SEEK_END)
        file.write((1 << 30).to_bytes(4, "little"))


def no_footer(path: Path) -> None:
    path.write_bytes(b"PAR1" + bytes(100))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (cut, "no Parquet footer at its end"),
        (other_footer, "a footer of 1073741824 bytes in "),
        (no_footer, "no Parquet footer"),
    ],
)
def test_a_damaged_footer_is_named_and_under_skip_the_other_files_are_read(
    tmp_path: Path, damage: Any, fault: str
) -> None:
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / name, pa.table({"id": range(10)}))
    damage(tmp_path / "a.parquet")
    with pytest.raises(sp.ShardError, match=rf"a\.parquet: .*{fault}"):
        custom.ParquetReader(tmp_path, sp.Lane())
    reader = custom.ParquetReader(tmp_path, sp.Lane(), epochs=1, on_error="skip")
    assert len(list(reader)) == 10
    assert reader.counts["skipped/rest of a damaged or missing shard"] == 1


class Ids(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json("id")


def flipped(path: Path) -> None:
    """A byte of the second row group's page is another; checksums of pages are in the file."""
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(1).column(0)
    data[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    path.write_bytes(data)


def test_damaged_page_is_reported_and_its_samples_are_counted_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path / "a.parquet", pa.table({"id": range(30)}), 10, write_page_checksum=True, use_dictionary=False
    )
    flipped(path)
    reader = custom.ParquetReader(path, sp.Lane(), shuffle=False, epochs=1, on_error="skip")
    items = sp.Encode(reader, Ids())
    store: Any = reader.dataset.store
    decode, decoded = store.decode, []
    monkeypatch.setattr(store, "decode", lambda *place: decoded.append(place) or decode(*place))
    assert list(items) == [*range(10), *range(20, 30)]
    assert decoded == [(0, 0), (0, 1), (0, 2)]  # the damaged one is not tried again for each of its rows
    assert items.counts["skipped/damaged shard"] == 10
    with pytest.raises(sp.ShardError, match=r"a\.parquet: row group 1: .*CRC.*restore it"):
        reader.dataset.store.read(0, 10, "id")


def test_truncated_arrow_stream_yields_its_whole_batches_with_skip(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"id": range(30)}), 10)
    os.truncate(path, path.stat().st_size - 30)
    with pytest.raises(sp.ShardError, match=r"the message at byte \d+ should end at byte \d+ of \d+"):
        custom.ArrowReader(path, sp.Lane())
    reader = custom.ArrowReader(path, sp.Lane(), epochs=1, shuffle=False, on_error="skip")
    assert [sample.json("id") for sample in reader] == list(range(20))


def test_wrong_offsets_of_an_arrow_batch_are_an_error_not_a_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"txt": ["one", "two", "three"]}))
    data = bytearray(path.read_bytes())
    place = data.index(b"\0\0\0\0\3\0\0\0\6\0\0\0\x0b\0\0\0")
    data[place + 8 : place + 12] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    store = open_store(path, format="arrow")
    assert store.read(0, 0, "txt") == b"one"
    keyed = open_store(path, format="arrow", key="txt")
    assert keyed.key(0, 0) == "one"
    for ask in (lambda: store.read(0, 1, "txt"), lambda: store.extensions(0, 1), lambda: keyed.key(0, 1)):
        with pytest.raises(sp.ShardError, match=r"row 1: row 1 spans bytes 3 to 1073741824 of"):
            ask()


@pytest.mark.parametrize("column", ["image", "viewed", "viewed image"])
def test_wrong_offsets_of_images_or_views_do_not_crash_the_process(tmp_path: Path, column: str) -> None:
    """Whatever lies in its buffers: Arrow itself follows them, and ends the process or reads what is not there."""
    run_forked(read_with_lies, tmp_path, column)


def read_with_lies(folder: Path, column: str) -> None:
    """Each 4 bytes of a batch are, in turn, a very large number; then its rows are read."""
    names = [f"a rather long name {n}.png" for n in range(4)]
    if column == "image":
        table = pa.table({"image": pa.array([{"bytes": b"?", "path": name} for name in names])})
    elif column == "viewed image":
        kind = pa.struct({"bytes": pa.binary_view(), "path": pa.string_view()})
        table = pa.table({"image": pa.array([{"bytes": b"? in its buffer", "path": name} for name in names], kind)})
    else:
        table = pa.table({"viewed": pa.array(names).cast(pa.string_view())})
    path = write(folder / "a.arrow", table)
    raw, errors = path.read_bytes(), 0
    for place in range(raw.index(b"a rather") - 120, len(raw) - 4, 4):
        path.write_bytes(raw[:place] + b"\xf0\xff\xff\x7e" + raw[place + 4 :])
        try:
            store = open_store(path, format="arrow")
            for row in range(4):
                parts_of(store, row)
        except sp.ShardError:
            errors += 1
    assert errors > 5


def test_compressed_arrow_batches_are_decoded_once_into_the_cache(tmp_path: Path) -> None:
    table = pa.table({"txt": ["x" * 1000] * 100})
    path = write(tmp_path / "a.arrow", table, 50, options=pa.ipc.IpcWriteOptions(compression="zstd"))
    store = open_store(path, format="arrow")
    assert {store.read(0, row, "txt") for row in range(100)} == {b"x" * 1000}
    assert store.blocks.decoded == 2 and store.blocks.bytes > 100_000


def test_dictionary_columns_are_rejected_with_a_fix(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"a": pa.array(["x"]).dictionary_encode()}))
    with pytest.raises(sp.ShardError, match=r"dictionary-encoded .*`column\.dictionary_decode\(\)`"):
        open_store(path, format="arrow")


def save_to_disk(folder: Path, names: list[str]) -> None:
    """What HF's `Dataset.save_to_disk` leaves."""
    for number, name in enumerate(names):
        write(folder / name, pa.table({"id": [number]}))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_save_to_disk_folder_is_read_by_its_listed_files(tmp_path: Path) -> None:
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    save_to_disk(tmp_path / "saved", names)
    write(tmp_path / "saved" / "cache-12ab.arrow", pa.table({"other": [1]}))
    write(tmp_path / "saved" / "data-00000-of-00009.arrow", pa.table({"old": [1]}))
    assert [entry.name for entry in open_store(tmp_path / "saved", format="arrow").entries] == names


def test_folder_of_several_splits_is_rejected_unless_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(sp.ShardError, match=r"2 splits, test, train. Read the folder of one, such as train"):
        open_store(tmp_path / "saved", format="arrow")
    write(tmp_path / "cache" / "x-train.arrow", pa.table({"id": [1]}))
    (tmp_path / "cache" / "dataset_info.json").write_text('{"splits": {"train": {}, "test": {}}}')
    with pytest.raises(sp.ShardError, match=r"several splits, .* Name the files of one, such as '\*-train\*\.arrow'"):
        open_store(tmp_path / "cache", format="arrow")


@every_store
def test_flipped_byte_is_at_worst_an_error_or_another_value(tmp_path: Path, name: str) -> None:
    """A byte anywhere: the parts are read, or it is a `ShardError`; nothing else is raised, and no process dies."""
    draw = random.Random(name)
    rows = [
        {"id": n, "txt": f"text {n}", "tags": ["a", str(n)], "image": {"bytes": b"x", "path": "a.jpg"}}
        for n in range(20)
    ]
    right = write(tmp_path / name, pa.Table.from_pylist(rows), 10).read_bytes()
    for number in scaled_range(15):
        data = bytearray(right)
        for _ in range(draw.choice([1, 1, 3])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / name
        path.write_bytes(data)
        try:
            store = STORES[name](path)
            for row in range(store.entries[0].samples):
                parts_of(store, row)
        except sp.ShardError as error:
            assert name in str(error)


@every_store
def test_duplicate_column_names_are_reported_and_others_are_read(tmp_path: Path, name: str) -> None:
    table = pa.table([[1, 2], ["a", "b"], ["c", "d"]], names=["id", "txt", "txt"])
    store = STORES[name](write(tmp_path / name, table))
    told = r"2 columns are named 'txt'\. Rename them, or choose by columns="
    with pytest.raises(sp.ShardError, match=rf"^[^ ]*/{name}: {told}$") as error:
        store.read(0, 0, "id")
    assert error.value.reason == "columns of one name"
    with pytest.raises(sp.ShardError, match=told):
        STORES[name](tmp_path / name, columns=("txt",))
    with pytest.raises(sp.ShardError, match=told):
        STORES[name](tmp_path / name, key="id")
    assert parts_of(STORES[name](tmp_path / name, columns=("id",)), 1) == {"id": b"2"}


def encrypted(path: Path) -> None:
    """A Parquet file with an encrypted column and a footer that anybody can read."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):  # type: ignore[misc, name-defined]
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64encode(key)

    factory = encryption.CryptoFactory(lambda config: Keys())
    how = encryption.EncryptionConfiguration("footer", column_keys={"column": ["b"]}, plaintext_footer=True)
    keys = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    with pq.ParquetWriter(path, SECRET.schema, encryption_properties=keys) as writer:
        writer.write_table(SECRET)


SECRET = pa.table({"a": [1, 2], "b": ["x", "y"]})


def lengthened(path: Path) -> None:
    """One byte behind the footer more: nothing says now that columns are encrypted, and pyarrow aborts."""
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little") + 1
    path.write_bytes(data[:-8] + b"\0" + length.to_bytes(4, "little") + b"PAR1")


@pytest.mark.parametrize(
    ("change", "fault"),
    [(lambda path: None, "encrypted columns. Write the file without encryption"),
     (lengthened, "pyarrow crashed on the footer")],
)  # fmt: skip
def test_file_that_aborts_pyarrow_is_an_error_and_others_are_read(tmp_path: Path, change: Any, fault: str) -> None:
    encrypted(tmp_path / "b.parquet")
    change(tmp_path / "b.parquet")
    write(tmp_path / "a.parquet", SECRET)
    code = "import sys, pyarrow.parquet as pq; pq.read_metadata(sys.argv[1]).row_group(0).column(1)"
    there = subprocess.run([sys.executable, "-c", code, tmp_path / "b.parquet"], capture_output=True, check=False)
    assert there.returncode == -signal.SIGABRT  # as long as pyarrow does so, without being asked for the column
    with pytest.raises(sp.ShardError, match=rf"b\.parquet: {fault}"):
        sp.open_dataset(tmp_path)
    reader = custom.ParquetReader(tmp_path, sp.Lane(), epochs=1, shuffle=False, on_error="skip")
    assert [sample["b"] for sample in reader] == [b"x", b"y"]
    assert [fault in problem.detail for problem in check_dataset(tmp_path, processes=1).problems] == [True]


def test_small_file_that_decompresses_to_too_much_is_rejected_early(tmp_path: Path) -> None:
    """The dictionary has one value of 1 MB, which 20,000 rows repeat: 20 GB, in a file of 300 bytes."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), [bytes(1_000_000)])
    write(tmp_path / "a.parquet", pa.table({"raw": column}), 20_000, compression="zstd", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 1000
    pool = pa.default_memory_pool()
    most = custom.ParquetReader(tmp_path, sp.Lane(), unpacked_bytes=8_000_000)
    before = pool.max_memory()
    with pytest.raises(sp.ShardError, match=r"row group 0: it decodes to more than 8\.0 MB\. .* raise unpacked_byt"):
        next(most)["raw"]
    assert pool.max_memory() - before < 40_000_000
    with pytest.raises(sp.ShardError, match=r"more than \d\.\d kB"):
        next(custom.ParquetReader(tmp_path, sp.Lane(), unpacked_bytes=1000))["raw"]


def test_rows_do_not_depend_on_the_decoding_batch_size(tmp_path: Path) -> None:
    table = pa.table({"txt": [f"{i % 50:0100d}" for i in range(1000)], "id": range(1000)})
    write(tmp_path / "a.parquet", table)
    few = open_store(tmp_path, format="parquet", unpacked_bytes=130_000)
    assert [(few.read(0, i, "txt"), few.read(0, i, "id")) for i in range(1000)] == [
        (txt.encode(), b"%d" % i) for i, txt in enumerate(table["txt"].to_pylist())
    ]


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        sp.open_dataset(tmp_path / "a.parquet")


def test_null_of_a_partition_is_no_part_as_in_pyarrow(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2], "y": ["a", None]})
    pq.write_to_dataset(table, tmp_path, partition_cols=["y"])
    found = {int(sample.json("x")): sample.get("y") for sample in sp.open_dataset(tmp_path)}
    read = pq.read_table(tmp_path).to_pydict()
    assert found == {x: y and y.encode() for x, y in zip(read["x"], read["y"], strict=True)} == {1: b"a", 2: None}
