"""The cache gives a row's own bytes or none, keeps to its bound, and outlives processes and machines that end."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.remote import cache_space, shard_cache
from savable_pipeline.data.remote.cache_files import range_lock
from savable_pipeline.data.remote.cache_space import CacheSpace, bytes_in_use, cache_bytes, cache_folder
from savable_pipeline.data.remote.shard_cache import USED, ShardCache, create_flags
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.errors import ShardError
from tests.conftest import write_numbered_shards

SIZES = [6, 1, 9]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of samples of 6 kB, which share blocks of the disk with their neighbours."""
    folder = tmp_path_factory.mktemp("shards")
    write_numbered_shards(folder, SIZES, pad="x" * 5000)
    open_any(str(folder))
    return folder


def version(shards: Path, cache: Path) -> ShardCache:
    """An empty version of these shards in a cache."""
    folder = cache / "dataset" / "version"
    folder.mkdir(parents=True)
    shutil.copy(shards / INDEX_NAME, folder / "index")
    create_flags(folder)
    return ShardCache(folder)


def bring(cached: ShardCache, shards: Path, row: int, stop: int) -> None:
    """Rows of one shard, as a downloader brings them."""
    shard = cached.shard_of(row)
    fd = cached.open(shard)
    for first, end in cached.missing(row, stop):
        start, past = cached.extent(first, end)
        with range_lock(fd, start, past):
            os.pwrite(fd, (shards / f"{shard:04d}.tar").read_bytes()[start:past], start)
            cached.mark_present(shard, fd, first, end)
    os.close(fd)


def evict(cached: ShardCache, shard: int, *, also_unused: bool) -> None:
    fd = cached.open(shard)
    cached.evict(shard, fd, also_unused=also_unused)
    os.close(fd)


def here(cached: ShardCache) -> list[int]:
    return [row for row in range(cached.rows) if cached.present[row] & 1]


def is_valid(cached: ShardCache, shards: Path, row: int) -> bool:
    shard = cached.shard_of(row)
    start, past = cached.extent(row, row + 1)
    whole = (shards / f"{shard:04d}.tar").read_bytes()
    return cached.path(shard).read_bytes()[start:past] == whole[start:past]


