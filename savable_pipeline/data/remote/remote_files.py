"""Files behind a URL that are no tars: finds them, and opens the version of them in the cache that they are now.

CACHE/DATASET/metadata           the splits and field names that lie beside them
CACHE/DATASET/own.index          their own index, if one lies beside them
CACHE/DATASET/named-SPECS.json   the version that was opened last for what a user named
CACHE/DATASET/VERSION/blocks     their names and sizes; VERSION is a hash of these and of the server's stamps
CACHE/DATASET/VERSION/places     their index, made here
CACHE/DATASET/VERSION/beside/…   small files beside them, whole
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.remote.cache_layout import write_blocks
from savable_pipeline.data.remote.cache_space import cache_bytes, cache_folder
from savable_pipeline.data.remote.downloader import Downloader
from savable_pipeline.data.remote.lookup import (
    METADATA_FOLDER,
    changed_shards,
    check_names,
    download_metadata,
    locked_folder,
    note_reindexed,
)
from savable_pipeline.data.remote.shard_cache import ShardCache, create_flags
from savable_pipeline.data.remote.urls import RemoteShards, find_remote
from savable_pipeline.data.shards.paths import NOT_THERE, ShardKind, Shards, as_names
from savable_pipeline.errors import ShardError


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """Where files behind a URL are read: the version `cached` in the cache `folder` of at most `limit` bytes."""

    url: str
    cached: ShardCache
    folder: Path
    limit: int

    @property
    def metadata(self) -> Path:
        """The folder with what lies in `.nv-meta` beside the files."""
        return self.cached.folder.parent / METADATA_FOLDER

    @property
    def places(self) -> Path:
        """The index that is made here."""
        return self.cached.folder / "places"

    def beside(self, name: str) -> Path:
        """The local copy of what lies beside the files under this name."""
        return self.cached.folder / "beside" / name


@dataclass(frozen=True, slots=True)
class RemoteVersion:
    """Files as they are now, their dataset's folder in the cache locked: their place, and their own index if any."""

    place: RemotePlace
    names: list[str]
    own_index: Path | None
    downloader: Downloader


class _Named(msgspec.Struct):
    """What a user named, when it was opened last."""

    version: str
    names: list[str]


