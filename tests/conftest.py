"""Small datasets that the tests share."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeShards = Callable[..., Path]


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    """A plain ustar tar with these members, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """Writes shards of JSON samples `{"id": n}` with n counting through, `sizes[i]` of them in shard i."""

    def make(sizes: list[int], folder: str = "shards", **extra: Any) -> Path:
        n = 0
        for shard, size in enumerate(sizes):
            members = []
            for _ in range(size):
                members.append((f"s{n:06d}.json", json.dumps({"id": n, **extra}).encode()))
                n += 1
            write_tar(tmp_path / folder / f"{shard:04d}.tar", members)
        return tmp_path / folder

    return make
