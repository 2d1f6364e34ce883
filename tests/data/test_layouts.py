"""The layouts of data that open without settings: the kind, the number of samples and the parts of the first sample.

This table specifies the recognizer. A layout that is read otherwise today is an expected
failure, with what happens now. Of the layouts to come, the formats of other loaders (MDS, LitData, LeRobot) and the
manifests of audio (Kaldi, NeMo, Lhotse) are not in it yet, nor what a conversion makes of each.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline.data.stores.opening import find_source
from tests.conftest import write_tar

JPG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffd9")


class Layout(NamedTuple):
    """How it is written, and what opening it gives."""

    name: str
    write: Callable[[Path], None]
    kind: str
    samples: int
    parts: frozenset[str]
    wrong: str = ""  # what happens today instead


def put(root: Path, **files: bytes | str) -> None:
    """Write files; `__` in a name is a slash and `_dot_` a dot, at which Python's names end."""
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write(root: Path, files: dict[str, bytes | str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def tar(root: Path, name: str = "00000.tar") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    write_tar(
        root / name, [(f"{n}.{end}", JPG if end == "jpg" else b"{}") for n in range(3) for end in ("jpg", "json")]
    )


def parquet(root: Path, name: str = "part-0.parquet") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), root / name)


def arrow(root: Path, name: str = "data.arrow") -> None:
    feather.write_feather(pa.table({"text": ["a", "b", "c"]}), root / name, compression="uncompressed")


def jsonl(root: Path, name: str = "data.jsonl") -> None:
    write(root, {name: '{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n'})


def table(root: Path, name: str = "data.csv") -> None:
    write(root, {name: "text\na\nb\nc\n"})


def images(root: Path, *folders: str) -> None:
    write(root, {f"{folder}{n}.jpg": JPG for folder in folders or ("",) for n in range(3)})


def both(*writers: Callable[[Path], None]) -> Callable[[Path], None]:
    def all_of(root: Path) -> None:
        for each in writers:
            each(root)

    return all_of


def named(writer: Callable[..., None], *names: str) -> Callable[[Path], None]:
    return both(*((lambda root, name=name: writer(root, name)) for name in names))


def files(**content: bytes | str) -> Callable[[Path], None]:
    return lambda root: put(root, **content)


