"""What a user may write for "these shards": braces too, as braceexpand spells them, and bounded.

Raw files where a dataset is wanted: the error names the command that makes one, or the reader that reads them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.indexing import files_of
from savable_pipeline.data.shards.paths import expand_braces, expand_specs, is_remote, list_files
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import ShardError
from tests.conftest import write_tar
from tests.project.pages import png
from tests.support.toy_sources import litdata


def find_shards(files: Any) -> tuple[Path, list[str]]:
    """The folder of the tars that are named, and their names in it."""
    found = files_of(list_files(files), TARS)
    return found.root, found.names


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three shards in two folders, and what lies beside them."""
    for name in ("b/000.tar", "b/001.tar", "a.tar", "a.tar.idx", "notes.txt", ".hidden.tar", ".nv-meta/x.tar"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    return tmp_path / "data"


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
    ("name", "message", "reason"),
    [
        ("missing", "no such file or folder", "no such path"),
        ("b/*.jpg", "no file matches", "no such path"),
        ("{0..3}.tar", "no such file or folder", "no such path"),
        ("empty", "no .tar file in this folder", "no shard"),
        ("s3://bucket/x.tar", "URL", "damaged shard"),
    ],
)
def test_missing_path_is_an_error_that_names_it(root: Path, name: str, message: str, reason: str) -> None:
    (root / "empty").mkdir()
    with pytest.raises(ShardError, match=message) as caught:
        find_shards(name if "://" in name else str(root / name))
    assert caught.value.reason == reason


def test_a_shard_named_twice_is_an_error(root: Path) -> None:
    with pytest.raises(ShardError, match=r"a\.tar: the same shard is named twice"):
        find_shards([root, root / "a.tar"])


def test_no_shards_at_all_is_an_error(tmp_path: Path) -> None:
    for wrong in (None, 3, b"in", [None], ["in", 3]):
        with pytest.raises(TypeError, match=r"must be a path, a URL, a list of these or a store, not (None|3|b'in')"):
            sp.open_dataset(wrong)  # type: ignore[arg-type]
    for empty in ("", ["in", ""]):
        with pytest.raises(ValueError, match=r'the path of the data is empty\. Write "\." for the current folder'):
            sp.open_dataset(empty)
    with pytest.raises(ShardError, match="the list of shards is empty"):
        find_shards([])
    with pytest.raises(ShardError, match=r"no \.tar file in this folder or below it\. sp\.read"):
        find_shards(tmp_path)


def test_folder_of_compressed_tars_is_an_error_that_says_so(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.tar.gz").touch()
    with pytest.raises(ShardError, match="run `savable convert`"):
        find_shards(tmp_path / "x.tar.gz")
    (tmp_path / "x.tar.gz").rename(root / "x.tgz")
    with caplog.at_level(logging.WARNING):
        assert "x.tgz" not in find_shards(root)[1]
    assert "1 compressed tar files are skipped" in caplog.text
    (root.parent / "only").mkdir()
    (root / "x.tgz").rename(root.parent / "only" / "x.tgz")
    with pytest.raises(ShardError, match="but 1 compressed ones"):
        find_shards(root.parent / "only")


def test_link_to_a_folder_is_skipped_with_a_warning(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "more").symlink_to(tmp_path / "elsewhere")
    find_shards(root)
    assert "more: a link to a folder is skipped" in caplog.text


def test_home_variable_and_file_url_are_expanded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root.parent))
    monkeypatch.setenv("SHARDS", str(root))
    two = ["b/000.tar", "b/001.tar"]
    for name in ("~/data/b", "$SHARDS/b", "${SHARDS}/b", f"file://{root}/b", f"file://localhost{root}/b"):
        assert find_shards(name) == find_shards([name]) == (root / "b", ["000.tar", "001.tar"])
        assert is_remote(name) is False
    assert find_shards("~/data/a.tar::$SHARDS/b/00{0..1}.tar") == (root, ["a.tar", *two])
    assert find_shards(Path("~/data")) == (root, ["a.tar", *two])
    assert expand_specs("s3://$USER_/x::https://h/y") == ["s3://$USER_/x", "https://h/y"]
    assert expand_specs("http://[::1]:80/x::http://[::1]/y") == ["http://[::1]:80/x", "http://[::1]/y"]
    (root.parent / "a b").mkdir()
    (root.parent / "a b" / "x.tar").touch()
    assert find_shards(f"file://{root.parent}/a%20b") == (root.parent / "a b", ["x.tar"])


