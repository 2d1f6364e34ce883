"""A cache of one job's own: objects that a machine reads for another one, downloaded aside and dropped with the job.

What a job finds goes back with the server's version (its ETag), so that who asked pins what was read.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from savable_pipeline.data.remote.cache_space import cache_bytes
from savable_pipeline.data.remote.downloader import Downloader
from savable_pipeline.data.remote.remote_files import RemotePlace, version_now
from savable_pipeline.data.remote.shard_cache import ShardCache, create_flags
from savable_pipeline.data.remote.urls import RemoteShards
from savable_pipeline.data.shards.index_file import ShardTable
from savable_pipeline.data.shards.scan import TARS
from savable_pipeline.errors import RemoteError, ShardError

# By process: one that was inherited in a fork answers its owner alone.
_begun: dict[int, tuple[Path, Downloader]] = {}


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object: its name below a URL, and its size in bytes as the server listed it."""

    url: str
    name: str
    size: int


@contextlib.contextmanager
def scratch() -> Iterator[tuple[Path, Downloader]]:
    """A new folder, removed with the block, and a process that downloads into it, which serves the next ones too."""
    root, downloader = _running()
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as name:
        try:
            yield Path(name), downloader
        finally:
            with contextlib.suppress(RemoteError):  # it may have died, or be gone already
                downloader.call("forget", name)


def shared_downloader() -> Downloader:
    """The downloading process of the jobs of this process, for what needs one for a moment."""
    return _running()[1]


def close_scratch() -> None:
    """End the downloading process that this process began for its jobs, and remove the folder."""
    begun = _begun.pop(os.getpid(), None)
    if begun is not None:
        root, downloader = begun
        downloader.close()
        shutil.rmtree(root, ignore_errors=True)


def _running() -> tuple[Path, Downloader]:
    found = _begun.get(os.getpid())
    if found is None or found[1].ended or not found[0].is_dir():
        close_scratch()
        root = Path(tempfile.mkdtemp(prefix="savable-"))
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        found = _begun[os.getpid()] = root, Downloader(root, cache_bytes(None, root))
    return found


def scan_object(tar: RemoteObject) -> tuple[ShardTable, str]:
    """The table of a tar, and the version that was read. Raises `ShardError` if it has another size, `RemoteError`."""
    with scratch() as (folder, downloader):
        version = downloader.call("whole", tar.url, tar.name, tar.size, str(folder / tar.name))
        return TARS.scan(folder, tar.name), version


def scratch_place(found: RemoteObject, beside: tuple[str, str], folder: Path, downloader: Downloader) -> RemotePlace:
    """The place of one file, and of what lies beside it, in a cache of its own; see `remote_version`."""
    version = version_now(RemoteShards.named(found.url, [found.name]), folder / "dataset", beside, downloader)
    create_flags(version)
    cached = ShardCache(version)
    if cached.shards[0].size != found.size:
        raise ShardError(
            f"{found.url}/{found.name}: {cached.shards[0].size} bytes, but {found.size} when it was listed; it is "
            "being written: start again once it is whole",
            reason="changed shard",
        )
    return RemotePlace(found.url, cached, folder, cache_bytes(None, folder))