def metadata(ending: str) -> Callable[[Path], None]:
    """Images with the metadata of HF's image folder."""

    def both_of(root: Path) -> None:
        images(root)
        rows = [{"file_name": f"{n}.jpg", "text": f"caption {n}"} for n in range(3)]
        if ending == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), root / "metadata.parquet")
        elif ending == "jsonl":
            write(root, {"metadata.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
        else:
            text = io.StringIO()
            writer = csv.DictWriter(text, ["file_name", "text"])
            writer.writeheader()
            writer.writerows(rows)
            write(root, {"metadata.csv": text.getvalue()})

    return both_of


def hub_snapshot(root: Path) -> None:
    """A file in `blobs/`, and a link to it in the snapshot, which is what a user names."""
    (root.parent / "blobs").mkdir()
    parquet(root.parent, "blobs/0123abcd")
    (root / "data").mkdir()
    (root / "data" / "train-00000-of-00001.parquet").symlink_to("../../blobs/0123abcd")


def npy_pairs(root: Path) -> None:
    for n in range(3):
        np.save(root / f"{n}.npy", np.arange(4))
        (root / f"{n}.txt").write_text("caption")


def pairs(*endings: str) -> Callable[[Path], None]:
    return lambda root: write(root, {f"{n}.{end}": JPG if end == "jpg" else "{}" for n in range(3) for end in endings})


def nested(folder: str) -> Callable[[Path], None]:
    return lambda root: pairs("jpg", "json")(root / folder)


PEOPLE = files(README_dot_md="# data", LICENSE="MIT")
STATE = json.dumps({"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "1", "_format_type": None})
RECORD, ROW = frozenset({"json", "text"}), frozenset({"json"})
TEXT, PAIR, IMAGE = frozenset({"text"}), frozenset({"jpg", "json"}), frozenset({"jpg"})
CAPTIONED = frozenset({"jpg", "json"})

LAYOUTS = [
    Layout("one tar", tar, "tar", 3, PAIR),
    Layout("tars in folders", named(tar, "a/0.tar", "b/0.tar"), "tar", 6, PAIR),
    Layout(
        "img2dataset",
        both(tar, named(parquet, "00000.parquet"), files(**{"00000_stats_dot_json": "{}"})),
        "tar",
        3,
        PAIR,
    ),
    Layout("tars with README and LICENSE", both(tar, PEOPLE), "tar", 3, PAIR),
    Layout("tars beside a hidden file", both(tar, files(_dot_DS_Store="x")), "tar", 3, PAIR),
    Layout("one Parquet file", parquet, "parquet", 3, TEXT),
    Layout("Parquet files in folders", named(parquet, "train/0.parquet", "train/1.parquet"), "parquet", 6, TEXT),
    Layout("Spark", both(parquet, files(_SUCCESS="", **{"_dot_part-0_dot_parquet_dot_crc": "x"})), "parquet", 3, TEXT),
    Layout(
        "Hive partitions",
        named(parquet, "lang=de/0.parquet", "lang=en/0.parquet"),
        "parquet",
        6,
        frozenset({"lang", "text"}),
    ),
    Layout("Parquet with README and LICENSE", both(parquet, PEOPLE), "parquet", 3, TEXT),
    Layout("Hub snapshot with links", hub_snapshot, "parquet", 3, TEXT),
    Layout("one Arrow file", arrow, "arrow", 3, TEXT),
    Layout(
        "saved by HF datasets", both(arrow, files(state_dot_json=STATE, dataset_info_dot_json="{}")), "arrow", 3, TEXT
    ),
    Layout("one JSONL file", jsonl, "jsonl", 3, RECORD),
    Layout("JSONL files in folders", named(jsonl, "a/0.jsonl", "b/0.jsonl"), "jsonl", 6, RECORD),
    Layout("JSONL with README and LICENSE", both(jsonl, PEOPLE), "jsonl", 3, RECORD),
    Layout("one CSV file", table, "csv", 3, ROW),
    Layout("CSV with README", both(table, PEOPLE), "csv", 3, ROW),
    Layout("images alone", images, "folder", 3, IMAGE),
    Layout("images in folders of classes", lambda root: images(root, "cat/", "dog/"), "folder", 6, IMAGE),
    Layout("images with README and LICENSE", both(images, PEOPLE), "folder", 3, IMAGE),
    Layout("images with a stray table", both(images, table, PEOPLE), "folder", 3, IMAGE),
    Layout("jpg and json pairs", pairs("jpg", "json"), "folder", 3, PAIR),
    Layout("jpg and json pairs beside a stray data.jsonl", both(pairs("jpg", "json"), jsonl), "folder", 3, PAIR),
    Layout("jpg and txt pairs", pairs("jpg", "txt"), "folder", 3, frozenset({"jpg", "txt"})),
    Layout("npy and txt pairs", npy_pairs, "folder", 3, frozenset({"npy", "txt"})),
    Layout("HF image folder with metadata.jsonl", metadata("jsonl"), "jsonl", 3, CAPTIONED),
    Layout("HF image folder with metadata.csv", metadata("csv"), "csv", 3, CAPTIONED),
    Layout(
        "HF image folder with metadata.parquet",
        metadata("parquet"),
        "folder",
        3,
        CAPTIONED,
        "an error that asks to choose",
    ),
    Layout("tars of a train and a test folder", named(tar, "train/0.tar", "test/0.tar"), "tar", 6, PAIR),
    Layout("tars beside a Parquet file of another name", both(tar, named(parquet, "urls.parquet")), "tar", 3, PAIR),
    Layout("tars beside a CSV table", both(tar, table), "tar", 3, PAIR),
    Layout("Parquet files with the ending .pq", named(parquet, "a.pq", "b.pq"), "parquet", 6, TEXT),
    Layout("Spark in folders", both(named(parquet, "a/0.parquet"), files(a___SUCCESS="")), "parquet", 3, TEXT),
    Layout("Parquet beside Croissant's metadata", both(parquet, files(croissant_dot_json="{}")), "parquet", 3, TEXT),
    Layout("Hub dataset with .gitattributes", both(parquet, files(_dot_gitattributes="x")), "parquet", 3, TEXT),
    Layout("Feather file", named(arrow, "a.feather"), "arrow", 3, TEXT),
    Layout("NDJSON file", named(jsonl, "a.ndjson"), "jsonl", 3, RECORD),
    Layout("JSONL beside its dataset_info.json", both(jsonl, files(dataset_info_dot_json="{}")), "jsonl", 3, RECORD),
    Layout("two CSV files", named(table, "a.csv", "b.csv"), "csv", 6, ROW),
    Layout("CSV with LICENSE", both(table, files(LICENSE="MIT")), "csv", 3, ROW),
    Layout("JSON list", files(a_dot_json='[{"text": "a"}, {"text": "b"}]'), "json", 2, ROW),
    Layout("jpg, json and txt of one stem", pairs("jpg", "json", "txt"), "folder", 3, PAIR | {"txt"}),
    Layout("pairs in folders of splits", both(*(nested(name) for name in ("train", "val"))), "folder", 6, PAIR),
    Layout("images beside Thumbs.db", both(images, files(Thumbs_dot_db="x")), "folder", 3, IMAGE),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.xfail(reason=each.wrong, strict=True) if each.wrong else ())
        for each in LAYOUTS
    ],
)
def test_a_layout_opens_without_settings(layout: Layout, root: Path) -> None:
    layout.write(root)
    assert find_source(str(root)).format.name == layout.kind
    samples = sp.open_dataset(root)
    assert len(samples) == layout.samples
    assert frozenset(samples[0]) == layout.parts
