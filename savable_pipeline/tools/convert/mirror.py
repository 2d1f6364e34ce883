"""`Target`: where a conversion writes: a folder. Of a URL it is a local one with its metadata and holes for shards.

    mirror/000003.tar, a hole of its size    ─ while it is written ─     s3://bucket/out/000003.tar, as a whole
    mirror/.nv-meta/…                        ─ when all is written ─     s3://bucket/out/.nv-meta/…

The manifest alone lies in the bucket from the start, and says at the end that all is there. A conversion that was
stopped begins again, from any machine: the same shards are written over. Nothing in the mirror is needed afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from savable_pipeline.core.wording import clean_address, has_user
from savable_pipeline.data.remote.cache_space import cache_folder
from savable_pipeline.data.remote.session import SCHEMES, Bucket, close_buckets
from savable_pipeline.data.shards.metadata import META
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.plan import CLASSES, MANIFEST, RECORDS, WORK
from savable_pipeline.tools.convert.writer_processes import claimed, locked


@dataclass(frozen=True, slots=True)
class Target:
    """The folder that a conversion writes into; with a bucket, the one that stands for it meanwhile."""

    folder: Path
    bucket: Bucket | None = None
    there: list[str] = field(default_factory=list)  # the names of the bucket's objects, when it began
    stale: list[str] = field(default_factory=list)  # those of them that are shards which a stopped conversion left

    @property
    def name(self) -> str:
        """Its URL or path."""
        return str(self.folder) if self.bucket is None else self.bucket.url

    @property
    def shard_paths(self) -> dict[str, Any]:
        """What a `ShardPaths` in it has besides a name."""
        work = self.folder / WORK
        return {"target": self.folder, "work": work, "aside": work, "bucket": self.bucket}

    def pull(self, bucket: Bucket) -> None:
        """Note what the bucket holds, and bring its manifest."""
        found = bucket.listing()
        self.there.extend(each.name for each in found)
        bucket.fetch([each for each in found if each.name == MANIFEST], self.folder)

    def begin_again(self, bucket: Bucket, shards: Iterable[str]) -> None:
        """Remove the metadata that a stopped conversion into these shards left; they themselves are written over."""
        own = {name for shard in shards for name in (shard, f"{shard}.idx")}
        self.stale[:] = [name for name in self.there if name in own]
        bucket.erase([name for name in self.there if name.startswith(f"{META}/") and name != MANIFEST])

    def push(self, bucket: Bucket) -> None:
        """Upload the metadata, that the conversion is done as the last, and remove what is no part of it."""
        rejected = [name for name in self.stale if not (self.folder / name.removesuffix(".idx")).exists()]
        bucket.erase(rejected)
        files = [path for path in (self.folder / CLASSES, *sorted((self.folder / META).glob("*"))) if path.is_file()]
        for path in sorted(files, key=lambda path: path == self.folder / MANIFEST):
            bucket.upload(path.relative_to(self.folder).as_posix(), path)
        bucket.erase([*RECORDS.values()])


@contextlib.contextmanager
def target_at(path: Path | str) -> Iterator[Target]:
    """The target that a path or a URL names. Raises ValueError for a URL in a Path, or of another kind."""
    if isinstance(path, Path) and re.match("[a-z0-9]+:/", str(path)):
        raise ValueError(f"{clean_address(str(path))}: a Path cannot hold a URL. Pass it as a str")
    if "://" not in str(path):
        yield Target(Path(path))
        return
    with mirrored(str(path)) as target:
        yield target


@contextlib.contextmanager
def mirrored(url: str) -> Iterator[Target]:
    """The mirror of a URL, for one conversion of this machine at a time. Raises ValueError for another kind of URL."""
    url = url.rstrip("/")
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest:
        raise ValueError(
            f"{clean_address(url)}: unsupported target. Use a folder, or {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    if has_user(url):
        raise ValueError(f"{clean_address(url)}: a URL must not have a user or password. Use environment variables")
    bucket = Bucket(url)
    target = Target(cache_folder(None) / f"convert-{hashlib.sha256(url.encode()).hexdigest()[:16]}", bucket)
    target.folder.mkdir(parents=True, exist_ok=True)
    with locked(target.folder, f"{url}: another conversion is writing there; wait until it ends"):
        try:
            _empty(target.folder)
            target.pull(bucket)
            yield target
            target.push(bucket)
        except SavableError as error:
            if str(target.folder) not in str(error):
                raise
            raise SavableError(str(error).replace(str(target.folder), url)) from error
        finally:
            close_buckets()
            shutil.rmtree(target.folder, ignore_errors=True)


def _empty(folder: Path) -> None:
    """Remove what a killed conversion left, once its processes are gone."""
    if (folder / META).is_dir():
        with claimed(folder / META, folder / WORK):
            pass
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
