"""Arrow files without workers: values are read one by one, equal what views give, and a file cut short is an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.files import close_down_to
from savable_pipeline.data.stores import arrow_store
from savable_pipeline.data.stores.arrow_store import ArrowStore
from savable_pipeline.data.stores.opening import open_store
from savable_pipeline.data.stores.shard_files import ShardFiles
from tests.support.processes import run_forked

ROWS = 12
MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NESTED = pa.struct([("a", pa.uint8()), ("b", pa.list_(pa.binary())), ("c", pa.list_(pa.string())), ("d", pa.bool_())])


def every_type() -> pa.Table:
    rows = range(ROWS)
    image = [None if n == 3 else {"bytes": b"\xff\xd8\xff" + bytes([n]), "path": f"{n}.jpg"} for n in rows]
    return pa.table(
        {
            "txt": [f"text {n}" if n % 3 else None for n in rows],
            "big": pa.array([b"x" * n for n in rows], pa.large_binary()),
            "id": pa.array([n if n % 4 else None for n in rows], pa.int16()),
            "ids": pa.array([None if n == 5 else [*range(n), None] for n in rows], pa.list_(pa.int32())),
            "deep": pa.array([[[1.5 * n, None], [], None] for n in rows], pa.large_list(pa.list_(pa.float64()))),
            "pair": pa.array([[n, n + 1] for n in rows], pa.list_(pa.int64(), 2)),
            "mixed": pa.array([{"a": n, "b": [b"q" * n], "c": [f"s{n}"], "d": n % 2 == 0} for n in rows], NESTED),
            "turns": [[{"role": "user", "n": n}] * (n % 3) for n in rows],
            "flags": pa.array([[True, None, False]] * ROWS, pa.list_(pa.bool_())),
            "when": pa.array([86400 * n for n in rows], pa.timestamp("s")),
            "image": pa.array(image, MEDIA),
            "images": pa.array([[{"bytes": b"z" * n, "path": None}] * (n % 3) for n in rows], pa.list_(MEDIA)),
            "map": pa.array([[("k", n)] for n in rows], pa.map_(pa.string(), pa.int32())),
            "viewed": pa.array([f"a rather long text {n}" for n in rows]).cast(pa.string_view()),
            "nothing": pa.nulls(ROWS),
        }
    )


def write(path: Path, table: pa.Table, rows: int, compression: str | None = None) -> Path:
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as file:
        file.write_table(table, max_chunksize=rows)
    return path


def rows_of(store: ArrowStore) -> list[Any]:
    """Of each row its parts and what is null, or the error."""
    found: list[Any] = []
    for row in range(store.entries[0].samples):
        try:
            parts = [(name, store.read(0, row, name)) for name in store.extensions(0, row)]
            found.append((parts, store.nulls(0, row)))
        except sp.ShardError as error:
            found.append(str(error))
    return found


def read(path: Path, *, mapped: bool, columns: tuple[str, ...] | None = None) -> list[Any]:
    """See `rows_of`; the error where the file cannot be opened."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_store, "is_replaced", lambda: mapped)
        try:
            return rows_of(open_store(path, format="arrow", columns=columns, partial=True))
        except sp.ShardError as error:
            return [str(error)]


def by_value(patch: pytest.MonkeyPatch, small: int = 0, whole: int = 0) -> None:
    """From now on batches of more than `small` bytes, and buffers of more than `whole`, are read by value."""
    patch.setattr(arrow_store, "_SMALL_BYTES", small)
    patch.setattr(arrow_store, "_WHOLE_BYTES", whole)


@pytest.mark.parametrize(
    ("small", "whole", "compression", "columns"),
    [
        (0, 0, None, None),
        (0, 100, None, None),
        (1 << 16, 0, None, None),
        (0, 0, None, ("ids", "image")),
        (0, 100, None, ("txt",)),
        (0, 0, "zstd", None),
        (0, 0, "zstd", ("ids", "image")),
    ],
)
def test_values_read_equal_values_viewed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small: int,
    whole: int,
    compression: str | None,
    columns: tuple[str, ...] | None,
) -> None:
    by_value(monkeypatch, small, whole)
    path = write(tmp_path / "a.arrow", every_type(), 5, compression)
    found = read(path, mapped=False, columns=columns)
    assert found == read(path, mapped=True, columns=columns)
    if columns is None:
        assert dict(found[4][0])["mixed"] == b'{"a": 4, "b": ["cXFxcQ=="], "c": ["s4"], "d": true}'
        assert (dict(found[6][0])["ids"], found[5][1]) == (b"[0, 1, 2, 3, 4, 5, null]", ["ids", "nothing"])


def test_damaged_batch_yields_the_same_rows_and_errors_in_each_process(tmp_path: Path) -> None:
    run_forked(read_lies, tmp_path)


