"""When was a sample given: the keys are read as the run read them, or there is an error; never a wrong "not given"."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.ledger import records
from savable_pipeline.run.loader.ledger_keeper import saved_files
from savable_pipeline.tools.cli.main import app
from tests.conftest import write_numbered_shards

TABLE = {"name": [f"n{i}" for i in range(40)], "text": [f"text {i}" for i in range(40)]}


def write_all(folder: Path) -> None:
    """40 samples of each kind, and one file more that some runs leave out."""
    write_numbered_shards(folder / "tars", [20, 20, 5])
    table = pa.table(TABLE)
    for kind in ("parquet", "arrow", "jsonl", "tokens"):
        (folder / kind).mkdir(parents=True)
    pq.write_table(table, folder / "parquet" / "0.parquet")
    with pa.ipc.new_file(folder / "arrow" / "0.arrow", table.schema) as file:
        file.write_table(table)
    lines = [json.dumps({"name": name, "text": text}) for name, text in zip(*TABLE.values(), strict=True)]
    (folder / "jsonl" / "0.jsonl").write_text("\n".join(lines) + "\n")
    np.save(folder / "tokens" / "0.npy", np.arange(160, dtype=np.uint16))


READERS: dict[str, tuple[Callable[[Path, sp.Lane], custom.SampleStage], list[str], str]] = {  # 40 keys; the data
    "tars": (lambda at, lane: sp.TarShardReader(at / "tars/{0001..0002}.tar", lane, epochs=1), [], "tars"),
    "a list": (lambda at, lane: sp.TarShardReader([at / "tars/0000.tar", at / "tars/0002.tar"], lane), [], "tars"),
    "parquet": (lambda at, lane: custom.ParquetReader(at / "parquet", lane, key="name"), TABLE["name"], "parquet"),
    "arrow": (
        lambda at, lane: custom.ArrowReader(at / "arrow", lane, key="name", columns=["text"]),
        TABLE["name"],
        "arrow",
    ),
    "jsonl": (lambda at, lane: custom.JsonlReader(at / "jsonl/*.jsonl", lane, key="name"), TABLE["name"], "jsonl"),
    "tokens": (lambda at, lane: custom.TokenReader(at / "tokens", lane, length=4), [], "tokens"),
    "blended": (
        lambda at, lane: sp.Blend({"web": custom.ParquetReader(at / "parquet", lane, key="name")}, weights={"web": 1}),
        TABLE["name"],
        "parquet",
    ),
    "joined": (
        lambda at, lane: custom.Join(
            custom.JsonlReader(at / "jsonl", lane, key="name"), {"other": sp.open_dataset(at / "parquet", key="name")}
        ),
        TABLE["name"],
        "jsonl",
    ),
}


def pipeline(at: Path, kind: str, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(READERS[kind][0](at, lane), size=2)


def given_keys(at: Path, kind: str, steps: int = 7) -> tuple[dict[str, int], list[str]]:
    """The slot at which a run was given each key that it was given, and the keys of that data that it was not."""
    slots: dict[str, int] = {}
    with sp.SavableLoader(partial(pipeline, at, kind), seed=1, lanes=2, ledger=at / "ledger") as own:
        for slot in range(steps):
            slots |= {sample.key: slot for sample in next(own)}
        reader = READERS[kind][0](at, sp.Lane())
        while reader.sources:
            reader = reader.sources[0]  # type: ignore[assignment]
        assert isinstance(reader, custom.RecordReader)
        return slots, [key for key in reader.dataset.all_keys() if key not in slots]


def seen(at: Path, *arguments: str) -> tuple[int, list[str]]:
    shown = CliRunner().invoke(app, ["ledger", "find", str(at / "ledger"), *arguments], env={"COLUMNS": "1000"})
    return shown.exit_code, shown.output.splitlines()


def check_seen(at: Path, slots: dict[str, int], rest: list[str], *more: str) -> None:
    code, lines = seen(at, *slots, rest[0], "never there", *more)
    assert code == 1 and len(lines) == len(slots) + 2, lines
    of = " of web" if " of web: " in lines[0] else ""
    for key, slot in slots.items():
        assert f"{key}{of}: epoch 0, slot {slot}, step {slot}, rank 0 of 1" in lines
    assert f"{rest[0]}: not given" in lines and "never there: no sample has this key" in lines


@pytest.mark.parametrize("kind", READERS)
def test_ledger_finds_the_slot_of_each_yielded_key_and_none_for_others(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    slots, rest = given_keys(tmp_path.relative_to(Path.cwd()), kind)
    monkeypatch.chdir("/")
    check_seen(tmp_path, slots, rest)


def make_old(folder: Path) -> None:
    """Write the ledger in `folder` as releases did that did not note what the readers were told to read."""

    class Source(msgspec.Struct, array_like=True, frozen=True):
        name: str
        tag: int
        address: str

    (path,) = folder.glob("*.ledger")
    start, *others = records.read_records(path)
    assert isinstance(start, records.Start)
    old = [Source(each.name, each.tag, each.address) for each in start.sources]
    start = msgspec.structs.replace(start, sources=old)  # type: ignore[arg-type]
    path.write_bytes(b"".join(map(records.framed, [start, *others])))


@pytest.mark.parametrize("kind", READERS)
def test_ledger_of_an_earlier_release_works_if_the_folder_is_unchanged(tmp_path: Path, kind: str) -> None:
    write_all(tmp_path)
    slots, rest = given_keys(tmp_path, kind)
    make_old(tmp_path / "ledger")
    if kind not in ("tars", "a list"):
        return check_seen(tmp_path, slots, rest)
    code, lines = seen(tmp_path, *slots)
    assert code == 2 and "not the samples of the run" in lines[0] and "--data" in lines[0]
    if kind == "tars":
        check_seen(tmp_path, slots, rest, "--data", str(tmp_path / "tars/{0001..0002}.tar"))
    return None


def test_data_that_moved_is_named_and_other_data_are_rejected(tmp_path: Path) -> None:
    write_all(tmp_path)
    slots, rest = given_keys(tmp_path, "parquet")
    shutil.move(tmp_path / "parquet", tmp_path / "moved")
    code, lines = seen(tmp_path, *slots)
    assert code == 2 and "not given" not in " ".join(lines)
    check_seen(tmp_path, slots, rest, "--data", str(tmp_path / "moved"))
    pq.write_table(pa.table(TABLE).slice(1), tmp_path / "moved" / "0.parquet")
    code, lines = seen(tmp_path, *slots, "--data", str(tmp_path / "moved"))
    assert code == 2 and "not the samples of the run" in lines[0]


def test_files_added_after_a_run_change_no_answer_of_its_ledger(tmp_path: Path) -> None:
    write_all(tmp_path)
    slots, rest = given_keys(tmp_path, "jsonl")
    (tmp_path / "jsonl" / "1.jsonl").write_text('{"name": "new", "text": "x"}\n')
    check_seen(tmp_path, slots, rest)
    assert seen(tmp_path, "new") == (1, ["new: not given"])


class Numbers(custom.RecordStore):
    address = "numbers"
    entries = [custom.ShardEntry("all", size=0, samples=40, digest=1)]  # noqa: RUF012

    def key(self, shard: int, row: int) -> str:
        return f"n{row}"

    def extensions(self, shard: int, row: int) -> list[str]:
        return ["json"]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        return str(row).encode()


def own_store(lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(custom.RecordReader(lane.shared("numbers", Numbers), lane), size=2)


def test_users_store_is_rejected_in_ledger_queries(tmp_path: Path) -> None:
    with sp.SavableLoader(own_store, seed=1, lanes=2, ledger=tmp_path / "ledger") as own:
        key = next(own)[0].key
    for more in ([], ["--data", str(tmp_path)]):
        code, lines = seen(tmp_path, key, *more)
        assert code == 2 and "because only your program opens" in lines[0], lines


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ("http://me:secret@host/x", ""),
        (("https://host/x", "https://me@host/y"), ""),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        (("a", "/b/*.tar"), [str(Path("a").absolute()), "/b/*.tar"]),
        ("", ""),
    ],
)
def test_password_in_a_url_is_not_saved(files: Any, kept: Any) -> None:
    assert saved_files(files) == kept
