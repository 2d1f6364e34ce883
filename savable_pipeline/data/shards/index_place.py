"""Where the index of a folder of shards lies: beside the shards, or in the user's cache if that place is read-only."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from savable_pipeline.core.files import user_cache
from savable_pipeline.core.open_files import with_handles
from savable_pipeline.data.shards.energon_metadata import INDEX_NAME, META
from savable_pipeline.data.shards.index_file import TAR
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

T = TypeVar("T")


def index_name(kind: str) -> str:
    """The path of the index of files of a kind below their folder."""
    return INDEX_NAME if kind == TAR else f"{META}/savable.{kind}.index"


def media_table_name(kind: str) -> str:
    """The path of the table of media of files of a kind below their folder."""
    return index_name("media" if kind == TAR else f"{kind}.media")


def index_places(root: Path, name: str) -> Iterator[Path]:
    """The places where an index may lie: `name` below the shards' folder; and in the user's cache, if there is one."""
    yield root / name
    hashed = f"{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]}{Path(name).name.removeprefix('savable')}"
    if (cache := user_cache()) is not None:
        yield cache / "savable_pipeline" / hashed


def in_first_place(root: Path, name: str, make: Callable[[Path], T]) -> T:
    """What `make(path)` gives, with the path of the index in the first place that can be written and has room, under
    its lock. Raises `ShardError` if there is none.
    """
    faults = []
    for path in index_places(root, name):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = with_handles(partial(path.with_name(path.name + ".lock").open, "ab"))
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return make(path)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                faults.append(f"{path}: {error.strerror}")
                log.warning("%s: %s; the index cannot be written there", path, error.strerror)
    cache = "" if len(faults) > 1 else "this user has no home folder: "
    raise ShardError(
        f"{root}: no place to write an index: {'; '.join(faults)}; {cache}make room, or set XDG_CACHE_HOME to a folder "
        "that can be written"
    )
