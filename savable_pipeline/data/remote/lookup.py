"""Looks up a remote dataset before it is read: its shards, index and metadata.

This also defines where its files are in the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from savable_pipeline.core.files import replace_file, replacing
from savable_pipeline.data.remote import shard_cache
from savable_pipeline.data.remote.cache_files import (
    PIECE,
    drop_whole,
    flock,
    open_private,
    pin_whole,
    private_folder,
    whole_version,
    write_pin,
)
from savable_pipeline.data.remote.listing import TIME_PREFIX
from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.remote.shard_cache import ShardCache, create_flags, open_layout
from savable_pipeline.data.remote.urls import RemoteShards
from savable_pipeline.data.shards.index import PARTS, Format, ShardIndex, ShardTable, head_bytes
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.indexing import media_table_name
from savable_pipeline.data.shards.metadata import CONVERTED, COUNT_FILES, META, METADATA_FILES, named_files, read_counts
from savable_pipeline.data.shards.paths import without_commit
from savable_pipeline.data.shards.shard_list import ShardEntry, ShardNames
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

_ODD_NAME = re.compile(rb"(?:^|[\0/])\.{0,2}[\0/]")  # a path component that is empty, "." or "..", in joined names
_FIRST_BYTES = 1 << 20  # bytes of an index that are fetched to find the length of its head
METADATA_FOLDER = "metadata"  # a folder next to the versions of a dataset
_UNREAD = "files"  # the kind of an index that has only names and sizes


def describe_url(
    found: RemoteShards, form: Format, session: Session
) -> tuple[RemoteShards, Path, dict[str, ShardEntry]]:
    """Return the files, their metadata folder, and the entries of the own index.

    The entries are by name, of the index that is on the server with the files. If the server cannot list its files, the
    files are those of the index.
    """
    with locked_dataset(found, form, session) as (found, folder, index_version):
        entries = () if index_version is None else index_version.index.shards
        return found, folder / METADATA_FOLDER, {entry.name: entry for entry in entries}


@dataclass(frozen=True, slots=True)
class Version:
    """Version of a dataset in the cache, and its index.

    `stamp` identifies the source of the index. `stamps` are those of the files when they were looked up.
    """

    folder: Path
    index: ShardIndex
    stamp: str
    stamps: Sequence[str] = ()


@contextlib.contextmanager
def locked_dataset(
    found: RemoteShards, form: Format, session: Session, *, counts: bool = True
) -> Iterator[tuple[RemoteShards, Path, Version | None]]:
    """Lock a dataset's folder in the cache, and yield the files and the folder.

    The third value is the version of the dataset's own index, which is on the server with the files, or None.

    `counts` says whether to download Energon's counts of samples. If it is False, they are skipped on a web server that
    also has the dataset's index, where they can be read instead. Elsewhere they are downloaded in any case.
    """
    folder = dataset_folder(session.cache, f"{found.root} {form.index_name}")
    with locked_folder(folder):
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
        index_version = _own_index(found.root, form, folder, session)
        without_counts = not counts and index_version is not None and found.root.startswith("http")
        names = METADATA_FILES[len(COUNT_FILES) if without_counts else 0 :]  # the files of counts come first
        _download_metadata(found.root, folder / METADATA_FOLDER, names, session, has_index=index_version is not None)
        table = media_table_name(form.index_kind)  # this may be large, so it is copied instead of read
        _copy(found.root, table, session.stat(found.root, table), folder / METADATA_FOLDER / table, session)
        if not found.names:
            known = _known_names(found.root, form, folder / METADATA_FOLDER, index_version)
            # `whole`, whether these are all files below the folder, stays as it was
            found = RemoteShards.named(found.root, known, whole=found.whole)
        _check_names(found)
        yield found, folder, index_version


def dataset_folder(cache: Path, dataset: str) -> Path:
    """Return the folder of a dataset in the cache.

    All commits of a dataset of the Hub share one.
    """
    return cache / hashlib.sha256(without_commit(dataset).encode()).hexdigest()[:32]


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create and lock the folder of a dataset in the cache."""
    with open_private(private_folder(folder) / "lock", "ab") as lock:
        flock(lock, fcntl.LOCK_EX)
        yield


