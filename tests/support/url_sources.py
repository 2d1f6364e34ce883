"""Sources of twenty samples of every kind that is read from a URL, and the expected result of their conversion."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from savable_pipeline.tools.convert import Options, Report, run_conversion
from tests.support.toy_files import SMALL, file_hashes, jpeg, write_captioned_images
from tests.support.toy_server import ToyServer
from tests.support.toy_sources import SOURCES

RECORDS = [{"n": i, "text": "x" * 40 * i} for i in range(20)]


def rows() -> pa.Table:
    """Return twenty rows, one of which has an unreadable image."""
    pictures = [jpeg(i) if i != 7 else b"bad" for i in range(20)]
    return pa.table({"jpg": pa.array(pictures, pa.binary()), "txt": [f"row {i}" for i in range(20)]})


def write_parquet(folder: Path) -> Path:
    for name, first, last in (("a", 0, 5), ("sub/b", 5, 16), ("sub/c", 16, 20)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows().slice(first, last - first), folder / f"{name}.parquet", row_group_size=4)
    return folder


def write_arrow(folder: Path) -> Path:
    folder.mkdir(parents=True)
    with pa.ipc.new_file(folder / "a.arrow", rows().schema) as file:
        file.write_table(rows(), max_chunksize=6)
    return folder / "a.arrow"


def write_tars(folder: Path) -> Path:
    """Write seven tars without an index."""
    run_conversion(write_captioned_images(folder.parent / "files", 20, **{"b/020.jpg": jpeg(1)}), folder, SMALL)
    shutil.rmtree(folder / ".nv-meta")
    return folder


def in_folder(name: str, data: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / name).write_bytes(data)
        return folder / name

    return write


def write_twenty(kind: str) -> Callable[[Path], Path]:
    return lambda folder: SOURCES[kind](folder / "in", 20)


FOLDERS = [kind for kind in SOURCES if kind.startswith(("mds", "litdata"))]
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS) + b"\nbroken\n"
KINDS: dict[str, Callable[[Path], Path]] = {
    "tars": write_tars,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "jsonl": in_folder("a.jsonl", LINES),
    "array": in_folder("a.json", json.dumps(RECORDS, indent=1).encode()),
    "packed": in_folder("a.jsonl.gz", gzip.compress(LINES)),
    "table": in_folder("t.csv", b"n,text\n" + b"".join(f"{i},row {i}\n".encode() for i in range(20))),
    "tars.gz": write_twenty("packed"),
    **{kind: write_twenty(kind) for kind in FOLDERS},
}
SETTINGS = Options(shard_samples=4, split=(("a", "0.5"), ("b", "0.5")))


def url_of(server: ToyServer, source: Path, scheme: str = "s3") -> str:
    path = source.relative_to(server.folder).as_posix()
    return f"s3://{path}" if scheme == "s3" else f"{server.url}/{path}"


def written_files(folder: Path) -> dict[str, str]:
    """Return what a conversion wrote, without the source's location in the manifest."""
    found = file_hashes(folder)
    manifest = json.loads((folder / ".nv-meta/savable.convert.json").read_text())
    return {
        **found,
        ".nv-meta/savable.convert.json": json.dumps({**manifest, "versions": "", "source_id": "", "source": ""}),
    }


def convert_source(source: Path | str, target: Path, **more: Any) -> Report:
    return run_conversion(source, target, SETTINGS, reshard="tars" in str(source), **more)
