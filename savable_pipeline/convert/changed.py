"""Whether files changed since they were converted, at equal sizes too: then what lies in the shards is not theirs.

A file whose inode was changed after its shard was written is compared with the shard byte by byte; others are not read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from savable_pipeline.convert.mirror import Mirror
from savable_pipeline.convert.model import Files, Part
from savable_pipeline.convert.plan import Plan, PlannedShard
from savable_pipeline.core.wording import listed
from savable_pipeline.errors import SavableError
from savable_pipeline.shards.part_types import decode_error
from savable_pipeline.shards.tar import Extent, samples

_MARGIN_NS = 2_000_000_000  # clocks of file systems are as coarse as this


def is_newer(source: Path, written: Path) -> bool:
    """Whether a file may have been changed since `written` was; a copy with an old date counts too."""
    return source.stat().st_ctime_ns > written.stat().st_mtime_ns - _MARGIN_NS


def check_unchanged(target: Path, plan: Plan, shards: Iterable[PlannedShard], mirror: Mirror | None = None) -> None:
    """Raises `SavableError` that names files with other bytes than in these shards, which were written before."""
    there = [shard for shard in shards if (target / shard.name).exists()]
    changed = [path for shard in there for path in _changed(target, plan, shard, mirror)]
    if changed:
        raise SavableError(
            f"{target} holds another conversion: {len(changed)} files were changed since, at the same size: "
            f"{listed(changed)}. Convert into another folder, or remove this one"
        )


def _changed(target: Path, plan: Plan, shard: PlannedShard, mirror: Mirror | None) -> Iterator[str]:
    tar = target / shard.name
    suspects = _suspects(plan, shard, tar)
    if not suspects:
        return
    if mirror is not None:
        mirror.bring(shard.name)
    fd = os.open(tar, os.O_RDONLY | os.O_CLOEXEC)
    try:
        extents = {extent.key: extent for extent in samples(shard.name, fd)}
        for sample in suspects:
            parts = plan.input.reader.read(sample)
            if sample.key in extents:
                yield from _differing(sample, parts, _members(fd, extents[sample.key]))
            else:
                yield from _mended(sample, parts, plan.options.check_images)
    finally:
        os.close(fd)


def _suspects(plan: Plan, shard: PlannedShard, tar: Path) -> list[Files]:
    """The samples with a file that may have been changed since the shard was written."""
    root = Path(plan.input.root)
    newer = functools.cache(lambda path: is_newer(root / path, tar))
    chosen = plan.input.samples[shard.first : shard.last]
    return [sample for sample in chosen if any(newer(part.path) for part in _whole_files(sample))]


def _members(fd: int, extent: Extent) -> dict[str, bytes]:
    members = zip(extent.extensions, extent.members, strict=True)
    return {extension: os.pread(fd, member.size, member.payload) for extension, member in members}


def _differing(sample: Files, parts: dict[str, bytes], there: dict[str, bytes]) -> Iterator[str]:
    """The files of a sample that hold other bytes than the shard."""
    return (part.path for part in _whole_files(sample) if parts[part.extension] != there.get(part.extension))


def _mended(sample: Files, parts: dict[str, bytes], check_images: bool) -> Iterator[str]:
    """A file of a sample that was rejected, if it would not be now."""
    if not any(decode_error(name, data, check_images=check_images) for name, data in parts.items()):
        yield next(_whole_files(sample)).path


def _whole_files(sample: Files) -> Iterator[Part]:
    """The parts that are files or records; those of lines of a JSONL file are compared by its hash."""
    return (part for part in sample.parts if part.offset is None)