def _known_names(root: str, form: Format, metadata: Path, index_version: Version | None) -> Sequence[str]:
    """Return the sorted names of the files, by the dataset's index or Energon's list.

    Raises `ShardError`.
    """
    if index_version is not None:
        return index_version.index.shards.names
    names = sorted(name for name in read_counts(metadata) or () if form.has(name))
    if not names:
        raise ShardError(
            f"{root}: no {form.index_name} or {META}/{METADATA_FILES[0]} there, and web servers cannot be listed. Name "
            f"the shards, as in {root}/{{000..099}}{form.suffixes[0]}, or upload the index of `savable index`"
        )
    return names


def _check_names(found: RemoteShards) -> None:
    """Raise `ShardError` for a name outside the dataset, whose copy would be outside the cache's folder too."""
    text = ShardNames.of(found.names).text
    for name in found.names if _ODD_NAME.search(text) else ():
        if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
            raise ShardError(f"{found.root}: the shard {name!r} is outside the dataset. Rename it")


def _download_metadata(root: str, local: Path, names: Sequence[str], session: Session, *, has_index: bool) -> None:
    """Copy these metadata files to `local`, where a dataset looks for them."""
    (local / META).mkdir(parents=True, exist_ok=True)
    if has_index:  # the conversion is complete, because it writes the index last
        (local / CONVERTED).unlink(missing_ok=True)
    else:
        names = [*names, Path(CONVERTED).name]
    _download_files(root, local, names, session)
    _download_files(root, local, named_files(local), session)


def _download_files(root: str, local: Path, names: Sequence[str], session: Session) -> None:
    stats = session.stats(root, [f"{META}/{name}" for name in names])
    for name in names:
        path = f"{META}/{name}"
        size, stamp = stats.get(path, (0, ""))
        if size > PIECE:
            raise ShardError(f"{root}/{path}: {size} bytes, more than the limit of {PIECE}")
        _copy(root, path, (size, stamp), local / path, session)


def _copy(root: str, name: str, stat: tuple[int, str] | None, path: Path, session: Session) -> None:
    """Copy an object, whose size and stamp are `stat`, to `path`, unless the copy there has this stamp.

    An object without ETag has a time as stamp, which does not show a second change within that second. Such an object
    is always copied again. If the object is missing or empty, the copy is removed.
    """
    size, stamp = stat or (0, "")
    if not size:
        drop_whole(path)
    elif whole_version(path) != stamp or stamp.startswith(TIME_PREFIX):
        session.call("whole", root, name, size, str(path))
        pin_whole(path, stamp)


def _own_index(root: str, form: Format, folder: Path, session: Session) -> Version | None:
    """Return the version of the dataset's own index, or None.

    The index is downloaded again if it was replaced.
    """
    if (stat := session.stat(root, form.index_name)) is None:
        return None
    size, stamp = stat
    pointer = folder / "own.json"
    if (known := pointed_version(pointer, form)) is not None and known.stamp == stamp:
        return known
    downloaded, pin = folder / "downloaded.index", ""
    try:
        if size > shard_cache.WHOLE_BYTES:
            pin = _download_head(root, form.index_name, size, downloaded, session)
        else:
            session.call("whole", root, form.index_name, size, str(downloaded))
        version = _install_index(folder, downloaded, form, pin)
    except (ShardError, ValueError) as error:
        log.warning("%s/%s: %s. It is rebuilt", root, form.index_name, error)
        return None
    for path in folder.glob("made-*.json"):  # pointers to the previous index
        path.unlink(missing_ok=True)
    return write_pointer(pointer, Version(version, form.index_at(version / "index"), stamp))


