"""Small shards, written without slow imports, because many short-lived processes import this file."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    """Write a ustar tar with these members, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


def write_numbered_shards(folder: Path, sizes: list[int], **extra: Any) -> None:
    """Write JSON samples `{"id": n}` with consecutive n, `sizes[i]` of them in shard i."""
    n = 0
    for shard, size in enumerate(sizes):
        numbered = range(n, n + size)
        members = [(f"s{i:06d}.json", json.dumps({"id": i, **extra}).encode()) for i in numbered]
        write_tar(folder / f"{shard:04d}.tar", members)
        n += size