@pytest.mark.parametrize("name", ["$HOME", "~", "a::b"])
def test_folder_named_like_a_pattern_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "x.tar").touch()
    monkeypatch.chdir(tmp_path)
    assert find_shards(name) == (tmp_path / name, ["x.tar"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pipe:aws s3 cp s3://bucket/{0..9}.tar -", "Write s3://bucket/{0..9}.tar instead"),
        ("pipe:cat x.tar", "Write the paths of the tars, or their URL instead"),
        ("hf://user/name/x.tar", "not a dataset of the Hub. Write hf://datasets/ORG/NAME"),
        ("file://server/x.tar", "names a file of the machine 'server'"),
        ("$NO_SUCH_VARIABLE/x", "The environment has no such variable"),
    ],
)
def test_syntax_of_other_loaders_is_an_error_that_says_what_to_write(name: str, told: str) -> None:
    with pytest.raises(ShardError, match=re.escape(told)):
        find_shards(name)
    if not name.startswith("$"):
        with pytest.raises(ShardError, match=re.escape(told)):
            is_remote(name)


def test_lance_folder_is_an_error_with_a_fix(tmp_path: Path) -> None:
    for name in ("data/a.lance", "_versions/1.manifest", "_transactions/0.txn"):
        (tmp_path / "x.lance" / name).parent.mkdir(parents=True)
        (tmp_path / "x.lance" / name).write_bytes(b"LANC")
    with pytest.raises(
        ShardError, match=r"\.lance is not read here \(data/a\.lance\): write it as Parquet, `pyarrow.*`"
    ):
        sp.open_dataset(tmp_path / "x.lance")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("{0..2}.tar", ["0.tar", "1.tar", "2.tar"]),
        ("{8..011}", ["008", "009", "010", "011"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{0..9..4}", ["0", "4", "8"]),
        ("{a..e..2}", ["a", "c", "e"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{a,b,}x", ["ax", "bx", "x"]),
        ("{a,b{1,2}c}", ["a", "b1c", "b2c"]),
        ("{5..5}", ["5"]),
        ("{0..9999..1000}" * 2, [f"{a}{b}" for a in range(0, 10_000, 1000) for b in range(0, 10_000, 1000)]),
        ("{{1,2}}", ["{1}", "{2}"]),
        ("no{braces", ["no{braces"]),
        ("{a{1,2}", ["{a{1,2}"]),
        ("{one}", ["{one}"]),
        ("{}", ["{}"]),
    ],
)
def test_braces_expand_to_all_names(pattern: str, expected: list[str]) -> None:
    assert expand_braces(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("{0..9999999}", "mean more than 1,000,000 names"),
        ("{0..999}{0..999}{0..9}", "mean more than 1,000,000 names"),
        ("{1,2}" * 64, "mean more than 1,000,000 names"),
        ("{{0..600000},{0..600000}}", "mean more than 1,000,000 names"),
        ("{0..99999}" + "x" * 10_000, "or too long ones"),
        ("{" * 1000 + "a,b" + "}" * 1000, "mean more than 1,000,000 names"),
    ],
)
def test_braces_that_mean_too_many_names_are_an_error(pattern: str, told: str) -> None:
    with pytest.raises(ShardError, match=told):
        expand_braces(pattern)


def test_long_pattern_of_unmatched_braces_is_fast() -> None:
    assert expand_braces("}" * 100_000) == ["}" * 100_000]
    with pytest.raises(ShardError, match="the braces mean more than"):
        expand_braces("{" * 100_000)


LANE = sp.Lane()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Pictures with features beside them, below a folder with a space in its name."""
    folder = tmp_path / "my photos"
    (folder / "below").mkdir(parents=True)
    for name in ("a", "b"):
        (folder / f"below/{name}.png").write_bytes(png(1))
        (folder / f"below/{name}.npy").write_bytes(b"features")
    return folder


@pytest.mark.parametrize(
    "opened",
    [
        lambda path: sp.TarShardReader(path, LANE),
        lambda path: sp.TarShardReader([path], LANE),
        lambda path: custom.ParquetReader(path, LANE),
        lambda path: custom.ArrowReader(path, LANE),
        lambda path: custom.JsonlReader(path, LANE),
    ],
)
def test_every_shard_reader_names_the_command_that_converts_raw_files(
    photos: Path, opened: Callable[[Path], Any]
) -> None:
    with pytest.raises(
        sp.ShardError, match=r"below it\. sp\.read\(…\) reads files of any kind, and `savable convert SRC"
    ):
        opened(photos)


def test_litdata_folder_is_not_mistaken_for_tokens(tmp_path: Path) -> None:
    assert sp.open_dataset(litdata(tmp_path / "lit"))[0].json()


@pytest.mark.parametrize("opened", [lambda path: sp.TarShardReader(path, LANE), sp.open_dataset])
def test_a_folder_for_shards_that_is_empty_or_missing_names_the_command_that_fills_it(
    tmp_path: Path, opened: Callable[[str], Any]
) -> None:
    (tmp_path / "new shards/.cache").mkdir(parents=True)
    (tmp_path / "new shards/.cache/a.png").touch()
    faults = {"new shards": "below it. sp.read(…) reads", "none": "no such file or folder. Check the path"}
    for name, fault in faults.items():
        with pytest.raises(sp.ShardError, match=re.escape(fault)):
            opened(f"{tmp_path / name}")


def test_missing_file_and_row_folder_do_not_suggest_conversion(tmp_path: Path) -> None:
    for missing in (tmp_path / "0.tar", tmp_path / "$NONE/shards"):
        with pytest.raises(sp.ShardError, match=r"no such file or folder(?!(.|\n)*convert)"):
            sp.TarShardReader(missing, LANE)
    with pytest.raises(sp.ShardError, match=r"no such file or folder. Check the path$"):
        custom.ParquetReader(tmp_path / "rows", LANE)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("captions.csv", r"captions\.csv: a file of the kind csv, not tar\. sp\.read\(…\) reads any kind"),
        ("captions.tsv.gz", r"a file of the kind csv, not tar"),
        ("photo.png", r"no tar header at byte 0"),
    ],
)
def test_table_or_photo_is_not_a_tar(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / name).write_bytes(b"a,b\n1,2\n")
    with pytest.raises(sp.ShardError, match=told):
        sp.TarShardReader(tmp_path / name, LANE)


def test_compressed_table_is_an_error_that_names_the_command_for_it(tmp_path: Path) -> None:
    (tmp_path / "captions.tsv.gz").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(sp.ShardError, match="Unpack it, or run `savable convert`"):
        sp.open_dataset(tmp_path / "captions.tsv.gz")


def test_colon_separated_folders_are_the_shards_of_both(tmp_path: Path) -> None:
    for name in "ab":
        write_tar(tmp_path / name / "0.tar", [(f"{name}.txt", b"")])
        (tmp_path / name / "x.jsonl").write_text(f'{{"key": "{name}"}}\n')
    both = f"{tmp_path / 'a'}::{tmp_path / 'b'}"
    assert [sample.key for sample in sp.open_dataset(both)] == ["a", "b"]
    lines = custom.JsonlReader(both, sp.Lane(), key="key", shuffle=False, epochs=1)
    assert [sample.key for sample in lines] == ["a", "b"]
