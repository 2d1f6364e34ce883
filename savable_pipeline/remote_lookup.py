"""What a URL has to say before anything is read: its shards, its own index, and what Energon has written there.

What needs the network here is done by a fetcher process that ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from savable_pipeline.cache_room import cache_bytes, cache_folder
from savable_pipeline.errors import ShardError
from savable_pipeline.fetcher import Fetcher
from savable_pipeline.indexing import INDEX_NAME
from savable_pipeline.nv_meta import META
from savable_pipeline.remote import RemoteShards, find_remote
from savable_pipeline.shard_index import ShardEntry, ShardIndex, replace_file
from savable_pipeline.shard_paths import Shards

log = logging.getLogger(__name__)

METADATA = "metadata"  # a folder beside the versions of a dataset
_INFO_NAME = f"{META}/.info.json"
_METADATA = (".info.json", ".info.yaml", "split.yaml", "split.json", "dataset.yaml")


def look_up(shards: Shards) -> tuple[RemoteShards, Path, dict[str, ShardEntry]]:
    """The shards that these URLs mean, a folder with what Energon says of them, and what their own index says."""
    cache = cache_folder(None)
    with (
        contextlib.closing(Fetcher(cache, cache_bytes(None, cache))) as fetcher,
        looked_up(shards, cache, fetcher) as (found, folder, version),
    ):
        entries = [] if version is None else ShardIndex(version / "index").shards
        return found, folder / METADATA, {entry.name: entry for entry in entries}


@contextlib.contextmanager
def looked_up(shards: Shards, cache: Path, fetcher: Fetcher) -> Iterator[tuple[RemoteShards, Path, Path | None]]:
    """The shards, their dataset's folder in the cache, locked meanwhile, and the version of its own index, if any."""
    found = find_remote(shards, fetcher)
    folder = cache / hashlib.sha256(found.root.encode()).hexdigest()[:32]
    with _locked(folder):
        for litter in folder.glob("*.tmp"):
            litter.unlink()
        version = _own_index(found, folder, fetcher)
        if not found.names:
            found = _named(found, version, fetcher)
        _check_names(found)
        _fetch_metadata(found.root, folder / METADATA, fetcher)
        yield found, folder, version


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _named(found: RemoteShards, version: Path | None, fetcher: Fetcher) -> RemoteShards:
    """With the names that the dataset's own index or Energon's `.info.json` gives."""
    if version is not None:
        names = [entry.name for entry in ShardIndex(version / "index").shards]
        return RemoteShards(found.root, sorted(names), {})
    raw = fetcher.ask("read", found.root, _INFO_NAME)
    if raw is None:
        raise ShardError(
            f"{found.root}: a web server cannot be listed, and there is neither {INDEX_NAME} nor {_INFO_NAME}; name "
            f"the shards, as in {found.root}/{{000..099}}.tar"
        )
    try:
        return RemoteShards(found.root, sorted(msgspec.json.decode(raw, type=_Info).shard_counts), {})
    except msgspec.DecodeError as error:
        raise ShardError(f"{found.root}/{_INFO_NAME}: {error}") from error


def _check_names(found: RemoteShards) -> None:
    """Raise `ShardError` for a name that leads out of the dataset, and so out of its folder in the cache."""
    for name in found.names:
        if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
            raise ShardError(f"{found.root}: a shard named {name!r} lies outside of the dataset; rename it")


def _fetch_metadata(root: str, local: Path, fetcher: Fetcher) -> None:
    """Bring what Energon has written beside the shards to where a dataset looks for it."""
    (local / META).mkdir(parents=True, exist_ok=True)
    tickets = {name: fetcher.begin("read", root, f"{META}/{name}") for name in _METADATA}
    for name, ticket in tickets.items():
        raw = fetcher.wait(ticket)
        if raw is None:
            (local / META / name).unlink(missing_ok=True)
        else:
            replace_file(local / META / name, [raw])


def _own_index(found: RemoteShards, folder: Path, fetcher: Fetcher) -> Path | None:
    """The version that the dataset's own index describes; fetched if it is another than last time."""
    stat = fetcher.ask("stat", found.root, INDEX_NAME)
    if stat is None:
        return None
    size, stamp = stat
    version = pointed_version(folder / "own.json", stamp)
    if version is not None:
        return version
    fresh = folder / "fetched.index"
    fetcher.ask("whole", found.root, INDEX_NAME, size, str(fresh))
    try:
        return install_index(folder, fresh, folder / "own.json", stamp)
    except (ShardError, ValueError) as error:
        log.warning("%s/%s: %s; another is made", found.root, INDEX_NAME, error)
        return None


def pointed_version(pointer: Path, stamp: str) -> Path | None:
    """The version that a pointer names, if it was made for this stamp and is there."""
    with contextlib.suppress(OSError, ValueError, ShardError):
        made = msgspec.json.decode(pointer.read_bytes(), type=_Pointer)
        version = pointer.parent / made.version
        if made.stamp == stamp and _checksum(version / "index") == version.name:
            ShardIndex(version / "index")  # is whole, at least its header
            return version
    return None


def install_index(folder: Path, fresh: Path, pointer: Path, stamp: str) -> Path:
    """Move an index to where its checksum says, and let the pointer name it. Raises `ShardError` if it is damaged."""
    index = ShardIndex(fresh)
    damaged = [entry.name for entry in index.shards if not index.is_whole(entry.name)]
    if damaged:
        raise ShardError(f"the part of {damaged[0]} is damaged")
    version = folder / _checksum(fresh)
    version.mkdir(exist_ok=True)
    fresh.replace(version / "index")
    replace_file(pointer, [msgspec.json.encode(_Pointer(stamp, version.name))])
    return version


def _checksum(index: Path) -> str:
    with index.open("rb") as file:
        return file.read(16)[8:].hex()


class _Pointer(msgspec.Struct):
    stamp: str  # what it was made for: the server's stamp of the index, or a hash of the names
    version: str


class _Info(msgspec.Struct):
    shard_counts: dict[str, int]
