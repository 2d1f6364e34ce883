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
from savable_pipeline.data.remote.session import Session
from savable_pipeline.errors import RemoteError

# By process: one that was inherited in a fork answers its owner alone.
_begun: dict[int, Session] = {}


@contextlib.contextmanager
def scratch() -> Iterator[tuple[Path, Session]]:
    """A new folder, removed with the block, and a session that downloads into it, by one process for all of them."""
    session = job_session()
    with tempfile.TemporaryDirectory(dir=session.cache, ignore_cleanup_errors=True) as name:
        try:
            yield Path(name), session
        finally:
            with contextlib.suppress(RemoteError):  # it may have died, or be gone already
                session.call("forget", name)


def job_session() -> Session:
    """A session of the jobs of this process, for what needs one for a moment."""
    found = _running()
    return Session(found.cache, found.limit)


def close_scratch() -> None:
    """End the downloading process that this process began for its jobs, and remove the folder."""
    begun = _begun.pop(os.getpid(), None)
    if begun is not None:
        begun.connected().close()
        shutil.rmtree(begun.cache, ignore_errors=True)


def _running() -> Session:
    found = _begun.get(os.getpid())
    if found is None or not found.cache.is_dir():
        close_scratch()
        root = Path(tempfile.mkdtemp(prefix="savable-"))
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        found = _begun[os.getpid()] = Session(root, cache_bytes(None, root))
        found.connected()
    return found
