"""The mark beside an index of many shards: nothing is listed where it holds, and whatever changed a folder ends it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.shards import indexing, paths
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.shards.metadata import INDEX_NAME, META
from savable_pipeline.data.stores.tar_store import TARS
from tests.conftest import write_tar

MARK = f"{INDEX_NAME}.fresh"


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards are many, and a clock of a thousandth of a second."""
    monkeypatch.setattr(indexing, "MARKED_SHARDS", 2)
    monkeypatch.setattr(indexing, "_QUIET_NS", 100_000_000)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The folders that were listed."""
    found: list[Any] = []
    find = paths.list_files

    def noted(files: Any) -> Any:
        found.append(files)
        return find(files)

    monkeypatch.setattr(paths, "list_files", noted)
    return found


@pytest.fixture
def root(tmp_path: Path, listed: list[Any]) -> Path:
    """Three shards in two folders, indexed and marked, and an empty folder."""
    for name in ("a/0.tar", "a/1.tar", "b/2.tar"):
        write_tar(tmp_path / "data" / name, [(f"{name[2]}.txt", name.encode())])
    (tmp_path / "data/c").mkdir()
    index_files(tmp_path / "data", TARS)
    assert (tmp_path / "data" / MARK).exists()
    listed.clear()
    return tmp_path / "data"


def texts(root: Path, **how: Any) -> list[str]:
    return [sample.text() for sample in sp.TarShardReader(root, sp.Lane(), shuffle=False, epochs=1, **how)]


ALL = ["a/0.tar", "a/1.tar", "b/2.tar"]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_valid_mark_avoids_listing_and_stat(
    root: Path, listed: list[Any], monkeypatch: pytest.MonkeyPatch, on_error: Any
) -> None:
    monkeypatch.setattr(indexing, "_CurrentFiles", None)
    assert texts(root, on_error=on_error) == ALL
    assert not listed


def added(root: Path) -> None:
    write_tar(root / "c/3.tar", [("3.txt", b"c/3.tar")])


def replaced(root: Path) -> None:
    write_tar(root / "aside", [("1.txt", b"another"), ("2.txt", b"x" * 20_000)])
    (root / "aside").replace(root / "a/1.tar")


def listed_by_energon(root: Path) -> None:
    (root / META / ".info.json").write_text('{"shard_counts": {"a/0.tar": 1, "z.tar": 1}}')


CHANGES: dict[str, tuple[Callable[[Path], object], Any]] = {
    "added": (added, [*ALL, "c/3.tar"]),
    "replaced": (replaced, ["a/0.tar", "another", "x" * 20_000, "b/2.tar"]),
    "removed": (lambda root: (root / "b/2.tar").unlink(), "1 indexed shards are gone, such as b/2.tar"),
    "moved": (lambda root: (root / "b").rename(root / "d"), "1 indexed shards are gone"),
    "in Energon's list": (listed_by_energon, "z.tar: No such file"),
    "the index damaged": (lambda root: os.truncate(root / INDEX_NAME, 50), ALL),
    "the mark damaged": (lambda root: os.truncate(root / MARK, 9), ALL),
    "the mark of another index": (lambda root: (root / MARK).write_bytes(b"\x93\xc4\x00\x80\x80"), ALL),
    "touched": (lambda root: os.utime(root / "a"), ALL),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_folder_invalidates_the_mark(root: Path, listed: list[Any], change: str) -> None:
    work, expected = CHANGES[change]
    work(root)
    if isinstance(expected, str):
        with pytest.raises(sp.ShardError, match=expected):
            texts(root)
    else:
        assert texts(root) == expected
    assert listed


def test_shard_overwritten_in_place_is_an_error_once_and_reindexed_at_the_next_start(root: Path) -> None:
    with (root / "a/1.tar").open("r+b") as file:
        other = root.parent / "other.tar"
        write_tar(other, [("1.txt", b"another"), ("2.txt", b"x" * 20_000)])
        file.write(other.read_bytes())
    with pytest.raises(sp.ShardError, match=r"a/1\.tar: .*Start again to index it"):
        texts(root)
    assert not (root / MARK).exists()
    assert texts(root) == ["a/0.tar", "another", "x" * 20_000, "b/2.tar"]


def test_start_that_listed_everything_writes_the_mark(root: Path, listed: list[Any]) -> None:
    (root / MARK).unlink()
    texts(root)
    assert listed == [str(root)] and (root / MARK).exists()
    texts(root)
    assert listed == [str(root)]


def test_folders_that_changed_a_moment_ago_are_not_marked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / MARK).unlink()
    monkeypatch.setattr(indexing, "_QUIET_NS", 10**13)
    texts(root)
    assert not (root / MARK).exists()


def test_file_system_without_folder_times_is_not_marked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / MARK).unlink()
    stat, before = Path.stat, (root / META).stat()
    monkeypatch.setattr(Path, "stat", lambda path, **how: before if path == root / META else stat(path, **how))
    assert texts(root) == ALL
    assert not (root / MARK).exists()


def test_damaged_shard_is_reported_each_time(root: Path, listed: list[Any]) -> None:
    os.truncate(root / "b/2.tar", 700)
    index_files(root, TARS)
    assert (root / MARK).exists()
    listed.clear()
    assert texts(root, on_error="skip") == ALL[:2]
    assert not listed
    with pytest.raises(sp.ShardError, match=r"b/2\.tar: truncated"):
        texts(root)


def test_copied_dataset_has_no_mark_until_it_was_listed(root: Path, listed: list[Any]) -> None:
    shutil.copytree(root, root.parent / "copy")
    (root.parent / "copy/b/2.tar").unlink()
    with pytest.raises(sp.ShardError, match="are gone"):
        texts(root.parent / "copy")
    assert open_any(root).count == 3
