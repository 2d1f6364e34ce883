"""Looks up a dataset behind a URL before anything is read: its shards, its own index, and its metadata."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.remote import index_parts
from savable_pipeline.data.remote.cache_space import cache_bytes, cache_folder
from savable_pipeline.data.remote.downloader import Downloader
from savable_pipeline.data.remote.urls import RemoteShards, find_remote
from savable_pipeline.data.shards.energon_metadata import INDEX_NAME, META, METADATA_FILES, named_files, read_counts
from savable_pipeline.data.shards.paths import Shards
from savable_pipeline.data.shards.shard_list import ShardEntry, ShardNames
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_ODD_NAME = re.compile(rb"(?:^|[\0/])\.{0,2}[\0/]")  # a part that is empty, or one or two dots, in a text of names
METADATA_FOLDER = "metadata"  # a folder beside the versions of a dataset


def look_up(shards: Shards) -> tuple[RemoteShards, Path, dict[str, ShardEntry]]:
    """The shards of these URLs, a local folder with their metadata, and the entries of their own index by name."""
    cache = cache_folder(None)
    with (
        contextlib.closing(Downloader(cache, cache_bytes(None, cache))) as downloader,
        looked_up(shards, cache, downloader) as (found, folder, version),
    ):
        entries = () if version is None else TarIndex(version / "index").shards
        return found, folder / METADATA_FOLDER, {entry.name: entry for entry in entries}


@contextlib.contextmanager
def looked_up(shards: Shards, cache: Path, downloader: Downloader) -> Iterator[tuple[RemoteShards, Path, Path | None]]:
    """The shards, their dataset's folder in the cache, and the version of its own index, if any; locked meanwhile."""
    found = find_remote(shards, downloader)
    folder = cache / hashlib.sha256(found.root.encode()).hexdigest()[:32]
    with locked_folder(folder):
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
        version = _own_index(found, folder, downloader)
        download_metadata(found.root, folder / METADATA_FOLDER, downloader)
        if not found.names:
            found = RemoteShards.named(found.root, _known_names(found.root, folder / METADATA_FOLDER, version))
        check_names(found)
        yield found, folder, version


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """The folder of a dataset in the cache, made if it is not there, and locked."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _known_names(root: str, metadata: Path, version: Path | None) -> Sequence[str]:
    """The sorted names of the shards in the dataset's own index, or in Energon's list. Raises `ShardError`."""
    if version is not None:
        return TarIndex(version / "index").shards.names
    counts = read_counts(metadata)
    if counts is None:
        raise ShardError(
            f"{root}: a web server cannot be listed, and there is neither {INDEX_NAME} nor {META}/{METADATA_FILES[0]}; "
            f"name the shards, as in {root}/{{000..099}}.tar"
        )
    return sorted(counts)


def check_names(found: RemoteShards) -> None:
    """Raises `ShardError` for a name that leads out of the dataset, and so out of its folder in the cache."""
    text = ShardNames.of(found.names).text
    for name in found.names if _ODD_NAME.search(text) else ():
        if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
            raise ShardError(f"{found.root}: a shard named {name!r} lies outside of the dataset; rename it")


def download_metadata(root: str, local: Path, downloader: Downloader) -> None:
    """Copies the metadata beside the shards to `local`, where a dataset looks for it."""
    (local / META).mkdir(parents=True, exist_ok=True)
    _download_files(root, local, METADATA_FILES, downloader)
    _download_files(root, local, named_files(local), downloader)


def _download_files(root: str, local: Path, names: Iterable[str], downloader: Downloader) -> None:
    tickets = {name: downloader.submit("read", root, f"{META}/{name}") for name in names}
    for name, ticket in tickets.items():
        raw = downloader.result(ticket)
        if raw is None:
            (local / META / name).unlink(missing_ok=True)
        else:
            (local / META / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(local / META / name, [raw])


def _own_index(found: RemoteShards, folder: Path, downloader: Downloader) -> Path | None:
    """The version of the dataset's own index, downloaded if it was replaced; None without an index."""
    stat = downloader.call("stat", found.root, INDEX_NAME)
    if stat is None:
        return None
    size, stamp = stat
    version = pointed_version(folder / "own.json", stamp)
    if version is not None:
        return version
    fresh = folder / "downloaded.index"
    try:
        if size > index_parts.WHOLE_BYTES:
            pin = index_parts.download_head(found.root, size, fresh, downloader)
        else:
            downloader.call("whole", found.root, INDEX_NAME, size, str(fresh))
            pin = None
        version = install_index(folder, fresh, folder / "own.json", stamp, pin=pin)
        for name in ("changed", "reindexed"):  # said of the index before
            (folder / name).unlink(missing_ok=True)
        return version
    except (ShardError, ValueError) as error:
        log.warning("%s/%s: %s; making another", found.root, INDEX_NAME, error)
        return None


