"""Every kind of source that changes while it is converted: an error that says so, and put back, the rerun goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert import Report
from tests.support.toy_files import snapshot
from tests.support.toy_sources import SOURCES, convert_in_halves

UNPACKED = ("jsonl.gz", "jsonl.zst", "array.xz", "tsv.gz")  # records, before the first shard is written
AS_PLANNED = [kind for kind in SOURCES if kind not in (*UNPACKED, "packed")]
CHANGES = [(kind, way) for kind in AS_PLANNED for way in ("cut", "another")]
READERS = [
    ("folder", "cut"),
    *((k, "another") for k in ("folder", "jsonl", "csv", "mds.zstd", "litdata", "litdata.rows", "tars", "hf")),
]
OTHERS = [change for change in CHANGES if change not in READERS]


def last_file(source: Path) -> Path:
    """The file of a source that is read last."""
    if source.is_file():
        return source
    found = [path for path in source.rglob("*") if path.is_file() and ".nv-meta" not in path.parts]
    data = (".tar", ".parquet", ".arrow", ".bin", ".mds", ".zstd", ".jpg", ".gz")
    return max(path for path in found if path.suffix in data)


def changed_at(source: Path, target: Path, change: bytes, moment: int) -> Report:
    """Convert, and overwrite the last file in its place before the sample of this number."""
    file = last_file(source)

    def progress(done: int, *_: int) -> None:
        if done == moment:
            file.write_bytes(change)

    return convert_in_halves(source, target, workers=1, progress=progress)


@pytest.mark.parametrize(
    ("kind", "way"), [*READERS, *(pytest.param(*change, marks=pytest.mark.long) for change in OTHERS)]
)
def test_changed_source_is_an_error_and_resumes_once_restored(tmp_path: Path, kind: str, way: str) -> None:
    source = SOURCES[kind](tmp_path / "in", 12)
    convert_in_halves(source, tmp_path / "calm", workers=1)
    file = last_file(source)
    raw, stat = file.read_bytes(), file.stat()
    change = raw[:-3] if way == "cut" else raw[:-300] + bytes(300)
    with pytest.raises(SavableError, match=r"it changed during the conversion. Do not change the input"):
        changed_at(source, tmp_path / "out", change, 3)
    assert list((tmp_path / "out").glob("*.tar")), "what was finished stays"
    file.write_bytes(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    convert_in_halves(source, tmp_path / "out", workers=1)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "calm")


@pytest.mark.parametrize("kind", ["jsonl.gz", "tsv.gz"])
def test_records_may_change_once_decompressed(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in", 12)
    convert_in_halves(source, tmp_path / "calm", workers=1)
    raw = source.read_bytes()
    changed_at(source, tmp_path / "out", raw[:-9], 3)
    source.write_bytes(raw)
    convert_in_halves(source, tmp_path / "out", workers=1)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "calm")


def test_truncated_compressed_tar_is_skipped_and_converted_once_restored(tmp_path: Path) -> None:
    source = SOURCES["packed"](tmp_path / "in", 12)
    convert_in_halves(source, tmp_path / "calm")
    raw = last_file(source).read_bytes()
    report = changed_at(source, tmp_path / "out", raw[:-30], 3)
    assert [reject.reason for reject in report.rejected] == ["damaged tar"] and report.samples == 10
    last_file(source).write_bytes(raw)
    assert convert_in_halves(source, tmp_path / "out").rejected == []
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "calm")
