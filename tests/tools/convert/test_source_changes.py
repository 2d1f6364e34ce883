"""Every kind of source that changes while it is converted: an error that says so, and put back, the rerun goes on."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert import Options, Report, conversion, find_files
from savable_pipeline.tools.convert.prepare import prepare_source
from savable_pipeline.tools.convert.source import close_all
from savable_pipeline.tools.convert.target import Target
from tests.support.toy_files import file_hashes
from tests.support.toy_sources import SOURCES, convert_in_halves

ONE_JOB = ("jsonl.gz", "jsonl.zst", "array.xz", "tsv.gz", "packed")  # which has read all before a change
CHANGES = [(kind, way) for kind in SOURCES if kind not in ONE_JOB for way in ("cut", "another")]
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
    file, told = last_file(source), list[int]()

    def progress(done: int, *_: int) -> None:
        if done >= moment and not told:
            file.write_bytes(change)
            told.append(done)

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
    assert list((tmp_path / "out").rglob("*.tar")), "finished ranges stay"
    file.write_bytes(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    convert_in_halves(source, tmp_path / "out", workers=1)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "calm")


@pytest.mark.parametrize("kind", ["parquet", "mds", "tars"])
def test_workers_detect_a_source_with_other_samples_than_at_the_start(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = SOURCES[kind](tmp_path / "in", 12), SOURCES[kind](tmp_path / "other", 8)

    def exchange(*_: Any) -> None:
        shutil.rmtree(source)
        other.rename(source)

    monkeypatch.setattr(conversion, "write_manifest", exchange)  # the last step before the jobs
    with pytest.raises(SavableError, match="it changed during the conversion"):
        convert_in_halves(source, tmp_path / "out", workers=2)


def test_an_index_that_differs_from_the_start_is_an_error(tmp_path: Path) -> None:
    output = Target(tmp_path / "out")
    output.work.mkdir(parents=True)
    found = prepare_source(find_files(SOURCES["mds"](tmp_path / "in", 8)), Options(), None, output, None).source
    close_all()
    assert found.dataset().count == 8
    close_all()
    with pytest.raises(SavableError, match="differ from those at the start"):
        replace(found, digest="of another index").dataset()
