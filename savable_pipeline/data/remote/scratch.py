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
from pathlib import Path

from savable_pipeline.data.remote.cache_space import cache_bytes
from savable_pipeline.data.remote.downloader import Downloader
from savable_pipeline.errors import RemoteError

# By process: one that was inherited in a fork answers its owner alone.
_begun: dict[int, tuple[Path, Downloader]] = {}


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
