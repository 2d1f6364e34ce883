"""Going on with a conversion: whether what a folder holds is the same one, and what of it is done.

A source may have changed since, at equal sizes too: then what lies in the shards is not its. A file is compared with
its shard byte by byte if it, a link to it or a folder around it was changed after the shard was written; all files are,
if the source does not lie where it did. Others are not read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.shards.tar import Extent
from savable_pipeline.data.shards.tar import samples as tar_samples
from savable_pipeline.data.shards.tar_format import TarIndex
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.mirror import Target
from savable_pipeline.tools.convert.model import Files, Part, Report
from savable_pipeline.tools.convert.part_data import LongPart, Parts, data_fault, is_long
from savable_pipeline.tools.convert.plan import MANIFEST, REJECTED, VERSION, WORK, Manifest, Plan, PlannedShard
from savable_pipeline.tools.convert.shard_job import read_written

_MARGIN_NS = 2_000_000_000  # clocks of file systems are as coarse as this


def is_newer(source: Path, written: Path) -> bool:
    """Whether a file may have been changed since `written` was; a copy with an old date counts too."""
    changed_ns = max(source.stat().st_ctime_ns, source.lstat().st_ctime_ns)
    return changed_ns > written.stat().st_mtime_ns - _MARGIN_NS


def _check_unchanged(folder: Path, plan: Plan, shards: Iterable[PlannedShard], there: Manifest) -> None:
    """Raises `SavableError` that names files with other bytes than in these shards, which were written before.

    `there` is the manifest of then, which tells whether the source lies where it did; from now on it may lie here.
    """
    moved = there.source_id != plan.manifest.source_id
    changed = [path for shard in shards for path in _changed(folder, plan, shard, moved)]
    if changed:
        told = "; ".join(filter(None, [listed(changed), _two_sources(plan.manifest, there)]))
        raise SavableError(
            f"{folder} has another conversion: {len(changed)} files changed at the same size. Convert into another "
            f"folder, or remove this one\n{told}"
        )
    here = msgspec.structs.replace(there, source_id=plan.manifest.source_id, source=plan.manifest.source)
    if here != there:
        write_manifest(folder, here)


def _changed(folder: Path, plan: Plan, shard: PlannedShard, moved: bool) -> Iterator[str]:
    tar = folder / shard.name
    samples = plan.input.samples[shard.first : shard.last]
    if not tar.exists():  # all its samples were rejected
        for sample in samples:
            yield from _mended(sample, plan.input.reader.read(sample), plan.options.check_images)
        return
    suspects = _suspects(samples, plan.input.root, tar, moved)
    if not suspects:
        return
    fd = os.open(tar, os.O_RDONLY | os.O_CLOEXEC)
    try:
        extents = {extent.key: extent for extent in tar_samples(tar.name, fd)}
        for sample in suspects:
            parts = plan.input.reader.read(sample)
            if sample.key in extents:
                yield from _differing(sample, parts, _members(tar, fd, extents[sample.key]))
            else:
                yield from _mended(sample, parts, plan.options.check_images)
    finally:
        os.close(fd)


def _suspects(samples: list[Files], root: str, tar: Path, moved: bool) -> list[Files]:
    """The samples with a file that may have been changed since the shard was written.

    (Of what lies behind a URL its id has the stamps: it is `moved` then.)
    """
    behind_url = "://" in root

    @functools.cache
    def newer(path: str) -> bool:
        folder = path.rpartition("/")[0]
        return is_newer(Path(root, path), tar) or (bool(folder) and newer(folder))

    def may_have_changed(path: str) -> bool:
        return moved or ((path.startswith("/") or not behind_url) and newer(path))

    return [sample for sample in samples if any(may_have_changed(part.path) for part in _whole_files(sample))]


def _members(tar: Path, fd: int, extent: Extent) -> Parts:
    members = zip(extent.extensions, extent.members, strict=True)
    return {
        extension: LongPart(lambda: tar.open("rb"), member.payload, member.size, str(tar))
        if is_long(extension, member.size)
        else os.pread(fd, member.size, member.payload)
        for extension, member in members
    }


def _differing(sample: Files, parts: Parts, there: Parts) -> Iterator[str]:
    """The files of a sample that hold other bytes than the shard."""
    return (part.path for part in _whole_files(sample) if parts[part.extension] != there.get(part.extension))


def _mended(sample: Files, parts: Parts, check_images: bool) -> Iterator[str]:
    """A file of a sample that was rejected, if it would not be now."""
    if not any(data_fault(name, data, check_images=check_images) for name, data in parts.items()):
        yield next(_whole_files(sample), sample.parts[0]).path


def _whole_files(sample: Files) -> Iterator[Part]:
    """The parts that are files or records; those of lines of a JSONL file are compared by its hash."""
    return (part for part in sample.parts if part.offset is None)


def read_manifest(target: Path) -> Manifest | None:
    """The manifest of a folder, None if it has none. Raises `SavableError` for one that cannot be read."""
    path, fault = target / MANIFEST, ""
    try:
        there = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        fault = str(error)
    if fault or there.version != VERSION:
        fault = fault or f"its version is {there.version}, not {VERSION}"
        raise SavableError(
            f"{path}: not a manifest of this version: {fault}. Convert into another folder, or remove this one"
        )
    return there


def check_manifest(target: Path, here: Manifest, there: Manifest) -> None:
    """Raise `SavableError` that lists what differs, unless both are the same conversion."""
    old, new = _flat(there), _flat(here)
    differences = [
        f"{name}: other files" if name == "input" else f"{name}: {old[name]!r} there, {new[name]!r} here"
        for name in new
        if old[name] != new[name]
    ]
    if differences:
        differences = [text for text in (_two_sources(here, there), *differences) if text]
        raise SavableError(
            f"{target} has another conversion. Give the same input and options to resume it, or another folder\n"
            + "\n".join(differences)
        )


def _flat(manifest: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(manifest)
    del fields["done"], fields["source_id"], fields["source"]
    return {**fields.pop("options"), **fields, "input": manifest.input[:12]}


def _two_sources(here: Manifest, there: Manifest) -> str:
    """Which source was converted, and which is to be, where they lie at two places; else ""."""
    if not there.source_id or there.source_id == here.source_id:
        return ""
    return f"source: {there.source or 'not noted'!r} there, {here.source!r} here"


def to_go_on(target: Target, manifest: Manifest, shards: Iterable[str]) -> Manifest | None:
    """The manifest of a folder that holds this conversion, to go on with it; else None, with the manifest in place.

    In a bucket one that was stopped begins again, and one that is done is refused. Raises `SavableError` for that, and
    for another conversion.
    """
    there = read_manifest(target.folder)
    if there is not None:
        check_manifest(target.folder, manifest, there)
    if target.bucket is None and there is not None:
        return there
    if there is not None and there.done:
        raise SavableError(
            f"{target.folder} has this whole conversion. Remove it to write it again, or convert to another URL"
        )
    if target.bucket is not None:
        target.begin_again(target.bucket, shards)
    write_manifest(target.folder, manifest)
    if target.bucket is not None:
        target.bucket.upload(MANIFEST, target.folder / MANIFEST)
    return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put the manifest of a folder in its place."""
    pretty = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    replace_file(folder / MANIFEST, [pretty], sync=True)


