"""Looks up a dataset behind a URL before anything is read: its shards, its own index, and its metadata."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.remote import index_parts
from savable_pipeline.data.remote.cache_space import cache_bytes, cache_folder
from savable_pipeline.data.remote.downloader import Downloader
from savable_pipeline.data.remote.own_files import open_own, own_folder
from savable_pipeline.data.remote.urls import RemoteShards, find_remote
from savable_pipeline.data.remote.version_pins import drop_whole, pin_whole, whole_version, write_pin
from savable_pipeline.data.shards.energon_metadata import META, METADATA_FILES, named_files, read_counts
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.hub_address import without_commit
from savable_pipeline.data.shards.index_file import ShardIndex
from savable_pipeline.data.shards.index_place import media_table_name
from savable_pipeline.data.shards.paths import Shards
from savable_pipeline.data.shards.shard_list import ShardEntry, ShardNames
from savable_pipeline.data.shards.unfinished import CONVERTED
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_ODD_NAME = re.compile(rb"(?:^|[\0/])\.{0,2}[\0/]")  # a part that is empty, or one or two dots, in a text of names
METADATA_FOLDER = "metadata"  # a folder beside the versions of a dataset


def look_up(files: Shards, form: FileFormat) -> tuple[RemoteShards, Path, dict[str, ShardEntry]]:
    """The files of these URLs, a local folder with their metadata, and the entries of their own index by name."""
    cache = cache_folder(None)
    with (
        contextlib.closing(Downloader(cache, cache_bytes(None, cache))) as downloader,
        looked_up(files, form, cache, downloader) as (found, folder, own),
    ):
        entries = () if own is None else own.index.shards
        return found, folder / METADATA_FOLDER, {entry.name: entry for entry in entries}


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a dataset in the cache, and its index, of files that had these `stamps` where they were looked at.

    `stamp` tells what it was made of, or downloaded from.
    """

    folder: Path
    index: ShardIndex
    stamp: str
    stamps: Sequence[str] = ()


class _Pointer(msgspec.Struct):
    stamp: str
    version: str
    stamps: list[str] = []


@contextlib.contextmanager
def looked_up(
    files: Shards, form: FileFormat, cache: Path, downloader: Downloader
) -> Iterator[tuple[RemoteShards, Path, Version | None]]:
    """The files, their dataset's folder in the cache, and the version of its own index, if any; locked meanwhile."""
    found = find_remote(files, downloader, form.kind, stamps=not form.whole)
    folder = dataset_folder(cache, f"{found.root} {form.index_name}")
    with locked_folder(folder):
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
        own = _own_index(found.root, form, folder, downloader)
        _download_metadata(found.root, folder / METADATA_FOLDER, downloader, whole=own is not None)
        _download_table(found.root, folder / METADATA_FOLDER, media_table_name(form.name), downloader)
        if not found.names:
            found = RemoteShards.named(found.root, _known_names(found.root, form, folder / METADATA_FOLDER, own))
        _check_names(found)
        yield found, folder, own


