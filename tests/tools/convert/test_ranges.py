"""Ranges of rows: the samples are those of the source, shards are full, and memory does not grow with samples."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import pytest

import savable_pipeline as sp
from savable_pipeline.data.stores.table_store import FILE_FIELDS
from savable_pipeline.tools.convert import Options, run_conversion
from tests.support.toy_files import snapshot
from tests.support.toy_sources import SOURCES

TABLES = ("jsonl", "array", "csv")
READ_IN_PLACE = [kind for kind in SOURCES if kind != "packed" and kind.partition(".")[2] not in ("gz", "zst", "xz")]


def parts_of(path: Path, **settings: object) -> list[dict[str, bytes]]:
    data = sp.open_dataset(path, **settings)  # type: ignore[arg-type]
    return sorted(({part: bytes(sample[part]) for part in sorted(sample)} for sample in data), key=repr)


@pytest.mark.parametrize("kind", READ_IN_PLACE)
def test_a_converted_source_has_the_parts_of_the_source(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in", 14)
    run_conversion(source, tmp_path / "out", Options(shard_samples=3), reshard="tars" in source.name)
    settings = {"file_fields": FILE_FIELDS} if kind in TABLES else {}
    assert parts_of(tmp_path / "out") == parts_of(source, **settings)
    if kind in ("folder", "tars"):  # whose keys a tar can have
        keys = [sample.key for sample in sp.open_dataset(tmp_path / "out")]
        assert sorted(keys) == sorted(sample.key for sample in sp.open_dataset(source))


def test_one_worker_and_eight_give_the_same_bytes(tmp_path: Path) -> None:
    source = SOURCES["parquet"](tmp_path / "in", 40)
    for workers in (1, 8):
        run_conversion(source, tmp_path / str(workers), Options(shard_samples=4), workers=workers)
    assert snapshot(tmp_path / "1") == snapshot(tmp_path / "8")


@pytest.mark.parametrize("only", [(), ("json",)])
@pytest.mark.parametrize("limits", [{"shard_bytes": 40_960}, {"shard_samples": 7}, {"shard_bytes": 1 << 30}])
def test_shards_are_full_and_as_few_as_can_be(tmp_path: Path, limits: dict[str, int], only: tuple[str, ...]) -> None:
    draw, source = random.Random(7), tmp_path / "in"
    source.mkdir()
    for i in range(150):
        (source / f"{i:03d}.bin").write_bytes(bytes([1 + i]) * draw.randrange(1, 4000))
        (source / f"{i:03d}.json").write_text("1" if draw.random() < 0.7 else "[1")  # a third is rejected
    report = run_conversion(source, tmp_path / "out", Options(**limits, only=only))  # type: ignore[arg-type]
    paths = sorted((tmp_path / "out").glob("*.tar"))
    assert [path.name for path in paths] == [f"{i:06d}.tar" for i in range(report.shards)]
    sizes, most = [path.stat().st_size for path in paths], limits.get("shard_bytes", 1 << 40)
    assert max(sizes) <= most and 50 < len(report.rejected) + report.samples == 150
    fewest = max(-(-sum(sizes) // most), -(-report.samples // limits.get("shard_samples", 1 << 40)))
    assert report.shards <= max(1.15 * fewest, fewest + 1)


def peak_of(folder: Path, count: int) -> int:
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(f"{json.dumps({'n': i})}\n" for i in range(count)))
    tracemalloc.start()
    run_conversion(folder / "a.jsonl", folder / "out", Options(shard_bytes=100_000), workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    peak_of(tmp_path / "warm", 500)
    few, many = peak_of(tmp_path / "few", 2_000), peak_of(tmp_path / "many", 10_000)
    assert many < few + 8_000 * 60  # bytes; a plan of all samples took 391 for each
