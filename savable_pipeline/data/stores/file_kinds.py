"""Which kind files are of, by their names, or by an index.json: known before what reads them is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from savable_pipeline.core.files import read_regular
from savable_pipeline.data.shards.paths import LANCE, LANCE_CURE, LARGEST_INDEX, ShardKind

if TYPE_CHECKING:
    from savable_pipeline.data.remote.session import Session

INDEX = "index.json"
OTHER = "iterate over it with its own library, and write its samples with sp.ShardWriter"
# Files that hold many samples, which nothing here reads.
CONTAINERS = {
    **dict.fromkeys((".zip", ".7z", ".rar"), "unpack it, and convert the folder"),
    **dict.fromkeys((".h5", ".hdf5", ".lmdb", ".mdb", ".tfrecord", ".tfrecords", ".beton", ".rec"), OTHER),
    **dict.fromkeys((".db", ".sqlite", ".zarr"), OTHER),
    LANCE: LANCE_CURE,
    ".mds": "name the folder with its index.json",
}
LEROBOT_INFO = "meta/info.json"
RangeColumns: TypeAlias = Mapping[str, tuple[str, str | None, str | None]]  # of a part: those of path, begin and end
_PACKED = tuple(f".{name}.{packed}" for name in ("jsonl", "ndjson", "json") for packed in ("gz", "zst", "xz", "bz2"))

ARROW_FILES = ShardKind((".arrow", ".feather", ".ipc"), left_out=lambda name: name.startswith(("cache-", "tmp")))
JSONL_FILES = ShardKind(
    (".jsonl", ".ndjson"),
    _PACKED,
    ("a compressed JSONL file", "compressed JSONL files"),
    "`gzip -dk` or `zstd -d` unpacks",
)
CSV_FILES = ShardKind(
    (".csv", ".tsv"),
    tuple(f".{name}.{packed}" for name in ("csv", "tsv") for packed in ("gz", "zst", "xz", "bz2")),
    ("a compressed table", "compressed tables"),
    "`savable convert` reads, and `gzip -dk` or `zstd -d` unpacks",
)
JSON_FILES = ShardKind((".json",))
PARQUET_FILES = ShardKind((".parquet", ".pq", ".parq"))
TOKEN_FILES = ShardKind((".bin", ".npy"))


def folder_kind(index: bytes) -> str:
    """What an index.json says its folder holds: mds, another format of Mosaic Streaming, litdata; "" for none."""
    try:
        found: Any = msgspec.json.decode(index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    if isinstance(found.get("chunks"), list) and isinstance(found.get("config"), dict):
        return "litdata"
    shards = found.get("shards")
    if isinstance(shards, list) and all(isinstance(shard, dict) and "format" in shard for shard in shards):
        return str(shards[0]["format"]) if shards else "mds"
    return ""


def kind_in(folder: Path) -> str:
    """The kind that the index.json in a folder says, if one is there; else ""."""
    try:
        return folder_kind(read_regular(folder / INDEX, LARGEST_INDEX))
    except OSError:
        return ""


def kind_behind(url: str, session: Session) -> str:
    """The kind that the index.json below a URL says; "" without one. Raises `RemoteError`."""
    index = session.read(url, INDEX)
    return "" if index is None else folder_kind(index)


def stored_in(folder: Path) -> str:
    """The kind that the file of another program says which lies in a folder: "lerobot" too; else ""."""
    try:
        return kind_in(folder) or _kind_of_info(read_regular(folder / LEROBOT_INFO, LARGEST_INDEX))
    except OSError:
        return ""


def stored_behind(url: str, session: Session) -> str:
    """The same of what lies below a URL. Raises `RemoteError`."""
    found = kind_behind(url, session)
    info = None if found else session.read(url, LEROBOT_INFO)
    return found if info is None else _kind_of_info(info)


def _kind_of_info(info: bytes) -> str:
    """What the info.json of a folder of robots' episodes says: "lerobot" for version 3; else ""."""
    try:
        found: Any = msgspec.json.decode(info)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    version = found.get("codebase_version") if isinstance(found, dict) else None
    return "lerobot" if str(version).startswith("v3.") else ""