def _download_head(root: str, name: str, size: int, path: Path, session: Session) -> str:
    """Create a file of `size` bytes with the head of the index `name` below `root`.

    Returns the server's version of it. Raises `ShardError`, `RemoteError`.
    """
    needed = min(_FIRST_BYTES, size)
    head, pin = session.call("part_of", root, name, size, "", 0, needed)
    needed = min(head_bytes(f"{root}/{name}", head), size)
    while len(head) < needed:
        bounds = [*range(len(head), needed, PIECE), needed]
        requests = [(root, name, size, pin, *extent) for extent in itertools.pairwise(bounds)]
        head += b"".join(part for part, _ in session.each("part_of", requests))
        needed = min(head_bytes(f"{root}/{name}", head), size)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(head[:needed])
        file.truncate(size)
    return str(pin)


def _install_index(folder: Path, downloaded: Path, form: Format, pin: str) -> Path:
    """Move an index to the folder named by its checksum, and return that folder.

    With a `pin`, the file has only the head of this version on the server. Raises `ShardError`.
    """
    index = form.index_at(downloaded)
    if not pin:
        check_whole(index)
    version = folder / index.identity.hex()
    version.mkdir(exist_ok=True)
    if pin:
        write_pin(version / "parts.pin", pin)
    if pin and _is_same_index(version / "index", index, form):  # the same index may be there already with more rows
        downloaded.unlink()
        return version
    if pin:
        shard_cache.create_parts(version, len(index.shards))
    downloaded.replace(version / "index")
    if not pin:
        (version / PARTS).unlink(missing_ok=True)
    return version


def check_whole(index: ShardIndex) -> None:
    """Raise `ShardError` if the rows of a file in an index are damaged."""
    damaged = next((number for number in range(len(index.shards)) if not index.is_whole(number)), None)
    if damaged is not None:
        raise ShardError(f"the part of {index.shards.names[damaged]} is damaged")


def _is_same_index(path: Path, index: ShardIndex, form: Format) -> bool:
    with contextlib.suppress(OSError, ValueError, ShardError):
        return form.index_at(path).identity == index.identity
    return False


def write_pointer(pointer: Path, version: Version) -> Version:
    """Write a pointer that names a version, and return the version."""
    replace_file(pointer, [msgspec.json.encode((version.stamp, version.folder.name, list(version.stamps)))])
    return version


def pointed_version(pointer: Path, form: Format) -> Version | None:
    """Return the version that a pointer names, or None.

    It is None if the pointer or the version is missing or damaged.
    """
    with contextlib.suppress(OSError, ValueError, ShardError):
        stamp, name, stamps = msgspec.json.decode(pointer.read_bytes(), type=tuple[str, str, list[str]])
        folder = pointer.parent / name
        index = form.index_at(folder / "index")  # raises if its header is damaged
        if index.identity.hex() == folder.name.partition("-")[0]:
            return Version(folder, index, stamp, stamps)
    return None


def newest_version(folder: Path, pointers: str, form: Format) -> Version | None:
    """Return the version that the newest pointer names, or None.

    `pointers` is a glob in `folder`.
    """
    paths = sorted(folder.glob(pointers), key=lambda path: path.stat().st_mtime_ns)
    return pointed_version(paths[-1], form) if paths else None


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """Remote files below `url`, and their version in the cache.

    The `session` downloads them.
    """

    url: str
    cached: ShardCache
    session: Session

    @property
    def metadata(self) -> Path:
        """Return the folder with copies of the files in `.nv-meta`."""
        return self.cached.folder.parent / METADATA_FOLDER

    @property
    def index(self) -> ShardIndex:
        """Return the index of the files, or at least of those that are read."""
        return self.cached.layout.index

    @property
    def index_path(self) -> Path:
        """Return the file of the index."""
        return self.cached.folder / "index"

    def sidecar(self, name: str) -> Path:
        """Return the path of the local copy of a sidecar named `name`."""
        return self.cached.folder / "beside" / name