def note_changed(folder: Path, name: str) -> None:
    """Notes in a dataset's folder that a shard is other than it was indexed, so that the next start indexes it."""
    with (folder / "changed").open("a") as file:
        file.write(f"{name}\n")


def changed_shards(folder: Path) -> tuple[set[str], set[str]]:
    """The names of the shards that were noted so; those that are not indexed again, and all."""
    waiting, done = (
        set(path.read_text().splitlines()) if path.exists() else set()
        for path in (folder / "changed", folder / "reindexed")
    )
    return waiting, waiting | done


def note_reindexed(folder: Path) -> None:
    """Notes that the shards which were other than the dataset's own index says are indexed again, here."""
    names = sorted(changed_shards(folder)[1])
    replace_file(folder / "reindexed", [f"{name}\n".encode() for name in names])
    (folder / "changed").unlink(missing_ok=True)


def pointed_version(pointer: Path, stamp: str) -> Path | None:
    """The version that a pointer names, if it was made for this stamp and is whole; else None."""
    with contextlib.suppress(OSError, ValueError, ShardError):
        made = msgspec.json.decode(pointer.read_bytes(), type=_Pointer)
        version = pointer.parent / made.version
        if made.stamp == stamp and _checksum(version / "index") == version.name:
            TarIndex(version / "index")  # raises unless its header is whole
            return version
    return None


def newest_version(folder: Path, pointers: str) -> Path | None:
    """The version that the newest of these pointers names; None without a whole one."""
    paths = sorted(folder.glob(pointers), key=lambda path: path.stat().st_mtime_ns)
    with contextlib.suppress(OSError, ValueError):
        return (
            pointed_version(paths[-1], msgspec.json.decode(paths[-1].read_bytes(), type=_Pointer).stamp)
            if paths
            else None
        )
    return None


def install_index(folder: Path, fresh: Path, pointer: Path, stamp: str, *, pin: str | None = None) -> Path:
    """Moves an index to the folder named by its checksum, and has the pointer name it. Raises `ShardError`.

    With a `pin` the file has its head alone, of this version on the server.
    """
    index = TarIndex(fresh)
    damaged = [] if pin is not None else [n for n in range(len(index.shards)) if not index.is_whole(n)]
    if damaged:
        raise ShardError(f"the part of {index.shards.names[damaged[0]]} is damaged")
    version = folder / _checksum(fresh)
    version.mkdir(exist_ok=True)
    if pin is not None:
        replace_file(version / "parts.pin", [pin.encode()])
    if pin is not None and _has(version / "index", index.identity):  # the same, with what was fetched of it
        fresh.unlink()
    else:
        if pin is not None:
            index_parts.begin_parts(version, len(index.shards))
        fresh.replace(version / "index")
        if pin is None:
            (version / "parts").unlink(missing_ok=True)
    replace_file(pointer, [msgspec.json.encode(_Pointer(stamp, version.name))])
    return version


def _has(path: Path, identity: bytes) -> bool:
    with contextlib.suppress(OSError, ValueError, ShardError):
        return TarIndex(path).identity == identity
    return False


def _checksum(index: Path) -> str:
    with index.open("rb") as file:
        return file.read(16)[8:].hex()


class _Pointer(msgspec.Struct):
    stamp: str  # the server's stamp of the index, or a hash of the shards' names
    version: str
