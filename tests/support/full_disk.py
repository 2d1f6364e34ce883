"""The downloading process with a nearly full disk, simulated at its writes to shards in the cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from savable_pipeline.data.remote import download_process
from savable_pipeline.data.remote.cache_space import bytes_in_use

DISK_BYTES = "TOY_DISK_BYTES"  # environment variable with the number of free bytes


def serve(connection: Any, requests: Any, cache: str, *settings: Any) -> None:
    """Run `download_process.serve` with such a disk."""
    pwrite, disk = os.pwrite, int(os.environ[DISK_BYTES])

    def limited(fd: int, data: Any, offset: int) -> int:
        free = disk - bytes_in_use(Path(cache))
        if free <= 0 and len(data) > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data[: max(free, 100)], offset)

    os.pwrite = limited  # type: ignore[assignment]
    download_process.serve(connection, requests, cache, *settings)