def dataset_folder(cache: Path, dataset: str) -> Path:
    """The folder of a dataset in the cache: one for all commits of a dataset of the Hub."""
    return cache / hashlib.sha256(without_commit(dataset).encode()).hexdigest()[:32]


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """The folder of a dataset in the cache, made if it is not there, and locked."""
    with open_own(own_folder(folder) / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _known_names(root: str, form: FileFormat, metadata: Path, own: Version | None) -> Sequence[str]:
    """The sorted names of the files in the dataset's own index, or in Energon's list. Raises `ShardError`."""
    if own is not None:
        return own.index.shards.names
    names = sorted(name for name in read_counts(metadata) or () if name.endswith(form.kind.suffixes))
    if not names:
        raise ShardError(
            f"{root}: a web server cannot be listed, and there is neither {form.index_name} nor "
            f"{META}/{METADATA_FILES[0]}; name the shards, as in {root}/{{000..099}}{form.kind.suffixes[0]}, or write "
            "the index by `savable index` where they lie"
        )
    return names


def _check_names(found: RemoteShards) -> None:
    """Raises `ShardError` for a name that leads out of the dataset, and so out of its folder in the cache."""
    text = ShardNames.of(found.names).text
    for name in found.names if _ODD_NAME.search(text) else ():
        if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
            raise ShardError(f"{found.root}: a shard named {name!r} lies outside of the dataset; rename it")


def _download_metadata(root: str, local: Path, downloader: Downloader, *, whole: bool) -> None:
    """Copies the metadata beside the shards to `local`, where a dataset looks for it."""
    (local / META).mkdir(parents=True, exist_ok=True)
    _download_files(root, local, METADATA_FILES, downloader)
    if whole:  # a conversion writes the index at its end
        (local / CONVERTED).unlink(missing_ok=True)
    else:
        _download_files(root, local, [Path(CONVERTED).name], downloader)
    _download_files(root, local, named_files(local), downloader)


def _download_table(root: str, local: Path, name: str, downloader: Downloader) -> None:
    """The same of the table of media, which may be large: where the server has another one than before."""
    path = local / name
    stat = downloader.call("stat", root, name)
    if stat is None:
        drop_whole(path)
        return
    size, stamp = stat
    if whole_version(path) != stamp:
        downloader.call("whole", root, name, size, str(path))
        pin_whole(path, stamp)


def _download_files(root: str, local: Path, names: Iterable[str], downloader: Downloader) -> None:
    tickets = {name: downloader.submit("read", root, f"{META}/{name}") for name in names}
    for name, ticket in tickets.items():
        raw = downloader.result(ticket)
        if raw is None:
            (local / META / name).unlink(missing_ok=True)
        else:
            (local / META / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(local / META / name, [raw])


def _own_index(root: str, form: FileFormat, folder: Path, downloader: Downloader) -> Version | None:
    """The version of the dataset's own index, downloaded if it was replaced; None without an index."""
    stat = downloader.call("stat", root, form.index_name)
    if stat is None:
        return None
    (size, stamp), pointer = stat, folder / "own.json"
    known = pointed_version(pointer, form)
    if known is not None and known.stamp == stamp:
        return known
    fresh, pin = folder / "downloaded.index", ""
    try:
        if size > index_parts.WHOLE_BYTES:
            pin = index_parts.download_head(root, form.index_name, size, fresh, downloader)
        else:
            downloader.call("whole", root, form.index_name, size, str(fresh))
        version = _installed(folder, fresh, form, pin)
    except (ShardError, ValueError) as error:
        log.warning("%s/%s: %s; making another", root, form.index_name, error)
        return None
    for path in folder.glob("made-*.json"):  # of the index before
        path.unlink(missing_ok=True)
    return point(pointer, Version(version, form.index_at(version / "index"), stamp))


def _installed(folder: Path, fresh: Path, form: FileFormat, pin: str) -> Path:
    """Moves an index to the folder named by its checksum. With a `pin` it has its head alone, of this version on the
    server. Raises `ShardError`.
    """
    index = form.index_at(fresh)
    if not pin:
        check_whole(index)
    version = folder / index.identity.hex()
    version.mkdir(exist_ok=True)
    if pin:
        write_pin(version / "parts.pin", pin)
    if pin and _has(version / "index", index, form):  # the same, with what was fetched of it
        fresh.unlink()
        return version
    if pin:
        index_parts.begin_parts(version, len(index.shards))
    fresh.replace(version / "index")
    if not pin:
        (version / "parts").unlink(missing_ok=True)
    return version


def check_whole(index: ShardIndex) -> None:
    """Raises `ShardError` if the rows of a file in an index are damaged."""
    damaged = next((number for number in range(len(index.shards)) if not index.is_whole(number)), None)
    if damaged is not None:
        raise ShardError(f"the part of {index.shards.names[damaged]} is damaged")


def _has(path: Path, index: ShardIndex, form: FileFormat) -> bool:
    with contextlib.suppress(OSError, ValueError, ShardError):
        return form.index_at(path).identity == index.identity
    return False


def point(pointer: Path, version: Version) -> Version:
    """Has a pointer name a version, which it gives."""
    named = _Pointer(version.stamp, version.folder.name, list(version.stamps))
    replace_file(pointer, [msgspec.json.encode(named)])
    return version


def pointed_version(pointer: Path, form: FileFormat) -> Version | None:
    """The version that a pointer names, if it is whole; else None."""
    with contextlib.suppress(OSError, ValueError, ShardError):
        named = msgspec.json.decode(pointer.read_bytes(), type=_Pointer)
        folder = pointer.parent / named.version
        index = form.index_at(folder / "index")  # raises unless its header is whole
        if index.identity.hex() == folder.name.partition("-")[0]:
            return Version(folder, index, named.stamp, named.stamps)
    return None


def newest_version(folder: Path, pointers: str, form: FileFormat) -> Version | None:
    """The version that the newest of these pointers names; None without a whole one."""
    paths = sorted(folder.glob(pointers), key=lambda path: path.stat().st_mtime_ns)
    return pointed_version(paths[-1], form) if paths else None
