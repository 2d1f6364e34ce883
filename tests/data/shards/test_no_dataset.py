"""Raw files where a dataset is wanted: the error names the command that makes one, or the reader that reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from tests.conftest import write_tar
from tests.project.pages import png
from tests.support.toy_sources import litdata

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
def test_every_reader_of_shards_says_which_command_makes_a_dataset_of_raw_files(
    photos: Path, opened: Callable[[Path], Any]
) -> None:
    with pytest.raises(sp.ShardError) as caught:
        opened(photos)
    assert str(caught.value).endswith(f"below it; `savable convert '{photos}' DST` makes a dataset of its files")


def test_a_folder_of_litdata_is_not_taken_for_one_of_tokens(tmp_path: Path) -> None:
    assert sp.open_dataset(litdata(tmp_path / "lit"))[0].json()


def test_files_of_another_reader_are_named_with_it(tmp_path: Path) -> None:
    write_tar(tmp_path / "a/0.tar", [("k.txt", b"1")])
    with pytest.raises(sp.ShardError, match=r"below it; 0\.tar is there, which sp\.TarShardReader reads$"):
        custom.ParquetReader(tmp_path, LANE)


@pytest.mark.parametrize("opened", [lambda path: sp.TarShardReader(path, LANE), sp.open_dataset])
def test_a_folder_for_shards_that_is_empty_or_missing_names_the_command_that_fills_it(
    tmp_path: Path, opened: Callable[[str], Any]
) -> None:
    (tmp_path / "new shards/.cache").mkdir(parents=True)
    (tmp_path / "new shards/.cache/a.png").touch()
    for name, fault in (("new shards", "in this folder or below it"), ("none", "no such shard or folder")):
        with pytest.raises(sp.ShardError) as caught:
            opened(f"{tmp_path / name}")
        folder = f"'{tmp_path / name}'" if " " in name else tmp_path / name
        assert str(caught.value).endswith(
            f"{fault}; `savable convert SRC {folder}` writes shards there of the files or the table SRC"
        )


def test_a_missing_file_and_a_folder_for_rows_are_nothing_to_convert_into(tmp_path: Path) -> None:
    for missing in (tmp_path / "0.tar", tmp_path / "$NONE/shards"):
        with pytest.raises(sp.ShardError, match=r"no such shard or folder(?!.*convert)"):
            sp.TarShardReader(missing, LANE)
    with pytest.raises(sp.ShardError, match=r"no such shard or folder$"):
        custom.ParquetReader(tmp_path / "rows", LANE)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("captions.csv", r"captions\.csv: is a file of the kind csv, not tar; sp\.read\(…\) reads any kind"),
        ("captions.tsv.gz", r"is a file of the kind csv, not tar"),
        ("photo.png", r"no tar; `savable convert .* DST` makes a dataset of its folder$"),
    ],
)
def test_a_table_or_a_photo_is_no_tar(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / name).write_bytes(b"a,b\n1,2\n")
    with pytest.raises(sp.ShardError, match=told):
        sp.TarShardReader(tmp_path / name, LANE)
    assert not (tmp_path / ".nv-meta").exists()


def test_a_compressed_table_says_what_reads_it(tmp_path: Path) -> None:
    (tmp_path / "captions.tsv.gz").write_bytes(b"a,b\n1,2\n")
    with pytest.raises(sp.ShardError, match="`savable convert` reads, and `gzip -dk` or `zstd -d` unpacks it"):
        sp.open_dataset(tmp_path / "captions.tsv.gz")
