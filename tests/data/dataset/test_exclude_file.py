"""The file of samples that must not be given: what its lines mean, and what is told of those that mean nothing."""

from __future__ import annotations

import json
import logging
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset import key_index as key_lookup
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.key_index import ExcludeFile, key_index
from savable_pipeline.data.dataset.opening import open_any
from tests.conftest import write_tar


@pytest.fixture
def data(make_shards: Any) -> Dataset:
    return open_any(make_shards([5, 5]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "forget"


def test_a_line_is_a_key_or_json_with_shard_and_key(data: Dataset, file: Path) -> None:
    quarantined = {"shard": "0001.tar", "key": "s000007", "offset": 0, "ref": [0, 0, 7, 0], "reason": "x"}
    file.write_text(f's000001\r\n\n{json.dumps(quarantined)}\n{{"key": "s000009"}}')
    assert ExcludeFile(file, data).indices == {1, 7, 9}


def test_byte_order_mark_is_not_part_of_the_first_key(data: Dataset, file: Path) -> None:
    file.write_text("s000001\ns000002\n", encoding="utf-8-sig")
    assert ExcludeFile(file, data).indices == {1, 2}


def test_line_that_names_no_sample_is_a_warning_with_its_number(
    data: Dataset, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["s000001", "gone", '{"shard": "0000.tar", "key": "s000007"}', '{"shard": "9.tar", "key": "s000001"}']
    file.write_text("\n".join([*lines, '{"shard": "0000.tar", "reason": "rest of a damaged or missing shard"}']))
    assert ExcludeFile(file, data).indices == {1}
    assert "names 3 unknown samples: 0000.tar: s000007, 9.tar: s000001, gone" in caplog.text
    assert "1 lines name a shard without a key" in caplog.text


def test_all_samples_with_a_key_are_excluded_and_only_one_of_a_named_shard(tmp_path: Path, file: Path) -> None:
    for shard in ("a.tar", "b.tar"):
        write_tar(tmp_path / "twins" / shard, [(f"{key}.txt", b"") for key in "xyz"])
    data = open_any(tmp_path / "twins")
    file.write_text('y\n{"shard": "b.tar", "key": "z"}')
    assert ExcludeFile(file, data).indices == {1, 4, 5}


def test_keys_of_tables_are_in_the_readers_key_column(tmp_path: Path, file: Path) -> None:
    rows = [{"id": f"a{n}", "other": f"b{n}"} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for key, name in [("id", "a2"), ("other", "b4"), (None, "rows.jsonl:5")]:
        file.write_text(name)
        reader = custom.JsonlReader(tmp_path / "rows.jsonl", sp.Lane(), key=key, exclude=file)
        assert [number in reader.info.excluded for number in range(6)].index(True) == int(name[-1])
        file.unlink()


def test_digest_distinguishes_samples_not_lines(data: Dataset, file: Path) -> None:
    digests = []
    for text in ("s000001\ns000002", "s000002\ns000001\ngone\n", "s000001", "s000003"):
        file.write_text(text)
        digests.append(ExcludeFile(file, data).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize("line", ["{no", '{"key": 3}', '{"shard": [], "key": "a"}'])
def test_invalid_line_is_rejected_with_its_number(data: Dataset, file: Path, line: str) -> None:
    file.write_text(f"s000001\n{line}\n")
    with pytest.raises(ValueError, match="line 2: "):
        ExcludeFile(file, data)


def test_missing_exclude_file_is_an_error(data: Dataset, file: Path) -> None:
    with pytest.raises(sp.SavableError, match="Restore the file to keep its samples out"):
        ExcludeFile(file, data)


def test_changed_exclude_file_is_an_error_but_not_a_touched_one(
    data: Dataset, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_lookup, "_CHECK_INTERVAL_S", 0)
    file.write_text("s000001")
    read = ExcludeFile(file, data)
    os.utime(file, ns=(1, 1))
    read.verify()
    file.write_text("s000002")
    with pytest.raises(sp.SavableError, match="changed during the run"):
        read.verify()
    file.unlink()
    with pytest.raises(sp.SavableError, match="No such file"):
        read.verify()


def test_changed_exclude_file_with_restored_time_is_an_error(
    data: Dataset, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_lookup, "_CHECK_INTERVAL_S", 0)
    file.write_text("s000001")
    read, stat = ExcludeFile(file, data), file.stat()
    time.sleep(0.02)  # a tick of the clock that stamps files
    file.write_text("s000002")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(sp.SavableError, match="changed during the run"):
        read.verify()


def test_exclude_file_written_by_this_run_is_rejected(
    make_shards: Any, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    file.write_text("s000001")
    with pytest.raises(ValueError, match="Pass a copy"):
        sp.TarShardReader(make_shards([5]), sp.Lane(), quarantine=file, exclude=file)


def lines_of(folder: Path) -> Dataset:
    """A table: it has no index of keys."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"id": f"s{n:06d}"}) + "\n" for n in range(10)))
    return custom.JsonlReader(folder / "rows.jsonl", sp.Lane(), key="id").dataset


def twins_of(folder: Path) -> Dataset:
    """Tars with a key twice."""
    for shard in ("a.tar", "b.tar"):
        write_tar(folder / "twins" / shard, [(f"{key}.txt", b"") for key in ("other", f"s00000{ord(shard[0]) - 94}")])
    return open_any(folder / "twins")


@pytest.mark.parametrize("make", [lambda folder: open_any(folder / "shards"), lines_of, twins_of])
def test_twenty_thousand_unknown_keys_are_counted_once_each_in_little_memory(
    make: Callable[[Path], Dataset],
    make_shards: Any,
    tmp_path: Path,
    file: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_lookup, "_LOOKUP_KEYS", 1 << 11)
    make_shards([5, 5])
    data = make(tmp_path)
    lines = [f"unknown-{number:09d}" for number in range(20_000)]
    file.write_text("\n".join([*reversed(lines), "s000003", "", "unknown-000000007"]) + "\r\n")
    key_index(data)
    tracemalloc.start()
    try:
        found = ExcludeFile(file, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found.indices) == 1
    assert "names 20000 unknown samples: unknown-000000000, unknown-000000001, " in caplog.text
    assert "unknown-000000004 and 19995 more" in caplog.text
    assert peak < 4 * file.stat().st_size


@pytest.mark.parametrize("make", [lines_of, twins_of])
def test_keys_with_equal_hashes_are_distinguished(
    make: Callable[[Path], Dataset], tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make(tmp_path)
    monkeypatch.setattr(key_lookup, "xxh3_64_intdigest", len)
    file.write_text("nothing\ns000003\ns00000x")
    assert [key for number, key in enumerate(data.all_keys()) if number in ExcludeFile(file, data).indices] == [
        "s000003"
    ]


def test_pipe_as_exclude_file_is_rejected(data: Dataset, file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(sp.SavableError, match=f"exclude={file}: not a regular file but a folder, pipe or device"):
        ExcludeFile(file, data)
