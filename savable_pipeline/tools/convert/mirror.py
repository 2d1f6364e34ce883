"""`Target`: where a conversion writes: a folder. Of a URL it is a local one with its metadata and holes for shards.

    s3://bucket/out/000003.tar        there as a whole, or not at all   ─ a hole of its size ─  mirror/000003.tar
    s3://bucket/out/.nv-meta/…        the records of finished shards    ─ downloaded ─────────  mirror/.nv-meta/…

The bucket alone decides what is finished, so the same command goes on with it from any machine. Nothing in the mirror
is needed afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from savable_pipeline.core.addresses import clean_address, has_user
from savable_pipeline.data.remote.bucket import SCHEMES, Bucket, Found, close_buckets
from savable_pipeline.data.remote.cache_space import cache_folder
from savable_pipeline.data.shards.energon_metadata import META
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.plan import CLASSES, MANIFEST, RECORDS, WORK
from savable_pipeline.tools.convert.shard_job import make_hole
from savable_pipeline.tools.convert.writer_processes import claimed, locked


@dataclass(frozen=True, slots=True)
class Target:
    """The folder that a conversion writes into; with a bucket, the one that stands for it meanwhile."""

    folder: Path
    bucket: Bucket | None = None
    pulled: dict[str, str] = field(default_factory=dict)  # the hashes of the metadata that the bucket has

    @property
    def name(self) -> str:
        """Its URL or path."""
        return str(self.folder) if self.bucket is None else self.bucket.url

    @property
    def shard_place(self) -> dict[str, Any]:
        """What a `ShardPlace` in it has besides a name."""
        work = self.folder / WORK
        return {"target": self.folder, "work": work, "aside": work, "bucket": self.bucket}

    def bring(self, name: str) -> None:
        """Put the bytes of a shard in place of its hole; its time stays that of the object."""
        if self.bucket is None:
            return
        path = self.folder / name
        stat = path.stat()
        self.bucket.fetch([Found(name, stat.st_size, 0)], self.folder)
        os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))

    def pull(self, bucket: Bucket) -> None:
        """Make the folder what the bucket is."""
        found = bucket.listing()
        metadata = [
            each
            for each in found
            if each.name == CLASSES or (each.name.startswith(f"{META}/") and each.name != RECORDS)
        ]
        bucket.fetch(metadata, self.folder)
        self.pulled.update(self._metadata())
        for each in found:
            if each.name.endswith(".tar"):
                make_hole(self.folder / each.name, each.size)
                os.utime(self.folder / each.name, ns=(each.written_ns, each.written_ns))

    def push(self, bucket: Bucket) -> None:
        """Upload the metadata, that the conversion is done as the last, and remove the records of single shards."""
        now = self._metadata()
        for name in sorted(now, key=lambda name: name == MANIFEST):
            if self.pulled.get(name) != now[name]:
                bucket.upload(name, self.folder / name)
        bucket.erase([found.name for found in bucket.listing() if found.name.startswith(f"{WORK}/")])

    def _metadata(self) -> dict[str, str]:
        files = [path for path in (self.folder / CLASSES, *sorted((self.folder / META).glob("*"))) if path.is_file()]
        return {
            path.relative_to(self.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
        }


@contextlib.contextmanager
def target_at(place: Path | str) -> Iterator[Target]:
    """The target that a path or a URL names. Raises ValueError for a URL in a Path, or of another kind."""
    if isinstance(place, Path) and re.match("[a-z0-9]+:/", str(place)):
        raise ValueError(f"{clean_address(str(place))}: a Path cannot hold a URL; give it as a str")
    if "://" not in str(place):
        yield Target(Path(place))
        return
    with mirrored(str(place)) as target:
        yield target


@contextlib.contextmanager
def mirrored(url: str) -> Iterator[Target]:
    """The mirror of a URL, for one conversion of this machine at a time. Raises ValueError for another kind of URL."""
    url = url.rstrip("/")
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest:
        raise ValueError(
            f"{clean_address(url)}: shards can be written to a folder, or to {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    if has_user(url):
        raise ValueError(f"{clean_address(url)}: a URL has no user or password in it: give these in the environment")
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