@example([("bring", 0, 5), ("use", 1, 1), ("use", 3, 1), ("evict used", 0, 0)])  # both neighbours stay
@settings(max_examples=settings.default.max_examples // 5)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("bring"), st.integers(0, 15), st.integers(1, 5)),
            st.tuples(st.just("use"), st.integers(0, 15), st.integers(1, 5)),
            st.tuples(st.just("evict used"), st.integers(0, 2), st.just(0)),
            st.tuples(st.just("evict all"), st.integers(0, 2), st.just(0)),
        ),
        max_size=25,
    )
)
def test_cached_row_has_its_bytes_after_any_history(
    shards: Path, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    cached = version(shards, tmp_path_factory.mktemp("cache"))
    expected: dict[int, bool] = {}  # rows that should be here, and whether they were used
    ends = [6, 7, 16]
    for what, number, count in steps:
        if what in ("bring", "use"):
            rows = range(number, min(number + count, next(end for end in ends if end > number)))
            if what == "bring":
                bring(cached, shards, rows.start, rows.stop)
                expected.update({row: False for row in rows if row not in expected})
            else:
                cached.used[rows.start : rows.stop] = USED
                expected.update({row: True for row in rows if row in expected})
        else:
            evict(cached, number, also_unused=what == "evict all")
            gone = [row for row, used in expected.items() if cached.shard_of(row) == number]
            for row in gone:
                if what == "evict all" or expected[row]:
                    del expected[row]
        assert here(cached) == sorted(expected)
        assert all(is_valid(cached, shards, row) for row in expected)
    for shard in range(3):
        evict(cached, shard, also_unused=True)
    assert bytes_in_use(cached.folder.parent.parent) == 0


def test_used_rows_are_evicted_first_and_requested_ones_only_for_urgent_ones(shards: Path, tmp_path: Path) -> None:
    cached = version(shards, tmp_path)
    cached.protect()
    bring(cached, shards, 0, 6)
    bring(cached, shards, 7, 16)
    cached.used[[1, 2, 3, 9, 10, 11, 12]] = USED
    cached.touched[[0, 1]] = time.time()  # shard 2 is the one used least recently
    os.utime(cached.path(0), (1, 1))  # which says nothing
    limit = bytes_in_use(tmp_path)
    space = CacheSpace(tmp_path, limit)
    space.reserve(1000)
    space.end_reservation(1000)
    assert here(cached) == [0, 1, 2, 3, 4, 5, 7, 8, 13, 14, 15]
    assert not space.try_reserve(limit // 2)  # 1, 2 and 3 make no room for so much
    assert here(cached) == [0, 4, 5, 7, 8, 13, 14, 15]
    space.reserve(limit // 2)
    assert here(cached) == [0, 4, 5]


def test_reserved_bytes_count_as_used_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_space, "_PAUSE_S", 0.0)
    space = CacheSpace(tmp_path, 8192)
    space.reserve(4096)
    space.reserve(4096)
    assert not space.try_reserve(4096)
    space.end_reservation(4096)
    space.end_reservation(4096)
    assert space.try_reserve(4096)


def test_rows_without_readers_are_evicted_like_used_ones(shards: Path, tmp_path: Path) -> None:
    cached = version(shards, tmp_path)
    bring(cached, shards, 7, 16)
    assert CacheSpace(tmp_path, bytes_in_use(tmp_path)).try_reserve(1000)
    assert here(cached) == []


def test_file_growing_during_eviction_is_counted_at_its_new_size(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = version(shards, tmp_path)
    cached.protect()
    bring(cached, shards, 7, 9)
    space = CacheSpace(tmp_path, 1)
    open_now, grown = os.open, []

    def written_before(path: Path, *flags: int) -> int:
        if path.suffix == ".tar" and not grown:
            grown.append(True)
            bring(cached, shards, 9, 16)
        return open_now(path, *flags)

    monkeypatch.setattr(os, "open", written_before)
    space.reserve(100)
    assert here(cached) == []
    assert int.from_bytes((tmp_path / "room").read_bytes()[:8], "little") == 100


def test_a_row_that_is_being_written_stays(shards: Path, tmp_path: Path) -> None:
    cached = version(shards, tmp_path)
    bring(cached, shards, 7, 16)
    fd = cached.open(2)
    with range_lock(fd, *cached.extent(9, 10)):
        evict(cached, 2, also_unused=True)
    assert 9 in here(cached)
    assert is_valid(cached, shards, 9)
    os.close(fd)


def test_remains_of_a_killed_download_are_evicted_with_its_shard(shards: Path, tmp_path: Path) -> None:
    cached = version(shards, tmp_path)
    bring(cached, shards, 8, 9)
    fd = cached.open(2)
    os.pwrite(fd, bytes(20_000), cached.extent(10, 11)[0])  # and was killed before the rows were marked
    with range_lock(fd, *cached.extent(14, 15)):
        evict(cached, 2, also_unused=True)
    assert here(cached) == []
    assert bytes_in_use(tmp_path)
    evict(cached, 2, also_unused=True)
    assert not bytes_in_use(tmp_path)
    os.close(fd)


def test_eviction_invalidates_rows_before_dropping_bytes(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = version(shards, tmp_path)
    bring(cached, shards, 7, 16)
    seen: list[tuple[bool, int]] = []
    monkeypatch.setattr(
        shard_cache, "punch_hole", lambda fd, start, stop: seen.append((is_valid(cached, shards, 8), len(here(cached))))
    )
    evict(cached, 2, also_unused=True)
    assert seen == [(True, 0)]


def test_rows_of_another_version_are_never_used(shards: Path, tmp_path: Path) -> None:
    cached = version(shards, tmp_path)
    cached.pin(0, '"before"')
    bring(cached, shards, 0, 6)
    fd = cached.open(0)
    assert cached.is_valid(0, fd, 0, 6)
    (cached.folder / "0.pin").unlink()
    cached.pin(0, '"before"')
    assert ShardCache(cached.folder).is_valid(0, fd, 0, 6)
    (cached.folder / "0.pin").unlink()
    assert cached.pin(0) == ""
    cached.pin(0, '"after"')
    assert not ShardCache(cached.folder).is_valid(0, fd, 0, 6)
    assert here(cached) == []
    os.close(fd)


def test_flags_of_a_wrong_size_that_a_reader_holds_are_an_error(shards: Path, tmp_path: Path) -> None:
    cached = version(shards, tmp_path)
    cached.protect()
    with (cached.folder / "flags").open("ab") as file:
        file.write(b"x")
    with pytest.raises(
        ShardError, match=r"the cache is damaged or of another release. End the runs that use it, and remove it"
    ):
        create_flags(cached.folder)


def test_cache_path_and_size_come_from_arguments_then_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAVABLE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    user = str(os.geteuid())
    assert cache_folder(None) == tmp_path / "savable_pipeline" / "shards" / user
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "b"))
    assert cache_folder(None) == tmp_path / "b" / user
    assert cache_folder(tmp_path / "a") == tmp_path / "a" / user
    monkeypatch.delenv("SAVABLE_CACHE_BYTES", raising=False)
    assert 0 < cache_bytes(None, tmp_path / "a") <= 256 << 30
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", "12")
    assert cache_bytes(None, tmp_path) == 12
    assert cache_bytes(5, tmp_path) == 5
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", "12 GB")
    with pytest.raises(ValueError, match="SAVABLE_CACHE_BYTES must be a number of bytes, not '12 GB'"):
        cache_bytes(None, tmp_path)
    with pytest.raises(ValueError, match="cache_bytes must be at least 1, not 0"):
        cache_bytes(0, tmp_path)