def open_protected(version: Path) -> ShardCache:
    """Open the version in this folder of the cache, and protect it from eviction."""
    create_flags(version)
    cached = ShardCache(version)
    cached.protect()
    return cached


def unread_version(found: RemoteShards, folder: Path) -> ShardCache:
    """Return a version of files of which only names, sizes and stamps are known.

    Cached rows of files that changed under the same stamp are dropped.
    """
    version = folder / f"new-{hash_of(found)}"
    try:
        open_layout(version)
    except (OSError, ValueError, ShardError):
        entries = zip(found.names, found.sizes.tolist(), strict=True)
        write_index(version / "index", (ShardTable(ShardEntry(*each, 0, 0), b"") for each in sorted(entries)), _UNREAD)
    cached = open_protected(version)
    cached.forget_changed()
    return cached


def hash_of(found: RemoteShards, *, sizes: bool = True) -> str:
    """Return a hash of the names and stamps of files, and with `sizes` of their sizes."""
    digest = hashlib.sha256(ShardNames.of(found.names).text)
    for stamp in found.stamps:
        digest.update(f"\0{stamp}".encode())
    if sizes:
        digest.update(found.sizes.tobytes())
    return digest.hexdigest()[:32]


def with_stamps(
    found: RemoteShards, session: Session, numbers: Iterable[int], form: Format | None = None
) -> RemoteShards:
    """Return the files, with missing sizes and stamps of some of them added.

    `numbers` are the numbers of these files. Both come from the listing or from the server. With a `form`, a stamp also
    covers the file's sidecar. Raises `ShardError` for a missing file.
    """
    stamps = list(found.stamps) or [""] * len(found.names)
    companions: dict[int, str] = {}  # names of sidecars, by number of the file
    own_suffix, sidecar_suffix = form.sidecar if form is not None else ("", "")
    if form is not None and sidecar_suffix:
        numbers = [*numbers]
        with_sidecar = [number for number in numbers if found.names[number].lower().endswith(own_suffix)]
        companions = {number: form.companion(found.names[number]) for number in with_sidecar}
    unknown = [number for number in numbers if found.sizes[number] < 0 or not stamps[number]]
    stats = session.stats(found.root, [found.names[number] for number in unknown], needed=True)
    sizes = found.sizes.copy()
    for number in unknown:
        sizes[number], stamps[number] = stats[found.names[number]]
    stats = session.stats(found.root, sorted({*companions.values()}))
    for number, name in companions.items():
        stamps[number] += f" {stats.get(name, '')}"
    return replace(found, sizes=sizes, stamps=stamps)


def stamps_of(url: str, names: list[str], session: Session) -> dict[str, tuple[int, str]]:
    """Return size and stamp of objects below a URL, by name.

    A bucket is listed once. Raises `ShardError` for a missing object.
    """
    if not url.startswith("http"):
        session.listing(url)
    return session.stats(url, names, needed=True)


def cache_entry_for(url: str, session: Session) -> tuple[RemoteFolder, str]:
    """Return where one object of any kind is cached, and its stamp.

    Raises `ShardError`, `RemoteError`.
    """
    root, _, name = url.rpartition("/")
    size, stamp = session.stats(root, [name], needed=True)[name]
    folder = dataset_folder(session.cache, f"{url} object")
    with locked_folder(folder):
        cached = unread_version(RemoteShards(root, [name], np.array([size]), [stamp]), folder)
    return RemoteFolder(root, cached, session), stamp


def check_stamp(url: str, before: str, now: str) -> None:
    """Raise `ShardError` if an object's stamp `now` is not the one from `before`."""
    if before != now:
        raise ShardError(
            f"{url}: it was replaced after the start ({before} then, {now} now). Do not change it, and start again",
            reason="changed shard",
        )
