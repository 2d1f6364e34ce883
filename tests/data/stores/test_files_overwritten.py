"""Files read in place that are overwritten under a run are an error, as tars are: of each format, and of a Join."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.files import close_down_to
from savable_pipeline.data.stores import arrow_store, shard_files
from savable_pipeline.data.stores.opening import open_store
from tests.conftest import write_numbered_shards
from tests.data.stores.test_token_store import write_bin

ROWS = 400
NAMES = [f"row {row:03d}" for row in range(ROWS)]
TABLE = pa.table({"txt": NAMES})


def write_parquet(path: Path) -> None:
    pq.write_table(TABLE, path, row_group_size=10, compression="none", use_dictionary=False)


def write_arrow(path: Path) -> None:
    with pa.ipc.new_file(path, TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=10)


def write_jsonl(path: Path) -> None:
    path.write_text("".join(f'{{"txt": "{name}"}}\n' for name in NAMES))


def write_tokens(path: Path) -> None:
    write_bin(path, [[*name.encode()] for name in NAMES], "uint8", 1)


class Texts(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> bytes:
        return sample[list(sample)[-1]]  # of a Join: a joined one


FORMATS: dict[str, tuple[Callable[[Path], None], Any]] = {
    "a.parquet": (write_parquet, custom.ParquetReader),
    "a.arrow": (write_arrow, custom.ArrowReader),
    "a.jsonl": (write_jsonl, custom.JsonlReader),
    "a.bin": (write_tokens, custom.TokenReader),
}


STORES = {"a.parquet": "parquet", "a.arrow": "arrow", "a.jsonl": "jsonl", "a.bin": "tokens"}


@pytest.fixture(autouse=True)
def look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_CHECK_S", 0.0)
    monkeypatch.setattr(shard_files, "_CHECK_MULTIPLE", 0)


def overwrite(path: Path) -> None:
    """The same bytes, in place, for a few that lie far behind."""
    raw = path.read_bytes()
    time.sleep(0.02)  # a tick of the clock that stamps files
    with path.open("r+b") as file:
        file.write(raw[: len(raw) // 2] + raw[len(raw) // 2 :].replace(b"row", b"ROW"))


def put_back(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Other bytes of the same size in place, and the time of writing put back."""
    stat, raw = path.stat(), path.read_bytes()
    time.sleep(0.02)  # a tick of the clock that stamps files
    with path.open("r+b") as file:
        file.write(change(raw))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def in_the_middle(raw: bytes) -> bytes:
    """Other bytes that are not among those compared: the first, middle and last row, nor in statistics."""
    return raw.replace(b"row 105", b"ROW 105")


CHANGES: dict[str, Callable[[bytes], bytes]] = {  # of what is compared: the footer, a message, a line, some bytes
    "a.parquet": lambda raw: raw[:-30] + bytes([raw[-30] ^ 1]) + raw[-29:],
    "a.arrow": lambda raw: raw[:40] + bytes([raw[40] ^ 1]) + raw[41:],
    "a.jsonl": lambda raw: raw.replace(b"row 399", b"ROW 399"),
    "a.bin": lambda raw: raw.replace(b"row 399", b"ROW 399"),
}


def expect_error(
    pipeline: Callable[[sp.Lane], custom.Stage], path: Path, then: Callable[[], None] = lambda: None
) -> None:
    with sp.SavableLoader(pipeline, seed=0, lanes=1) as loader:
        given = [next(loader) for _ in range(3)]
        overwrite(path)
        then()
        with pytest.raises(sp.ShardError, match=rf"{path.name}: it was (overwritten|replaced) while") as caught:
            given += [next(loader) for _ in range(ROWS)]
        assert caught.value.reason == "changed shard"
        assert len(given) == 3


@pytest.mark.parametrize(
    ("name", "closed"), [("a.parquet", False), ("a.arrow", True), ("a.jsonl", False), ("a.bin", True)]
)
def test_overwritten_file_is_an_error_whether_open_or_closed(tmp_path: Path, name: str, closed: bool) -> None:
    write, reader = FORMATS[name]
    write(tmp_path / name)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(reader(str(tmp_path / name), lane, shuffle=False), Texts()), size=2)

    expect_error(pipeline, tmp_path / name, then=lambda: close_down_to(0) if closed else None)


