"""Whether files changed since they were converted, at equal sizes too: then what lies in the shards is not theirs.

A file is compared with its shard byte by byte if it, a link to it or a folder around it was changed after the shard was
written; all files are, if the source does not lie where it did. Others are not read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.part_types import decode_error
from savable_pipeline.data.shards.tar import Extent
from savable_pipeline.data.shards.tar import samples as tar_samples
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.mirror import Mirror
from savable_pipeline.tools.convert.model import Files, Part
from savable_pipeline.tools.convert.plan import Manifest, Plan, PlannedShard, two_sources

_MARGIN_NS = 2_000_000_000  # clocks of file systems are as coarse as this


def is_newer(source: Path, written: Path) -> bool:
    """Whether a file may have been changed since `written` was; a copy with an old date counts too."""
    changed_ns = max(source.stat().st_ctime_ns, source.lstat().st_ctime_ns)
    return changed_ns > written.stat().st_mtime_ns - _MARGIN_NS


def check_unchanged(
    target: Path, plan: Plan, shards: Iterable[PlannedShard], there: Manifest, mirror: Mirror | None = None
) -> None:
    """Raises `SavableError` that names files with other bytes than in these shards, which were written before.

    `there` is the manifest of then, which tells whether the source lies where it did. Of a `mirror` the shards are
    brought if they are read.
    """
    moved = there.place != plan.manifest.place
    changed = [path for shard in shards for path in _changed(target / shard.name, plan, shard, moved, mirror)]
    if changed:
        sources = two_sources(plan.manifest, there)
        raise SavableError(
            f"{target} holds another conversion: {len(changed)} files hold other bytes than were converted, at the "
            f"same size: {listed(changed)}{sources and f'; {sources}'}. Convert into another folder, or remove this one"
        )


def _changed(tar: Path, plan: Plan, shard: PlannedShard, moved: bool, mirror: Mirror | None) -> Iterator[str]:
    samples = plan.input.samples[shard.first : shard.last]
    if not tar.exists():  # all its samples were rejected
        for sample in samples:
            yield from _mended(sample, plan.input.reader.read(sample), plan.options.check_images)
        return
    suspects = _suspects(samples, plan.input.root, tar, moved)
    if not suspects:
        return
    if mirror is not None:
        mirror.bring(shard.name)
    fd = os.open(tar, os.O_RDONLY | os.O_CLOEXEC)
    try:
        extents = {extent.key: extent for extent in tar_samples(tar.name, fd)}
        for sample in suspects:
            parts = plan.input.reader.read(sample)
            if sample.key in extents:
                yield from _differing(sample, parts, _members(fd, extents[sample.key]))
            else:
                yield from _mended(sample, parts, plan.options.check_images)
    finally:
        os.close(fd)


def _suspects(samples: list[Files], root: str, tar: Path, moved: bool) -> list[Files]:
    """The samples with a file that may have been changed since the shard was written.

    (Of what lies behind a URL the place has the stamps: it is `moved` then.)
    """
    behind_url = "://" in root

    @functools.cache
    def newer(path: str) -> bool:
        folder = path.rpartition("/")[0]
        return is_newer(Path(root, path), tar) or (bool(folder) and newer(folder))

    def may_have_changed(path: str) -> bool:
        return moved or ((path.startswith("/") or not behind_url) and newer(path))

    return [sample for sample in samples if any(may_have_changed(part.path) for part in _whole_files(sample))]


def _members(fd: int, extent: Extent) -> dict[str, bytes]:
    members = zip(extent.extensions, extent.members, strict=True)
    return {extension: os.pread(fd, member.size, member.payload) for extension, member in members}


def _differing(sample: Files, parts: dict[str, bytes], there: dict[str, bytes]) -> Iterator[str]:
    """The files of a sample that hold other bytes than the shard."""
    return (part.path for part in _whole_files(sample) if parts[part.extension] != there.get(part.extension))


def _mended(sample: Files, parts: dict[str, bytes], check_images: bool) -> Iterator[str]:
    """A file of a sample that was rejected, if it would not be now."""
    if not any(decode_error(name, data, check_images=check_images) for name, data in parts.items()):
        yield next(_whole_files(sample), sample.parts[0]).path


def _whole_files(sample: Files) -> Iterator[Part]:
    """The parts that are files or records; those of lines of a JSONL file are compared by its hash."""
    return (part for part in sample.parts if part.offset is None)
