"""Target of a conversion: a folder, or a bucket with a local mirror.

The mirror has the metadata, and the records of the ranges.

    mirror/.nv-meta/…  ─ uploaded at the end, the manifest last ─▶  s3://bucket/out/.nv-meta/…
    a range            ─ shards ─▶  s3://bucket/out/.nv-meta/savable.convert/000012/…  ─ renamed ─▶  000034.tar

A conversion into a bucket that was stopped starts again, from any machine. The mirror is removed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from savable_pipeline.core.wording import clean_address, has_user
from savable_pipeline.data.remote.cache_space import cache_folder
from savable_pipeline.data.remote.session import BUCKET_SCHEMES, Bucket, close_buckets
from savable_pipeline.data.shards.metadata import META
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.jobs import claimed
from savable_pipeline.tools.convert.options import CLASSES, MANIFEST, WORK
from savable_pipeline.tools.convert.shard_series import locked


@dataclass(frozen=True, slots=True)
class Target:
    """Target folder. With a bucket, it is the mirror of the bucket."""

    folder: Path
    bucket: Bucket | None = None
    objects: list[str] = field(default_factory=list)  # names of the objects in the bucket at the start

    @property
    def name(self) -> str:
        """Return its URL or path."""
        return str(self.folder) if self.bucket is None else self.bucket.url

    @property
    def work(self) -> Path:
        """Return the folder of unfinished work."""
        return self.folder / WORK

    def start_again(self) -> None:
        """Remove the metadata that a stopped conversion wrote into the bucket."""
        if self.bucket is not None:
            self.bucket.erase([name for name in self.objects if name.startswith(f"{META}/") and name != MANIFEST])
            self.bucket.upload(MANIFEST, self.folder / MANIFEST)

    def publish_shard(self, shard: str, name: str) -> None:
        """Rename a shard of a range to its final name, after its file of offsets.

        A shard that was renamed before a kill stays.
        """
        offsets = f"{name}.idx"
        if self.bucket is not None:
            self.bucket.rename(f"{WORK}/{shard}", name)
            self.bucket.upload(offsets, self.work / offsets)
            return
        (self.work / offsets).replace(self.folder / offsets)
        if (self.work / shard).exists():
            (self.work / shard).replace(self.folder / name)

    def publish(self, shards: set[str]) -> None:
        """Upload the metadata to the bucket, the manifest last.

        Objects of a stopped conversion that are not among the final `shards` are removed.
        """
        if self.bucket is None:
            return
        known = [each.name for each in self.bucket.listing()]
        stale = [n for n in known if n.startswith(f"{WORK}/") or re.fullmatch(r"([^/]+-)?[0-9]{6,}\.tar(\.idx)?", n)]
        self.bucket.erase([name for name in stale if name.removesuffix(".idx") not in shards])
        files = [path for path in (self.folder / CLASSES, *sorted((self.folder / META).glob("*"))) if path.is_file()]
        for path in sorted(files, key=lambda path: path == self.folder / MANIFEST):
            self.bucket.upload(path.relative_to(self.folder).as_posix(), path)


@contextlib.contextmanager
def target_at(path: Path | str) -> Iterator[Target]:
    """Open the target of a path or a URL.

    Raises ValueError for a URL in a Path, or of an unsupported kind.
    """
    if isinstance(path, Path) and re.match("[a-z0-9]+:/", str(path)):
        raise ValueError(f"{clean_address(str(path))}: a Path cannot hold a URL. Pass it as a str")
    if "://" not in str(path):
        yield Target(Path(path))
        return
    url = str(path).rstrip("/")
    scheme, _, rest = url.partition("://")
    if scheme not in BUCKET_SCHEMES or not rest:
        raise ValueError(
            f"{clean_address(url)}: unsupported target. Use a folder, or {', '.join(f'{s}://' for s in BUCKET_SCHEMES)}"
        )
    if has_user(url):
        raise ValueError(f"{clean_address(url)}: a URL must not have a user or password. Use environment variables")
    bucket = Bucket(url)
    folder = cache_folder(None) / f"convert-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, f"{url}: another conversion is writing there; wait until it ends"):  # on this machine
        try:
            _empty(folder)
            found = bucket.listing()
            bucket.fetch([each for each in found if each.name == MANIFEST], folder)
            yield Target(folder, bucket, [each.name for each in found])
        except SavableError as error:
            if str(folder) not in str(error):
                raise
            raise SavableError(str(error).replace(str(folder), url)) from error
        finally:
            close_buckets()
            shutil.rmtree(folder, ignore_errors=True)


def _empty(folder: Path) -> None:
    """Remove the files of a killed conversion, once its processes have ended."""
    if (folder / META).is_dir():
        with claimed(folder / META, folder / WORK):
            pass
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
