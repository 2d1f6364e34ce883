"""Reading data leaves nothing beside it that other tools take for data, each of which is asked itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import webdataset as wds
from sklearn.datasets import load_files
from torchvision.datasets import ImageFolder

import savable_pipeline as sp
from tests.conftest import MakeShards
from tests.tools.cli.test_main import run

JPG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffd9")


def names_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def classes(root: Path, ending: str = "jpg") -> None:
    for name in ("cat/1", "dog/2"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / f"{name}.{ending}").write_bytes(JPG)


def read_all(root: Path, **settings: Any) -> None:
    """Read as a user does, also by key and with facts about media."""
    samples = sp.open_dataset(root, **settings)
    assert samples[samples[1].key].key == samples[1].key
    assert len([*sp.read(str(root), epochs=1, **settings)]) == len(samples)


def test_torchvision_reads_a_folder_of_classes_after_us(tmp_path: Path) -> None:
    classes(tmp_path)
    before = names_below(tmp_path)
    expected = ImageFolder(tmp_path).samples
    read_all(tmp_path, classes=True)
    assert run("index", str(tmp_path)).exit_code == 0
    assert ImageFolder(tmp_path).samples == expected and names_below(tmp_path) == before


def test_torchvision_reads_a_folder_of_classes_with_a_table_after_us(tmp_path: Path) -> None:
    classes(tmp_path)
    (tmp_path / "metadata.csv").write_text("file_name,text\ncat/1.jpg,a\ndog/2.jpg,b\n")
    expected = ImageFolder(tmp_path).samples
    read_all(tmp_path)
    assert ImageFolder(tmp_path).samples == expected


def test_scikit_learn_reads_a_folder_of_texts_after_us(tmp_path: Path) -> None:
    classes(tmp_path, "txt")
    expected = load_files(tmp_path, shuffle=False)
    read_all(tmp_path)
    read_all(tmp_path)
    (tmp_path / "cat/3.txt").write_bytes(JPG)
    read_all(tmp_path / "cat")  # one class by itself
    found = load_files(tmp_path, shuffle=False)
    assert found.target_names == expected.target_names and len(found.data) == 3


def test_listing_a_folder_of_images_returns_only_the_images_after_us(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(JPG)
    read_all(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0.jpg", "1.jpg", "2.jpg"]  # noqa: PTH208


@pytest.mark.parametrize("folders", [("",), ("lang=de/", "lang=en/")])
def test_pyarrow_reads_a_folder_of_parquet_after_us(folders: tuple[str, ...], tmp_path: Path) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / folder / "0.parquet")
    expected = pyarrow.dataset.dataset(tmp_path, partitioning="hive").to_table(), pq.read_table(tmp_path)
    read_all(tmp_path)
    assert pyarrow.dataset.dataset(tmp_path, partitioning="hive").to_table() == expected[0]
    assert pq.read_table(tmp_path) == expected[1]


def test_webdataset_reads_a_glob_of_tars_after_us(make_shards: MakeShards) -> None:
    root = make_shards([2, 3])
    expected = sorted(root.glob("*.tar"))
    read_all(root)
    assert sorted(root.glob("**/*.tar")) == expected
    shards = wds.WebDataset([str(path) for path in expected], shardshuffle=False)
    assert [sample["__key__"] for sample in shards] == [f"s{number:06d}" for number in range(5)]


def test_reading_writes_only_the_index_of_tars_into_the_folder(make_shards: MakeShards, tmp_path: Path) -> None:
    """As Polars takes all files of a folder, and HF `datasets` all that are not hidden."""
    root = tmp_path / "tables"
    root.mkdir()
    for write, kind in ((pq.write_table, "parquet"), (feather.write_feather, "arrow"), (pyarrow.csv.write_csv, "csv")):
        write(pa.table({"text": ["a", "b"]}), root / f"0.{kind}")
        before = names_below(root)
        read_all(root / f"0.{kind}")
        assert names_below(root) == before
    (root / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    read_all(root / "a.jsonl")
    assert not (root / ".nv-meta").exists()
    shards = make_shards([2, 3])
    read_all(shards)
    assert sorted(path.name for path in shards.iterdir()) == [".nv-meta", "0000.tar", "0001.tar"]
    assert run("index", str(shards)).exit_code == 0 and (shards / "0001.tar.idx").exists()
    assert run("index", str(root / "a.jsonl")).exit_code == 0
    assert (root / ".nv-meta/savable.jsonl.index").exists()


@pytest.mark.parametrize("kind", ["parquet", "ndjson", "csv", "ipc"])
def test_polars_reads_a_folder_of_tables_after_us(kind: str, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="the extra [bench]")
    for number in range(2):
        path = tmp_path / f"{number}.{ {'ndjson': 'jsonl', 'ipc': 'arrow'}.get(kind, kind) }"
        getattr(polars.DataFrame({"text": ["a", "b"]}), f"write_{kind}")(path)
    expected = getattr(polars, f"scan_{kind}")(tmp_path).collect().to_dicts()
    read_all(tmp_path)
    assert getattr(polars, f"scan_{kind}")(tmp_path).collect().to_dicts() == expected


@pytest.mark.parametrize("kind", ["webdataset", "imagefolder", "parquet"])
def test_hf_datasets_reads_a_folder_after_us(
    kind: str, make_shards: MakeShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra [bench]")
    root = tmp_path / "shards"
    if kind == "webdataset":
        make_shards([2, 3])
    else:
        root.mkdir()
        classes(root) if kind == "imagefolder" else pq.write_table(pa.table({"text": ["a", "b"]}), root / "0.parquet")
    read_all(root)
    found = datasets.load_dataset(kind, data_dir=str(root), cache_dir=str(tmp_path / "cache"), split="train")
    assert len(found) == (5 if kind == "webdataset" else 2)


def test_cached_index_of_a_replaced_folder_is_rebuilt(tmp_path: Path) -> None:
    """Another folder of the same path is another dataset, also for a run that tolerates lost files."""
    root = tmp_path / "data"
    for text in ("one", "other"):
        root.mkdir()
        (root / f"{text}.txt").write_text(text)
        assert [sample.text() for sample in sp.read(str(root), epochs=1, on_error="skip")] == [text]
        (root / f"{text}.txt").unlink()
        root.rename(tmp_path / text)