def write_rejects(folder: Path, rejected: Iterable[Reject]) -> None:
    """Put the file of what was left out in its place."""
    replace_file(folder / REJECTED, (msgspec.json.encode(reject) + b"\n" for reject in rejected), sync=True)


def finished(target: Target, plan: Plan) -> Report | None:
    """The report of a conversion that is done; else None, with the manifest in place.

    Raises `SavableError` if the folder holds another conversion.
    """
    folder = target.folder
    there = to_go_on(target, plan.manifest, (shard.name for shard in plan.shards))
    if there is None:
        return None
    if not there.done:
        written = [shard for shard in plan.shards if read_written(folder, folder / WORK, shard.name) is not None]
        _check_unchanged(folder, plan, written, there)
        return None
    rejected = [msgspec.json.decode(line, type=Reject) for line in (folder / REJECTED).open("rb")]
    entries = TarIndex(folder / INDEX_NAME).shards if (folder / INDEX_NAME).exists() else []
    if not all((folder / e.name).exists() and (folder / e.name).stat().st_size == e.size for e in entries):
        write_manifest(folder, plan.manifest)
        return None
    _check_unchanged(folder, plan, plan.shards, there)
    samples, size = sum(entry.samples for entry in entries), sum(entry.size for entry in entries)
    return Report(samples, len(entries), size, rejected, plan.input.hidden, already=True)
