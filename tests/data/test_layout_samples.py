"""The keys and the bytes of every part of each layout, by libraries that are not ours, and the commands on them.

The oracles are webdataset, pyarrow, csv and json; of folders, Kaldi and Lhotse Shar ten lines that follow their rules.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds

import savable_pipeline as sp
from savable_pipeline.data.dataset.info import dataset_info
from savable_pipeline.data.stores.opening import index_any
from savable_pipeline.tools.check.dataset_check import check_dataset
from savable_pipeline.tools.preview.dataset_page import preview_dataset
from tests.data.test_layouts import LAYOUTS, Layout

Samples: TypeAlias = dict[str, dict[str, bytes]]
OPEN = [pytest.param(each, id=each.name) for each in LAYOUTS if not each.error]
WASTE = (".crc", ".idx", ".index", ".fresh", ".tmp", ".part", ".md5")


def visible(root: Path) -> list[Path]:
    """The files that no desktop, archive, NAS, engine or writer has left, in the order of their names."""
    names = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    hidden = ("__MACOSX", "@eaDir")
    shown = [name for name in names if not any(part.startswith((".", "_")) or part in hidden for part in name.parts)]
    return [root / name for name in shown if not name.name.endswith(WASTE)]


def ending(*suffixes: str) -> Callable[[Path], list[Path]]:
    """The files that end so, or have no suffix."""
    return lambda root: [
        path for path in visible(root) if path.suffix.lower() in (*suffixes, "") and path.name[0] != "L"
    ]


def of_tars(root: Path) -> Samples:
    urls = [str(path) for path in ending(".tar")(root)]
    found = wds.WebDataset(urls, shardshuffle=False, empty_check=False)
    return {
        sample["__key__"]: {name: data for name, data in sample.items() if not name.startswith("__")}
        for sample in found
    }


def as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()


def named_files(path: Path, fields: dict[str, Any]) -> dict[str, bytes]:
    """The files that a row names, by suffix; the second of one suffix has its field before it."""
    found: dict[str, bytes] = {}
    for field, value in fields.items():
        file = path.parent / str(value)
        if isinstance(value, str) and file.suffix and file.is_file():
            part = file.suffix[1:]
            found[f"{field}.{part}" if part in found else part] = file.read_bytes()
    return found


def of_rows(root: Path, path: Path, rows: list[dict[str, Any]], texts: list[bytes]) -> Iterator[tuple[str, Any]]:
    """Rows as JSON, with the files that some of them name as parts, else with their fields."""
    files = [named_files(path, row) for row in rows]
    for number, (row, text, named) in enumerate(zip(rows, texts, files, strict=True)):
        fields = {} if any(files) or path.suffix.lower() in (".csv", ".tsv") or path.read_bytes()[:1] == b"[" else row
        parts = named or {name: as_bytes(value) for name, value in fields.items()}
        yield f"{path.relative_to(root)}:{number}", {"json": json.loads(text), **parts}


def of_texts(root: Path) -> Samples:
    found: dict[str, Any] = {}
    for path in ending(".jsonl", ".ndjson", ".json", ".csv", ".tsv")(root):
        raw = path.read_bytes()
        if path.suffix.lower() in (".csv", ".tsv"):
            delimiter = "\t" if path.suffix == ".tsv" else ","
            rows = list(csv.DictReader(raw.decode().splitlines(), delimiter=delimiter))
            texts = [json.dumps(row).encode() for row in rows]
        elif raw[:1] == b"[":
            rows = json.loads(raw)
            texts = [json.dumps(row).encode() for row in rows]
        elif b"}\n{" in raw or path.suffix.lower() in (".jsonl", ".ndjson"):
            texts = raw.splitlines()
            rows = [json.loads(line) for line in texts]
        else:
            continue
        found |= dict(of_rows(root, path, rows, texts))
    return found


def of_parquet(root: Path) -> Samples:
    found: dict[str, Any] = {}
    for path in ending(".parquet", ".pq")(root):
        rows = pq.ParquetFile(path).read().to_pylist()
        partitions = dict(part.split("=") for part in path.relative_to(root).parts[:-1] if "=" in part)
        for number, row in enumerate(rows):
            named = named_files(path, row)
            parts = {name: as_bytes(value) for name, value in (row | partitions).items()}
            found[f"{path.relative_to(root)}:{number}"] = {"json": row, **named} if named else parts
    return found


def of_arrow(root: Path) -> Samples:
    found = {}
    for path in ending(".arrow", ".feather")(root):
        if not path.name.startswith(("cache-", "tmp")):
            for number, row in enumerate(pa.ipc.open_file(path).read_all().to_pylist()):
                found[f"{path.relative_to(root)}:{number}"] = {name: as_bytes(value) for name, value in row.items()}
    return found


def of_folder(root: Path) -> Samples:
    """What shares a path up to the first dot; beside media no README, and no table that stands alone."""
    found: Samples = {}
    for path in visible(root):
        key, _, part = path.name.partition(".")
        found.setdefault(str(path.relative_to(root).with_name(key)), {})[part] = path.read_bytes()
    alone = {"md", "csv", "jsonl", "parquet", "", "db"}
    return {key: parts for key, parts in found.items() if not (set(parts) <= alone or key.endswith("_stats"))}


ORACLES: dict[str, Callable[[Path], Samples]] = {
    "tar": of_tars,
    "parquet": of_parquet,
    "arrow": of_arrow,
    "jsonl": of_texts,
    "json": of_texts,
    "csv": of_texts,
    "folder": of_folder,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def comparable(samples: Any) -> Any:
    """The samples by key; of parts that are JSON, what they hold."""
    found: dict[str, Any] = {}
    for key, parts in samples:
        found[key] = {}
        for name, data in parts.items():
            value = data
            if name.rpartition(".")[2] == "json" and isinstance(data, bytes):
                value = json.loads(data)
            found[key][name] = value
    return found


def parts_of(root: Path) -> Any:
    return comparable((sample.key, {name: sample[name] for name in sample}) for sample in sp.open_dataset(root))


@pytest.mark.parametrize("layout", [each for each in OPEN if each.values[0].kind in ORACLES])
def test_keys_and_parts_are_those_of_other_libraries(layout: Layout, root: Path) -> None:
    layout.write(root)
    expected = comparable(ORACLES[layout.kind](root).items())
    assert parts_of(root) == expected


def preview(root: Path) -> int:
    found = re.search(rb"samples\s+([0-9]+)", re.sub(rb"<[^>]*>", b" ", preview_dataset(str(root))))
    return 0 if found is None else int(found[1])


COMMANDS: dict[str, Callable[[Path], int]] = {
    "info": lambda root: dataset_info(str(root)).samples,
    "check": lambda root: check_dataset(str(root), processes=1).samples,
    "index": lambda root: sum(entry.samples for entry in entries_after_indexing(root)),
    "preview": preview,
}


def entries_after_indexing(root: Path) -> list[Any]:
    path, faults = index_any(str(root), processes=1)
    assert path.exists() and not faults
    return [*sp.open_dataset(root).dataset.entries]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("layout", OPEN)
def test_every_command_counts_the_samples_of_each_layout(layout: Layout, command: str, root: Path) -> None:
    layout.write(root)
    assert COMMANDS[command](root) == layout.samples