@dataclass(frozen=True, slots=True)
class IndexKind:
    """An index that may lie beside files: its path there, and what reads the names in it."""

    path: str
    names_in: Callable[[Path], list[str]]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Files behind a URL, the folder of their dataset in the cache, which is locked, and their own index if any."""

    found: RemoteShards
    folder: Path
    own_index: Path | None
    downloader: Downloader


@contextlib.contextmanager
def looked_up_files(files: Shards, kind: ShardKind, index: IndexKind) -> Iterator[LookedUp]:
    """Finds the files of these URLs, of a folder of a web server by the index in it; downloads their metadata.

    Raises `ShardError`, `RemoteError`.
    """
    cache = cache_folder(None)
    with contextlib.closing(Downloader(cache, cache_bytes(None, cache))) as downloader:
        found = find_remote(files, downloader, kind, stamps=True)
        folder = cache / hashlib.sha256(f"{found.root} {index.path}".encode()).hexdigest()[:32]
        with locked_folder(folder):
            download_metadata(found.root, folder / METADATA_FOLDER, downloader)
            own = _own_index(found.root, index.path, folder, downloader)
            if not found.names:
                found = replace(found, names=_names_in(own, found.root, index))
            check_names(found)
            yield LookedUp(found, folder, own, downloader)


@contextlib.contextmanager
def remote_version(
    files: Shards, kind: ShardKind, index: IndexKind, *, beside: tuple[str, str] = ("", ""), tolerant: bool = False
) -> Iterator[RemoteVersion]:
    """The files of these URLs as they are now, with those of the suffix `beside[1]` beside those of `beside[0]`.

    With `tolerant`, as they were when they were opened before, if they were: what has changed since is an error where
    it is read. Raises `ShardError`, `RemoteError`.
    """
    with looked_up_files(files, kind, index) as looked_up:
        found, folder, downloader = looked_up.found, looked_up.folder, looked_up.downloader
        named = folder / f"named-{_hash(as_names(files))}.json"
        before = _opened_before(named) if tolerant else None
        if before is None or not set(found.names) <= set(before.names):  # or with new files
            names, version = list(found.names), version_now(found, folder, beside, downloader)
            replace_file(named, [msgspec.json.encode(_Named(version.name, names))])
        else:
            names, version = before.names, folder / before.version
        create_flags(version)
        cached = ShardCache(version)
        if not tolerant:
            _forget_changed(cached, folder)
        cached.hold()
        place = RemotePlace(found.root, cached, folder.parent, cache_bytes(None, folder.parent))
        yield RemoteVersion(place, names, looked_up.own_index, downloader)


def stamps_of(url: str, names: list[str], downloader: Downloader) -> dict[str, tuple[int, str]]:
    """Size and stamp of objects below a URL: by one listing of a bucket. Raises `ShardError` for one that is gone."""
    if url.startswith("http"):
        return asked_stamps_of(url, names, downloader)
    listed = {name: (size, stamp) for name, size, stamp in downloader.call("listing", url, True)}
    gone = next((name for name in names if name not in listed), None)
    if gone is not None:
        raise _gone(url, gone)
    return {name: listed[name] for name in names}


def asked_stamps_of(
    url: str, names: list[str], downloader: Downloader, *, needed: bool = True
) -> dict[str, tuple[int, str]]:
    """Size and stamp of objects below a URL, each asked for. Unless all are `needed`, those not there are left out.

    Raises `ShardError` for one that is needed and gone, `RemoteError`.
    """
    return _stats(RemoteShards.named(url, names), downloader, needed=needed)


def place_of_object(url: str, downloader: Downloader) -> tuple[RemotePlace, str]:
    """The place of one object, of any kind, in the cache, and its stamp. Raises `ShardError`, `RemoteError`."""
    root, _, name = url.rpartition("/")
    stats = asked_stamps_of(root, [name], downloader)
    return place_of_objects(root, stats, f"{url} object", downloader), stats[name][1]


def place_of_objects(root: str, stats: dict[str, tuple[int, str]], dataset: str, downloader: Downloader) -> RemotePlace:
    """The place in the cache of objects of any kind with these sizes and stamps; `dataset` names its folder there."""
    cache = cache_folder(None)
    folder = cache / hashlib.sha256(dataset.encode()).hexdigest()[:32]
    sizes = np.array([size for size, _ in stats.values()], np.int64)
    found = RemoteShards(root, [*stats], sizes, [stamp for _, stamp in stats.values()])
    with locked_folder(folder):
        version = version_now(found, folder, ("", ""), downloader)
        create_flags(version)
        cached = ShardCache(version)
        _forget_changed(cached, folder)
        cached.hold()
    return RemotePlace(root, cached, cache, cache_bytes(None, cache))


def check_stamp(url: str, stamp: str, found: str) -> None:
    """Raises `ShardError` if an object is another than the one with this stamp."""
    if stamp != found:
        raise ShardError(
            f"{url}: it was replaced since it was looked at first ({stamp} then, {found} now); leave it as it is "
            "meanwhile, and start again",
            reason="changed shard",
        )


def short_downloader() -> contextlib.closing[Downloader]:
    """A downloading process for a few questions, to be closed after them."""
    folder = cache_folder(None)
    return contextlib.closing(Downloader(folder, cache_bytes(None, folder)))


def names_behind(url: str, index_names: list[str]) -> list[str]:
    """The names of the objects below a URL; below one of a web server, those of these indexes that are there."""
    with short_downloader() as downloader:
        if not url.startswith("http"):
            return [name for name, _, _ in downloader.call("listing", url, True)]
        tickets = {name: downloader.submit("stat", url, name) for name in index_names}
        return [name for name, ticket in tickets.items() if downloader.result(ticket) is not None]


def version_now(found: RemoteShards, dataset: Path, beside: tuple[str, str], downloader: Downloader) -> Path:
    """The version of what the files are now."""
    stats = _stats(found, downloader)
    with_suffix, suffix = beside
    companions = [name[: -len(with_suffix)] + suffix for name in found.names if suffix and name.endswith(with_suffix)]
    companions = companions if with_suffix or not suffix else [suffix]
    extra = _stats(RemoteShards.named(found.root, companions), downloader, needed=False)
    version = dataset / _hash(sorted({**stats, **extra}.items()))
    if not (version / "blocks").exists():
        for name, (size, _) in extra.items():
            downloader.call("whole", found.root, name, size, str(version / "beside" / name))
        write_blocks(version, {name: size for name, (size, _) in stats.items()})
    return version


def _stats(found: RemoteShards, downloader: Downloader, *, needed: bool = True) -> dict[str, tuple[int, str]]:
    """Size and stamp of each file. Unless all are `needed`, those that are not there are left out."""
    known = zip(found.names, found.sizes.tolist(), found.stamps, strict=True) if found.stamps else ()
    listed = {name: (size, stamp) for name, size, stamp in known if size >= 0}
    tickets = {name: downloader.submit("stat", found.root, name, needed) for name in found.names if name not in listed}
    asked = {name: downloader.result(ticket) for name, ticket in tickets.items()}
    gone = next((name for name, stat in asked.items() if stat is None), None)
    if gone is not None and needed:
        raise _gone(found.root, gone)
    return {**listed, **{name: stat for name, stat in asked.items() if stat is not None}}


def _gone(root: str, name: str) -> ShardError:
    return ShardError(f"{root}/{name}: no such object on the server", reason=NOT_THERE)


def _own_index(root: str, index_name: str, dataset: Path, downloader: Downloader) -> Path | None:
    """The index that lies beside the files, downloaded if it was replaced; None without one."""
    stat = downloader.call("stat", root, index_name)
    here, stamp = dataset / "own.index", dataset / "own.stamp"
    if stat is None:
        return None
    if not here.exists() or not stamp.exists() or stamp.read_text() != stat[1]:
        downloader.call("whole", root, index_name, stat[0], str(here))
        replace_file(stamp, [stat[1].encode()])
    return here


def _names_in(own: Path | None, root: str, index: IndexKind) -> list[str]:
    if own is None:
        raise ShardError(
            f"{root}: a web server cannot be listed, and there is no {index.path}; name the files, as in "
            f"{root}/{{000..099}}.EXTENSION, or write it by `savable index` where they lie"
        )
    return sorted(index.names_in(own))


def _opened_before(named: Path) -> _Named | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        before = msgspec.json.decode(named.read_bytes(), type=_Named)
        if (named.parent / before.version / "places").exists():
            return before
    return None


def _forget_changed(cached: ShardCache, dataset: Path) -> None:
    """Drops what is here of files that were found to be other than before under the same stamp, and their index."""
    changed = changed_shards(dataset)[0]
    if not changed:
        return
    for shard, entry in enumerate(cached.shards):
        if entry.name in changed:
            cached.forget(shard)
    (cached.folder / "places").unlink(missing_ok=True)
    note_reindexed(dataset)


def _hash(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:32]
