"""Ranges of rows: the samples are those of the source, shards are full, and memory does not grow with samples."""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.data.stores.opening import find_source
from savable_pipeline.data.stores.parquet import ParquetStore
from savable_pipeline.data.stores.table_store import FILE_FIELDS
from savable_pipeline.tools.convert import Options, conversion, find_files, ranges, run_conversion
from tests.data.test_layouts import LAYOUTS, Layout
from tests.support.toy_files import file_hashes, write_captioned_images
from tests.support.toy_sources import SOURCES, watch_written_ranges

TABLES = ("jsonl", "json", "csv")
NOT_EQUAL = {
    "Kaldi with segments",  # an error
    "Kaldi's folders of splits",  # keys that repeat in two shards
}
OPENED = [pytest.param(each, id=each.name) for each in LAYOUTS if not each.error and each.name not in NOT_EQUAL]
READ_IN_PLACE = [kind for kind in SOURCES if kind != "packed" and kind.partition(".")[2] not in ("gz", "zst", "xz")]


def in_a_tar(format: str, number: int, key: str) -> str:
    """The key that a sample of the source has in the shards, where keys of files and rows cannot be in a tar."""
    if format in (*TABLES, "mds", "litdata"):
        return f"{number + (format in TABLES):09d}"
    name, colon, row = key.rpartition(":")
    stem = name.rpartition(".")[0] if "." in name else name
    return f"{stem}/{row}".replace(".", "_") if colon else key


def samples_of(path: Path, format: str = "", **more: Any) -> dict[str, dict[str, bytes]]:
    """The parts of all samples by the key that they have in shards; a repeated one has that of its tar before it."""
    found: dict[str, dict[str, bytes]] = {}
    for number, sample in enumerate(sp.open_dataset(path, **more)):
        key = in_a_tar(format, number, sample.key)
        key = f"{sample.shard.rpartition('.')[0]}/{key}" if key in found else key
        found[key] = {part: bytes(sample[part]) for part in sample}
    return found


def check_equal(source: Path, target: Path) -> None:
    """Each sample has the parts that the source is read with; a table's are its rows, and the files that they name."""
    found = find_source(str(source))
    format, fields = found.format.name, found.settings.get("file_fields", FILE_FIELDS)
    more = {"file_fields": fields} if format in ("jsonl", "json") else {}
    assert samples_of(target) == samples_of(source, format, **more)


@pytest.mark.parametrize("layout", OPENED)
def test_a_converted_layout_has_the_samples_that_it_is_read_with(tmp_path: Path, layout: Layout) -> None:
    (tmp_path / "data").mkdir()
    layout.write(tmp_path / "data")
    report = run_conversion(
        tmp_path / "data", tmp_path / "out", Options(check_images=False, shard_samples=2), reshard=layout.kind == "tar"
    )
    if report.rejected:  # none is lost silently
        assert layout.name in ("audio and text pairs", "videos and JSON pairs"), report.rejected
    check_equal(tmp_path / "data", tmp_path / "out")
    assert report.samples == layout.samples


