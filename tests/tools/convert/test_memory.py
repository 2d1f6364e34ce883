"""Peak memory of a conversion does not grow with the number of samples."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.tools.convert import ranges
from savable_pipeline.tools.convert.finish import jobs_with_repeats
from savable_pipeline.tools.convert.options import Options
from savable_pipeline.tools.convert.prepare import Prepared, prepare
from savable_pipeline.tools.convert.range_job import RangeJob, RangeRecord, write_range
from savable_pipeline.tools.convert.source import close_sources, find_files
from savable_pipeline.tools.convert.target import Target


def test_planning_takes_no_memory_for_each_record(tmp_path: Path) -> None:
    few, many = (_peak(_planned, _records(tmp_path, count)) for count in (1_000_000, 4_000_000))
    assert many - few < 1_000_000, (few, many)  # bytes, for three million records more


def test_a_job_takes_no_memory_for_records_of_other_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "LEAST_BYTES", 1)

    def first_range_of(count: int) -> tuple[int, int]:
        options = Options(shard_samples=50)
        found = _planned(_records(tmp_path, count), options)
        job = RangeJob(
            name="0", source=found.source, spans=found.ranges[0], options=options, work=tmp_path / f"{count}-out/work"
        )
        job.work.mkdir(parents=True)
        close_sources()
        return job.rows, _peak(write_range, job)

    (few_rows, few), (many_rows, many) = map(first_range_of, (700_000, 4_000_000))
    assert few_rows == many_rows == 400
    assert many - few < 100_000, (few, many)


def test_repeated_keys_are_found_in_no_more_memory_than_those_of_a_range_take(tmp_path: Path) -> None:
    def find(ranges: int) -> int:
        jobs: list[Any] = [_Keys(tmp_path, start=100_000 * number) for number in range(ranges)]
        return _peak(jobs_with_repeats, jobs)

    few, many = map(find, (12, 60))
    assert many - few < 100_000, (few, many)


@dataclass
class _Keys:
    """A finished job whose record has 100,000 hashes of keys."""

    work: Path
    start: int

    def record(self) -> RangeRecord:
        return RangeRecord(keys=np.arange(self.start, self.start + 100_000, dtype="<u8").tobytes())

    @property
    def source(self) -> SimpleNamespace:
        return SimpleNamespace(form=TARS)


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    close_sources()


def _records(folder: Path, count: int) -> Path:
    path = folder / f"{count}.jsonl"
    path.write_bytes(b"{}\n" * count)
    return path


def _planned(source: Path, options: Options | None = None) -> Prepared:
    output = Target(source.parent / f"{source.name}-plan")
    output.work.mkdir(parents=True)
    return prepare(find_files(source), options or Options(shard_bytes=4_000_000_000), None, output, None)


def _peak(run: Callable[..., Any], *arguments: Any) -> int:
    """Return the most bytes that Python and NumPy had allocated at a time."""
    tracemalloc.start(1)
    try:
        run(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