@pytest.mark.parametrize("name", FORMATS)
def test_file_truncated_or_changed_before_opening_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for change, told in (
        (lambda raw: raw[:-9], r"\d+ bytes, but \d+ when indexed"),
        (CHANGES[name], "rewritten"),
    ):
        FORMATS[name][0](path)
        store = open_store(path, format=STORES[name])
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(sp.ShardError, match=told) as error:
            store.read(0, 0, "tokens" if name == "a.bin" else "txt")
        assert error.value.reason == "changed shard"


def pipeline_of(path: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(FORMATS[path.name][1](str(path), lane, shuffle=False), Texts()), size=2)


@pytest.mark.parametrize(
    ("name", "closed"), [("a.parquet", True), ("a.arrow", False), ("a.jsonl", True), ("a.bin", False)]
)
def test_changed_file_with_restored_mtime_is_an_error_if_compared_bytes_differ(
    tmp_path: Path, name: str, closed: bool
) -> None:
    path = tmp_path / name
    FORMATS[name][0](path)
    with sp.SavableLoader(partial(pipeline_of, path), seed=0, lanes=1) as loader:
        next(loader)
        put_back(path, CHANGES[name])
        if closed:
            close_down_to(0)
        with pytest.raises(sp.ShardError, match=rf"{name}: it was (overwritten|replaced) while"):
            for _ in range(ROWS):
                next(loader)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl"])
def test_changed_file_with_equal_compared_bytes_warns_once(tmp_path: Path, name: str, caplog: Any) -> None:
    path = tmp_path / name
    FORMATS[name][0](path)
    with sp.SavableLoader(partial(pipeline_of, path), seed=0, lanes=1) as loader:
        next(loader)
        for _ in range(3):
            put_back(path, in_the_middle)
            next(loader)
            close_down_to(0)
            next(loader)
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"{name}: its inode changed during the run" in told


def test_token_idx_with_restored_mtime_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_tokens(path)
    with sp.SavableLoader(partial(pipeline_of, path), seed=0, lanes=1) as loader:
        next(loader)
        put_back(tmp_path / "a.idx", lambda raw: raw[:-8] + (ROWS - 1).to_bytes(8, "little"))
        with pytest.raises(sp.ShardError, match=r"a\.idx: it was overwritten while this run read it"):
            next(loader)


def test_token_idx_is_checked(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin")

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(custom.TokenReader(str(tmp_path / "a.bin"), lane, shuffle=False), Texts()), size=2)

    expect_error(pipeline, tmp_path / "a.idx")


def test_views_of_an_arrow_file_are_valid_only_while_it_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_store, "is_replaced", lambda: True)  # as in a worker
    write_arrow(tmp_path / "a.arrow")
    store = open_store(tmp_path / "a.arrow", format="arrow")
    store.read(0, ROWS - 1, "txt")
    store.verify(0)
    close_down_to(0)  # the batch is still mapped
    store.verify(1)
    overwrite(tmp_path / "a.arrow")
    assert store.read(0, ROWS - 1, "txt") == b"ROW 399"
    with pytest.raises(sp.ShardError, match=r"a\.arrow: it was overwritten while this run read it"):
        store.verify(2)


@pytest.mark.parametrize("name", [None, "a.arrow", "a.bin"])
def test_store_of_a_join_is_checked(tmp_path: Path, name: str | None) -> None:
    reader: Any = sp.TarShardReader if name is None else FORMATS[name][1]
    for folder in ("own", "other"):
        if name is None:
            write_numbered_shards(tmp_path / folder, [ROWS])
        else:
            (tmp_path / folder).mkdir()
            FORMATS[name][0](tmp_path / folder / name)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        joined = custom.Join(reader(str(tmp_path / "own"), lane, shuffle=False), {"other": tmp_path / "other"})
        return sp.Batcher(sp.Encode(joined, Texts()), size=2)

    expect_error(pipeline, tmp_path / "other" / (name or "0000.tar"))