@pytest.mark.parametrize("kind", READ_IN_PLACE)
def test_a_converted_source_has_the_samples_that_it_is_read_with(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in", 14)
    run_conversion(source, tmp_path / "out", Options(shard_samples=3), reshard="tars" in source.name)
    check_equal(source, tmp_path / "out")


def test_one_worker_and_eight_write_the_same_bytes(tmp_path: Path) -> None:
    source = SOURCES["parquet"](tmp_path / "in", 40)
    for workers in (1, 8):
        run_conversion(source, tmp_path / str(workers), Options(shard_samples=4), workers=workers)
    assert file_hashes(tmp_path / "1") == file_hashes(tmp_path / "8")


LIMIT = 102_400


@settings(max_examples=12 if settings().max_examples == 100 else settings().max_examples, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, LIMIT // 4), st.booleans()), min_size=1, max_size=80),
    st.sampled_from([None, 5, 13]),
    st.booleans(),
    st.sampled_from([1, 4 * LIMIT]),
)
@example([(LIMIT // 5, i < 40 or i % 4 == 0) for i in range(80)], None, False, 1)  # the last are to be joined
@example([(LIMIT // 7, True)] * 60, None, True, 4 * LIMIT)  # ranges of four shards
def test_shards_are_full_and_as_few_as_can_be(
    sizes: list[tuple[int, bool]], most: int | None, split: bool, least_bytes: int
) -> None:
    """Sizes in bytes of samples, and whether they are good; the names of splits are drawn by their keys."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "LEAST_BYTES", least_bytes)
        source, target, records = Path(name, "in"), Path(name, "out"), list[Any]()
        source.mkdir()
        for i, (size, good) in enumerate(sizes):
            (source / f"{i:03d}.raw").write_bytes(bytes(size))
            (source / f"{i:03d}.json").write_text("1" if good else "[1")
        finish = conversion.finish

        def noted(*given: Any) -> Any:
            records.extend(job.record() for job in given[3])
            return finish(*given)

        patch.setattr(conversion, "finish", noted)
        splits = (("a", "0.5"), ("b", "0.5")) if split else ()
        options = Options(shard_bytes=LIMIT, shard_samples=most, split=splits)
        report = run_conversion(find_files(source, "folder"), target, options)
        assert (report.samples, len(report.rejected)) == (sum(good for _, good in sizes), sum(not g for _, g in sizes))
        for part in ("a-", "b-") if split else ("",):
            paths = sorted(target.glob(f"{part}*.tar"))
            assert [path.name for path in paths] == [f"{part}{i:06d}.tar" for i in range(len(paths))]
            counts = [sum(1 for _ in sp.open_dataset(path)) for path in paths]
            assert all(0 < count <= (most or 1000) for count in counts)
            written = [path.stat().st_size for path in paths]
            assert max(written, default=0) <= LIMIT
            fewest = max(-(-sum(written) // LIMIT), -(-sum(counts) // (most or 1000)))
            assert len(paths) <= math.ceil(1.15 * fewest)
            for record in records:
                tables = [shard.entry for shard in record.shards if shard.split == part.removesuffix("-")]
                full = [entry.size >= 0.7 * LIMIT or entry.samples >= 0.7 * (most or 1000) for entry in tables[:-1]]
                assert all(full)


def test_a_row_group_that_is_larger_than_a_range_is_decoded_once_and_makes_several_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, decode, decoded = tmp_path / "a.parquet", ParquetStore.decode, Counter[tuple[int, int]]()
    rows = pa.table({"txt": [f"row {i} " * 100 for i in range(60)]})
    pq.write_table(rows, source, row_group_size=30)  # makes six shards of five

    def noted(store: ParquetStore, shard: int, group: int) -> Any:
        decoded[shard, group] += 1
        return decode(store, shard, group)

    monkeypatch.setattr(ParquetStore, "decode", noted)
    jobs = watch_written_ranges(monkeypatch)
    report = run_conversion(source, tmp_path / "out", Options(shard_samples=5), workers=1)
    assert decoded == {(0, 0): 1, (0, 1): 1} and len(jobs) == 2
    assert (report.samples, report.shards) == (60, 12)


class KilledError(BaseException):
    """In place of a signal: nothing handles it."""


def test_conversion_killed_at_any_rename_and_repeated_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_captioned_images(tmp_path / "in", 7, **{"003.jpg": b"bad"})
    options = Options(shard_samples=2, split=(("a", "0.5"), ("b", "0.5")))
    run_conversion(source, tmp_path / "calm", options)
    calm, moment = file_hashes(tmp_path / "calm"), 1

    def killed() -> bool:
        """Convert, and die before this rename; False if there are not so many."""
        count = [0]

        def before(original: Any) -> Any:
            def rename(*names: Any) -> Any:
                count[0] += 1
                if count[0] == moment:
                    raise KilledError
                return original(*names)

            return rename

        with monkeypatch.context() as patch:
            for name in ("replace", "rename"):
                patch.setattr(os, name, before(getattr(os, name)))
            try:
                run_conversion(source, tmp_path / "out", options)
            except KilledError:
                return True
        return False

    while killed():
        run_conversion(source, tmp_path / "out", options)
        assert file_hashes(tmp_path / "out") == calm, moment
        shutil.rmtree(tmp_path / "out")
        moment += 1
    assert moment > 20


def test_ranges_are_cut_by_the_source_and_the_settings_alone(tmp_path: Path) -> None:
    source, draw = tmp_path / "in", random.Random(3)
    source.mkdir()
    for i in range(60):
        (source / f"{i:03d}.raw").write_bytes(bytes(draw.randrange(1, 9000)))
    jobs: list[list[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "do_jobs", lambda found, *_: jobs.append([job.spans for job in found]) or 1 / 0)
        for workers in (1, 2, 8):
            with pytest.raises(ZeroDivisionError):
                run_conversion(find_files(source), tmp_path / "out", Options(shard_bytes=40_960), workers=workers)
    assert jobs[0] == jobs[1] == jobs[2] and len(jobs[0]) > 3
