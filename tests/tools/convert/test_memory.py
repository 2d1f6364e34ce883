"""Peak memory of a conversion does not grow with the number of samples."""

from __future__ import annotations

import contextlib
import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from savable_pipeline.data.shards import byte_source, index, index_making, number_spool, tar_format
from savable_pipeline.data.stores import csv_table, jsonl, table_store
from savable_pipeline.data.stores.formats import format_named
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.tools.convert import ranges, run_conversion, samples, shard_series
from savable_pipeline.tools.convert.finish import jobs_with_repeats
from savable_pipeline.tools.convert.options import Options
from savable_pipeline.tools.convert.prepare import Prepared, prepare_source
from savable_pipeline.tools.convert.range_job import RangeJob, write_range
from savable_pipeline.tools.convert.shard_series import ShardFile
from savable_pipeline.tools.convert.source import close_all, find_files
from savable_pipeline.tools.convert.target import Target


def test_planning_takes_no_memory_for_each_record(tmp_path: Path) -> None:
    few, many = (_peak(_planned, _records(tmp_path, count)) for count in (250_000, 1_000_000))
    assert many - few < 250_000, (few, many)  # bytes, for 750,000 records more


def test_a_job_takes_no_memory_for_records_of_other_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "LEAST_BYTES", 1)

    def first_range_of(count: int) -> tuple[int, int]:
        options = Options(shard_samples=50)
        found = _planned(_records(tmp_path, count), options)
        job = RangeJob(
            name="0", source=found.source, spans=found.ranges[0], options=options, work=tmp_path / f"{count}-out/work"
        )
        job.work.mkdir(parents=True)
        close_all()
        return job.rows, _peak(write_range, job)

    (few_rows, few), (many_rows, many) = map(first_range_of, (300_000, 1_200_000))
    assert few_rows == many_rows == 400
    assert many - few < 100_000, (few, many)


def test_a_job_takes_no_memory_for_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are one range, in three shards and in twelve."""
    monkeypatch.setattr(ranges, "LEAST_BYTES", 1 << 40)

    def only_range_of(count: int) -> int:
        options = Options(shard_samples=1_000)
        found = _planned(_records(tmp_path, count), options)
        (spans,) = found.ranges
        job = RangeJob(name="0", source=found.source, spans=spans, options=options, work=tmp_path / f"{count}-out/work")
        job.work.mkdir(parents=True)
        return _peak(write_range, job)

    few, many = map(only_range_of, (2_000, 6_000))
    assert many - few < 50_000, (few, many)


@pytest.mark.parametrize("kind", ["tar", "jsonl", "csv", "json"])
def test_a_scan_of_one_file_takes_no_memory_for_its_samples(tmp_path: Path, kind: str) -> None:
    names = [_one_file(tmp_path / f"{count}.{kind}", count) for count in (10, 1_000, 4_000)]
    _, few, many = (_peak(format_named(kind).scan, tmp_path, name) for name in names)  # the first one imports
    assert many - few < 12_000, (few, many)


@pytest.mark.parametrize("kind", ["tar", "jsonl", "csv", "json"])
def test_a_conversion_takes_no_memory_for_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(ranges, "LEAST_BYTES", 1)

    def convert(count: int) -> int:
        name = _one_file(tmp_path / f"{count}.{kind}", count)
        options = Options(shard_samples=count // 4)  # each job has more samples, and so has the conversion
        source, target = tmp_path / name, tmp_path / f"{count}-out"
        return _peak(lambda: run_conversion(source, target, options, reshard=kind == "tar"))

    _, few, many = map(convert, (100, 1_000, 3_000))  # the first one imports
    assert many - few < 36_000, (few, many)  # bytes, for 2,000 samples more


def _one_file(path: Path, count: int) -> str:
    """Write a file of this many samples, and return its name."""
    if path.suffix == ".tar":
        with contextlib.closing(ShardFile(path, path.name)) as shard:
            for number in range(count):
                shard.add(f"{number:09d}", {"txt": b"a", "json": b"{}"})
            shard.finish()
    elif path.suffix == ".json":
        path.write_text(f"[{', '.join([json.dumps({'caption': [{'a': 'b' * 300}]})] * count)}]")
    else:
        header, row = ("a,b\n", "1," + "2" * 300) if path.suffix == ".csv" else ("", json.dumps({"a": "b" * 300}))
        path.write_text(header + f"{row}\n" * count)
    return path.name


def test_finding_repeated_keys_takes_no_more_memory_than_the_keys_of_a_range(tmp_path: Path) -> None:
    def find(ranges: int) -> int:
        jobs: list[Any] = [_Keys(tmp_path, start=100_000 * number) for number in range(ranges)]
        return _peak(jobs_with_repeats, jobs)

    few, many = map(find, (12, 60))
    assert many - few < 100_000, (few, many)


@dataclass
class _Keys:
    """A finished job with 100,000 hashes of keys."""

    work: Path
    start: int

    def key_hashes(self) -> NDArray[np.uint64]:
        return np.arange(self.start, self.start + 100_000, dtype="<u8")

    @property
    def source(self) -> SimpleNamespace:
        return SimpleNamespace(form=TARS)


@pytest.fixture(autouse=True)
def _small_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Less is in memory than by default, so that few samples are more than that."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(number_spool, "_IN_MEMORY", 1 << 12)
    monkeypatch.setattr(number_spool, "_BUFFERED", 1 << 8)
    monkeypatch.setattr(byte_source, "IN_MEMORY_BYTES", 1 << 12)
    monkeypatch.setattr(byte_source, "_COPY_BYTES", 1 << 12)
    monkeypatch.setattr(index_making, "_IN_MEMORY", 1 << 12)
    monkeypatch.setattr(index, "_BLOCK", 1 << 12)
    monkeypatch.setattr(tar_format, "_AT_ONCE", 1 << 8)
    monkeypatch.setattr(samples, "_AHEAD", 1 << 8)
    monkeypatch.setattr(ranges, "_AT_ONCE", 1 << 8)
    monkeypatch.setattr(csv_table, "_EXAMINED_ROWS", 20)
    monkeypatch.setattr(shard_series, "_BUFFER_BYTES", 1 << 12)  # a large buffer hides what grows before and after it
    for module, name in ((table_store, "_BLOCK"), (jsonl, "_CHUNK"), (csv_table, "_BLOCK")):
        monkeypatch.setattr(module, name, 1 << 14)
    yield
    close_all()


def _records(folder: Path, count: int) -> Path:
    path = folder / f"{count}.jsonl"
    path.write_bytes(b"{}\n" * count)
    return path


def _planned(source: Path, options: Options | None = None) -> Prepared:
    output = Target(source.parent / f"{source.name}-plan")
    output.work.mkdir(parents=True)
    return prepare_source(find_files(source), options or Options(shard_bytes=4_000_000_000), None, output, None)


def _peak(run: Callable[..., Any], *arguments: Any) -> int:
    """Return the most bytes that Python and NumPy had allocated at a time.

    Python keeps up to 2,000 freed tuples of each length. All of them exist before the measure, which then counts none.
    No garbage is collected meanwhile: that would free them, and run finalizers of objects of other tests.
    """
    gc.collect()
    gc.disable()
    freed = [[tuple([None] * length) for _ in range(2_000)] for length in range(1, 21)]
    del freed
    tracemalloc.start(1)
    try:
        run(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
