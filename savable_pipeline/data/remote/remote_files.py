"""Where files behind a URL are read: their place in the cache, and what the server says of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from savable_pipeline.data.remote.cache_layout import open_layout
from savable_pipeline.data.remote.lookup import METADATA_FOLDER, dataset_folder, locked_folder
from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.remote.shard_cache import ShardCache, create_flags
from savable_pipeline.data.remote.urls import RemoteShards
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_file import ShardIndex, ShardTable
from savable_pipeline.data.shards.index_writer import write_index
from savable_pipeline.data.shards.shard_list import ShardEntry, ShardNames
from savable_pipeline.errors import ShardError

_UNREAD = "files"  # the kind of an index that says nothing but names and sizes


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """Where files behind a URL are read: the version `cached` in the cache of a `session`, which downloads it."""

    url: str
    cached: ShardCache
    session: Session

    @property
    def metadata(self) -> Path:
        """The folder with what lies in `.nv-meta` beside the files."""
        return self.cached.folder.parent / METADATA_FOLDER

    @property
    def index(self) -> ShardIndex:
        """What is known of the files, of at least those that are read."""
        return self.cached.layout.index

    @property
    def index_path(self) -> Path:
        """The file of the index."""
        return self.cached.folder / "index"

    def beside(self, name: str) -> Path:
        """Where the local copy lies of what lies beside the files under this name."""
        return self.cached.folder / "beside" / name


def held(version: Path) -> ShardCache:
    """A version in the cache, which is kept as long as this process has it."""
    create_flags(version)
    cached = ShardCache(version)
    cached.hold()
    return cached


def unread_version(found: RemoteShards, folder: Path) -> ShardCache:
    """A version of files of which names, sizes and stamps are known and nothing else, in the folder of a dataset.

    What is here of those that were found to be others than before under the same stamp is dropped.
    """
    version = folder / f"new-{hash_of(found)}"
    try:
        open_layout(version)
    except (OSError, ValueError, ShardError):
        entries = zip(found.names, found.sizes.tolist(), strict=True)
        write_index(version / "index", (ShardTable(ShardEntry(*each, 0, 0), b"") for each in sorted(entries)), _UNREAD)
    cached = held(version)
    cached.forget_changed()
    return cached


def hash_of(found: RemoteShards, *, sizes: bool = True) -> str:
    """A hash of names, stamps, and `sizes` of files."""
    digest = hashlib.sha256(ShardNames.of(found.names).text)
    for stamp in found.stamps:
        digest.update(f"\0{stamp}".encode())
    if sizes:
        digest.update(found.sizes.tobytes())
    return digest.hexdigest()[:32]


def asked(
    found: RemoteShards, session: Session, numbers: Iterable[int], form: FileFormat | None = None
) -> RemoteShards:
    """The same files with the sizes and stamps of those with these numbers: as listed, or as the server says now.

    Given their `form`, a stamp also tells of what lies beside a file. Raises `ShardError` for one that is gone.
    """
    stamps = list(found.stamps) or [""] * len(found.names)
    companions = {}
    if form is not None and form.beside[1]:
        numbers = [*numbers]
        own = form.beside[0]
        companions = {n: form.companion(found.names[n]) for n in numbers if found.names[n].endswith(own)}
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
    """Size and stamp of objects below a URL: by one listing of a bucket. Raises `ShardError` for one that is gone."""
    if not url.startswith("http"):
        session.listing(url)
    return session.stats(url, names, needed=True)


def place_of_object(url: str, session: Session) -> tuple[RemotePlace, str]:
    """The place of one object, of any kind, in the cache, and its stamp. Raises `ShardError`, `RemoteError`."""
    root, _, name = url.rpartition("/")
    size, stamp = session.stats(root, [name], needed=True)[name]
    folder = dataset_folder(session.cache, f"{url} object")
    with locked_folder(folder):
        cached = unread_version(RemoteShards(root, [name], np.array([size]), [stamp]), folder)
    return RemotePlace(root, cached, session), stamp


def check_stamp(url: str, stamp: str, found: str) -> None:
    """Raises `ShardError` if an object is another than the one with this stamp."""
    if stamp != found:
        raise ShardError(
            f"{url}: it was replaced since it was looked at first ({stamp} then, {found} now); leave it as it is "
            "meanwhile, and start again",
            reason="changed shard",
        )


def names_behind(url: str, index_names: list[str], session: Session) -> list[str]:
    """The names of the objects below a URL; below one of a web server, those of these indexes that are there."""
    return [*(session.stats(url, index_names) if url.startswith("http") else session.listing(url).texts())]
