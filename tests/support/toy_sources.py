"""A small source of every kind that `savable convert` reads, each with captioned images."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

from savable_pipeline.tools.convert import Options, Report, jobs, run_conversion
from tests.support.toy_files import jpeg, write_captioned_images, write_lines
from tests.support.toy_records import write_arrow_litdata, write_captioned_litdata, write_captioned_mds

Write = Callable[..., Path]  # from a folder and the number of samples (default 8) to the source


def records(count: int) -> list[dict[str, Any]]:
    """Return objects that name the images of `write_captioned_images`, in order."""
    return [{"image": "000.jpg" if i % 2 else "b/001.jpg", "n": i} for i in range(count)]


def files(folder: Path, count: int = 8) -> Path:
    return write_captioned_images(folder, count)


def mds(folder: Path, count: int = 8, **settings: Any) -> Path:
    return write_captioned_mds(folder, count, **settings)


def litdata(folder: Path, count: int = 8, **settings: Any) -> Path:
    return write_captioned_litdata(folder, count, **settings)


def jsonl(folder: Path, count: int = 8) -> Path:
    return write_lines(write_captioned_images(folder, 2) / "a.jsonl", *records(count))


def array(folder: Path, count: int = 8) -> Path:
    (write_captioned_images(folder, 2) / "a.json").write_text(json.dumps(records(count)))
    return folder / "a.json"


def table(folder: Path, count: int = 8, *, separator: str = ",", name: str = "t.csv") -> Path:
    lines = ["image,n", *(f"{record['image']},{record['n']}" for record in records(count))]
    (write_captioned_images(folder, 2) / name).write_text("\n".join(lines).replace(",", separator) + "\n")
    return folder / name


def packed(write: Write, ending: str, folder: Path, count: int = 8) -> Path:
    """Write the file of another source, compressed."""
    plain = write(folder, count)
    pack = {".gz": partial(gzip.compress, mtime=0), ".xz": lzma.compress, ".zst": zstandard.compress}[ending]
    path = plain.with_name(plain.name + ending)
    path.write_bytes(pack(plain.read_bytes()))
    plain.unlink()
    return path


def tars(folder: Path, count: int = 8) -> Path:
    run_conversion(write_captioned_images(folder / "files", count), folder / "tars", Options(shard_samples=4))
    return folder / "tars"


def packed_tars(folder: Path, count: int = 8) -> Path:
    """Write two samples per tar."""
    folder.mkdir(parents=True)
    for first in range(0, count, 2):
        with tarfile.open(folder / f"{first:03d}.tar.gz", "w:gz", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(first, min(first + 2, count)):
                info = tarfile.TarInfo(f"{i:03d}.jpg")
                info.size = len(jpeg(i % 256))
                tar.addfile(info, io.BytesIO(jpeg(i % 256)))
    return folder


def rows(count: int) -> list[dict[str, Any]]:
    """Return images in the form of HF datasets, captions and numbers."""
    return [
        {"image": {"bytes": jpeg(i % 256), "path": f"{i}.jpg"}, "caption": f"no. {i}", "n": i} for i in range(count)
    ]


def parquet(folder: Path, count: int = 8, *, below: str = "") -> Path:
    """Write two files, or in a folder `below` with the other files of a clone from the hub."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / below).mkdir(parents=True)
    found, half = rows(count), count // 2
    for i, some in enumerate((found[:half], found[half:])):
        pq.write_table(pa.Table.from_pylist(some), folder / below / f"train-{i:05d}-of-00002.parquet", row_group_size=3)
    if below:
        (folder / "README.md").write_text("---\nconfigs: []\n---\n")
        (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    return folder


def arrow(folder: Path, count: int = 8, *, saved: bool = False) -> Path:
    """Write a file of Arrow, or a folder like `save_to_disk`."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    found = pa.Table.from_pylist(rows(count))
    name = "data-00000-of-00001.arrow"
    new = pa.ipc.new_stream if saved else pa.ipc.new_file
    with new(folder / name, found.schema) as writer:
        writer.write_table(found, max_chunksize=3)
    if saved:
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        (folder / "dataset_info.json").write_text("{}")
    return folder


SOURCES: dict[str, Write] = {
    "folder": files,
    "jsonl": jsonl,
    "jsonl.gz": partial(packed, jsonl, ".gz"),
    "jsonl.zst": partial(packed, jsonl, ".zst"),
    "array": array,
    "array.xz": partial(packed, array, ".xz"),
    "csv": table,
    "tsv.gz": partial(packed, partial(table, separator="\t", name="t.tsv"), ".gz"),
    "mds": mds,
    "mds.zstd": partial(mds, packed="zstd"),
    "litdata": litdata,
    "litdata.chunk": partial(litdata, level="chunk"),
    "litdata.sample": partial(litdata, level="sample"),
    "litdata.rows": write_arrow_litdata,
    "tars": tars,
    "packed": packed_tars,
    "parquet": parquet,
    "hub": partial(parquet, below="data"),
    "arrow": arrow,
    "hf": partial(arrow, saved=True),
}
# One source for each way of reading, except those without settings.
ONE_A_READER = {
    kind: SOURCES[kind] for kind in ("folder", "jsonl", "jsonl.gz", "array", "csv", "mds", "litdata", "tars")
}
HALVES = Options(shard_samples=2, split=(("a", "0.5"), ("b", "0.5")))


def convert_in_halves(source: Path, target: Path, **settings: Any) -> Report:
    """Convert into small shards of two splits."""
    return run_conversion(source, target, HALVES, reshard="tars" in source.name, **settings)


def watch_written_ranges(monkeypatch: Any) -> set[str]:
    """Return the names of the ranges that are written from now on, as a set that grows."""
    names, write = set[str](), jobs.write_range

    def noted(job: Any, *more: Any) -> bytes:
        names.update([job.name] if job.hashes is None else [])  # a job with hashes only compares
        return write(job, *more)

    monkeypatch.setattr(jobs, "write_range", noted)
    return names