def read_lies(folder: Path) -> None:
    """Some 4 bytes of a batch are, in turn, another number; then its rows are read in both ways."""
    path = write(folder / "a.arrow", every_type(), ROWS)
    raw, errors = path.read_bytes(), 0
    with pytest.MonkeyPatch.context() as patch:
        by_value(patch)
        begin = raw.index(b"text 1") - 300
        for i, place in enumerate(range(begin, len(raw) - 4, 292)):
            lie = (b"\xf0\xff\xff\x7e", b"\xff\xff\xff\xff", b"\x80\1\0\0")[i % 3]
            path.write_bytes(raw[:place] + lie + raw[place + 4 :])
            found = read(path, mapped=False)
            assert found == read(path, mapped=True), (place, lie)
            errors += any(isinstance(row, str) for row in found)
    assert errors > 3


class Beginnings(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> bytes:
        return b"".join(sample[part][:9] for part in sample)

    def batch(self, items: list[bytes], rng: sp.Rng) -> list[bytes]:
        return items  # stacking them would import torch


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_file_truncated_during_a_run_without_workers_is_an_error(tmp_path: Path, compression: str) -> None:
    run_forked(cut_under_a_run, tmp_path / "a.arrow", compression)


def cut_under_a_run(path: Path, compression: str) -> None:
    table = pa.table({"bin": [os.urandom(50_000) for _ in range(60)], "ids": [list(range(1000))] * 60})
    write(path, table, 20, None if compression == "none" else compression)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(custom.ArrowReader(path, lane, shuffle=False), Beginnings()), size=2)

    with sp.SavableLoader(pipeline, seed=0, lanes=1, num_workers=0) as loader:
        next(loader)
        os.truncate(path, path.stat().st_size // 10)
        with pytest.raises(sp.ShardError, match=rf"{path}: .* (cut short|overwritten)") as caught:
            for _ in range(60):
                next(loader)
        assert caught.value.reason == "changed shard"


def test_rows_of_a_truncated_file_are_right_or_a_clear_error(tmp_path: Path) -> None:
    run_forked(cut_anywhere, tmp_path)


def cut_anywhere(folder: Path) -> None:
    path = write(folder / "a.arrow", every_type(), 5)
    whole, raw, errors = read(path, mapped=False), path.read_bytes(), 0
    with pytest.MonkeyPatch.context() as patch:
        by_value(patch)
        for size in range(0, len(raw), 1193):
            path.write_bytes(raw)
            store = open_store(path, format="arrow", partial=True)
            assert store.extensions(0, 0)  # the first batch is open
            os.truncate(path, size)
            for row, right in zip(rows_of(store), whole, strict=True):
                assert row == right or (str(path) in row and "The file was cut short" in row), (size, row)
                errors += row != right
    assert errors > 15


def test_only_requested_rows_of_a_large_batch_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [{"bytes": bytes([n]) * 100_000, "path": f"{n}.jpg"} for n in range(100)]
    path = write(tmp_path / "a.arrow", pa.table({"image": images, "ids": [list(range(5000))] * 100}), 100)
    store = open_store(path, format="arrow")
    store.schema(0)
    sizes = []
    one, into = ShardFiles.read, ShardFiles.read_into

    def counted(self: ShardFiles, shard: int, offset: int, size: int) -> bytes:
        sizes.append(size)
        return one(self, shard, offset, size)

    def counted_into(self: ShardFiles, array: Any, shard: int, offset: int) -> None:
        sizes.append(len(array))
        into(self, array, shard, offset)

    monkeypatch.setattr(ShardFiles, "read", counted)
    monkeypatch.setattr(ShardFiles, "read_into", counted_into)
    assert store.read(0, 70, "jpg") == b"\x46" * 100_000
    assert store.read(0, 30, "ids").startswith(b"[0, 1, 2")
    assert sum(sizes) < 600_000 and store.blocks.bytes < 100_000


def test_closed_file_is_reopened_and_a_replaced_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_value(monkeypatch)
    path = write(tmp_path / "a.arrow", every_type(), 5)
    store = open_store(path, format="arrow")
    assert store.read(0, 1, "txt") == b"text 1"
    close_down_to(0)
    assert store.read(0, 2, "txt") == b"text 2"
    close_down_to(0)
    write(tmp_path / "b.arrow", every_type(), 5).replace(path)
    with pytest.raises(sp.ShardError, match=r"a\.arrow: it was replaced while this run read it"):
        store.read(0, 4, "txt")


class Maps(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> bytes:
        assert sample["txt"]
        return b"mapped" if sample.shard in Path("/proc/self/maps").read_text() else b"read"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of what is mapped")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_replaceable_workers_map_files(tmp_path: Path, num_workers: int) -> None:
    write(tmp_path / "only here.arrow", pa.table({"txt": ["x" * 100_000] * 20}), 10)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        reader = custom.ArrowReader(tmp_path, lane, shuffle=False)
        return sp.Batcher(sp.Encode(reader, Maps()), size=20)

    with sp.SavableLoader(
        pipeline, seed=0, lanes=1, num_workers=num_workers, workers=sp.Workers(start_method="fork")
    ) as loader:
        assert {bytes(row) for row in next(loader)} == {b"mapped" if num_workers else b"read"}
        loader.trace()
    assert "only here.arrow" not in Path("/proc/self/maps").read_text()
