"""What a user may write for "these shards"."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from savable_pipeline.errors import ShardError
from savable_pipeline.shard_paths import expand_braces, find_shards


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three shards in two folders, and what lies beside them."""
    for name in ("b/000.tar", "b/001.tar", "a.tar", "a.tar.idx", "notes.txt", ".hidden.tar", ".nv-meta/x.tar"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("{0..2}.tar", ["0.tar", "1.tar", "2.tar"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{000..002}", ["000", "001", "002"]),
        ("{10..12}", ["10", "11", "12"]),
        ("{a,b}-{0..1}", ["a-0", "b-0", "a-1", "b-1"]),
        ("{a,b,}x", ["ax", "bx", "x"]),
        ("{5..5}", ["5"]),
        ("no{braces", ["no{braces"]),
        ("{one}", ["{one}"]),
    ],
)
def test_braces_are_spelled_out(pattern: str, expected: list[str]) -> None:
    assert expand_braces(pattern) == expected


def test_an_empty_range_is_an_error() -> None:
    with pytest.raises(ShardError, match=r"\{3\.\.1\} is empty"):
        expand_braces("{3..1}.tar")


def test_a_folder_is_searched_below_and_sorted_by_name(root: Path) -> None:
    assert find_shards(root) == find_shards(str(root)) == find_shards([root])
    assert find_shards(root) == (root, ["a.tar", "b/000.tar", "b/001.tar"])


def test_a_tar_a_glob_braces_and_lists_name_shards_below_their_deepest_folder(root: Path) -> None:
    assert find_shards(root / "a.tar") == (root, ["a.tar"])
    assert find_shards(str(root / "b/*.tar")) == (root / "b", ["000.tar", "001.tar"])
    assert find_shards(str(root / "b/{000..001}.tar")) == (root / "b", ["000.tar", "001.tar"])
    assert find_shards(str(root / "**/0*.tar")) == (root / "b", ["000.tar", "001.tar"])
    assert find_shards([root / "b", root / "a.tar"]) == (root, ["a.tar", "b/000.tar", "b/001.tar"])
    assert find_shards(root / "b" / name for name in ["001.tar", "000.tar"]) == (
        root / "b",
        ["000.tar", "001.tar"],
    )


def test_a_relative_path_keeps_its_meaning_when_the_working_folder_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    assert find_shards("data") == (root, ["a.tar", "b/000.tar", "b/001.tar"])
    assert find_shards("data/b/*.tar") == (root / "b", ["000.tar", "001.tar"])
    assert find_shards(["data/a.tar"]) == (root, ["a.tar"])


def test_a_glob_is_not_disturbed_by_brackets_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run[1]").mkdir()
    (tmp_path / "run[1]" / "a.tar").touch()
    monkeypatch.chdir(tmp_path / "run[1]")
    assert find_shards("*.tar") == (tmp_path / "run[1]", ["a.tar"])


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].tar").touch()
    assert find_shards(tmp_path / "a[1].tar") == (tmp_path, ["a[1].tar"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no such shard or folder"),
        ("b/*.jpg", "no file matches"),
        ("{0..3}.tar", "no such shard or folder"),
        ("s3://bucket/x.tar", "URL"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_it(root: Path, name: str, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        find_shards(name if "://" in name else str(root / name))


def test_a_shard_named_twice_is_an_error(root: Path) -> None:
    with pytest.raises(ShardError, match=r"a\.tar: the same shard is named twice"):
        find_shards([root, root / "a.tar"])


def test_no_shards_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="the list of shards is empty"):
        find_shards([])
    with pytest.raises(ShardError, match=r"no \.tar file in this folder or below it$"):
        find_shards(tmp_path)


def test_compressed_tars_are_pointed_out(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.tar.gz").touch()
    with pytest.raises(ShardError, match="`savable convert` re-packs it"):
        find_shards(tmp_path / "x.tar.gz")
    (tmp_path / "x.tar.gz").rename(root / "x.tgz")
    with caplog.at_level(logging.WARNING):
        assert "x.tgz" not in find_shards(root)[1]
    assert "1 compressed tars are left out" in caplog.text
    (root.parent / "only").mkdir()
    (root / "x.tgz").rename(root.parent / "only" / "x.tgz")
    with pytest.raises(ShardError, match="1 compressed tars are there"):
        find_shards(root.parent / "only")
