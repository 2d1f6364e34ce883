"""Checking one shard: its tar, its `.tar.idx`, and every part of every sample."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from savable_pipeline.core.wording import encodable
from savable_pipeline.data.remote.cache_space import cache_bytes, cache_folder
from savable_pipeline.data.remote.downloader import Downloader
from savable_pipeline.data.shards.index_file import Links, ShardTable
from savable_pipeline.data.shards.scan import scan
from savable_pipeline.data.shards.tar import Extent, Member, samples
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.check.part_check import LARGEST, part_fault

_OFFSET = 8  # bytes of an offset in X.tar.idx


class Problem(msgspec.Struct, frozen=True):
    """A fault of a dataset, of one of its shards, or of a part of a sample."""

    reason: str
    detail: str
    shard: str = ""
    key: str = ""
    part: str = ""
    offset: int | None = None
    index: int | None = None  # of the sample in the shard


class ShardReport(msgspec.Struct):
    """The size of a shard, and its problems."""

    name: str
    size: int
    samples: int
    digest: int
    problems: list[Problem]
    parts: dict[str, int] = {}  # samples that have each part
    most_parts: int = 0  # of one sample
    with_alpha: int = 0  # images that have alpha
    empty: dict[str, int] = {}  # samples that have each part without a byte in it
    nulls: dict[str, int] = {}  # samples that have a null in each column
    links: Links | None = None


def check_shard(root: Path, name: str) -> ShardReport:
    """Read all of a shard. Its content is decoded and dropped; faults become problems, never errors."""
    table = scan(root, name)
    entry = table.entry
    problems = []
    counts: Counter[str] = Counter()
    if entry.fault:
        gone = not (root / name).exists()
        problems.append(
            Problem("missing shard" if gone else "damaged shard", entry.fault.removeprefix(f"{name}: "), name)
        )
    if entry.size:
        problems += _part_problems(root, name, entry.samples, counts)
    fault = "" if entry.fault else _tar_idx_fault(root / name, table.starts, table.end)
    if fault:
        problems.append(Problem("wrong .tar.idx", fault, name))
    parts: Counter[str] = Counter()
    for layout, number in zip(table.layouts, np.bincount(np.frombuffer(table.layout_of, "<u4")).tolist(), strict=True):
        parts.update({extension: number for extension, _ in layout})
    most, with_alpha, empty = max(map(len, table.layouts), default=0), counts["with alpha"], _empty(table)
    return ShardReport(
        name,
        entry.size,
        entry.samples,
        entry.digest,
        problems,
        dict(parts),
        most,
        with_alpha,
        empty,
        links=table.links,
    )


def _empty(table: ShardTable) -> dict[str, int]:
    """How many samples have each part without a byte in it."""
    sizes = np.frombuffer(table.sizes, "<u8")
    if sizes.all():
        return {}
    layouts = np.frombuffer(table.layout_of, "<u4").tolist()
    names = (extension for layout in layouts for extension, _ in table.layouts[layout])
    return dict(Counter(name for name, size in zip(names, sizes.tolist(), strict=True) if not size))


def check_remote_shard(url: str, folder: Path, name: str) -> ShardReport:
    """The same for a shard behind a URL, which is downloaded to an empty folder and removed again."""
    return check_downloaded(url, folder, [name, str(Path(name).with_suffix(".tar.idx"))], check_shard)


def check_downloaded(
    url: str, folder: Path, names: list[str], check: Callable[[Path, str], ShardReport]
) -> ShardReport:
    """What `check` finds in the first of these objects; all that are there are downloaded to `folder` meanwhile."""
    cache, name = cache_folder(None), names[0]
    try:
        with contextlib.closing(Downloader(cache, cache_bytes(None, cache))) as downloader:
            for each in names:
                stat = downloader.call("stat", url, each, each == name)
                if stat is not None:
                    downloader.call("whole", url, each, stat[0], str(folder / each))
        return check(folder, name)
    except SavableError as error:
        return ShardReport(name, 0, 0, 0, [Problem("cannot be checked", str(error), name)])
    finally:
        for each in names:
            (folder / each).unlink(missing_ok=True)


def _part_problems(root: Path, name: str, count: int, counts: Counter[str]) -> Iterator[Problem]:
    fd = os.open(root / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for index, extent in enumerate(itertools.islice(samples(name, fd), count)):  # what follows is damaged
            for extension, member in zip(extent.extensions, extent.members, strict=True):
                fault = _member_fault(fd, extension, member, counts)
                if fault:
                    yield _problem(name, index, extent, extension, member, fault)
    finally:
        os.close(fd)


def _member_fault(fd: int, extension: str, member: Member, counts: Counter[str]) -> str:
    if member.size > LARGEST:
        return ""
    try:
        data = os.pread(fd, member.size, member.payload)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return part_fault(extension, data, counts)


def _problem(shard: str, index: int, extent: Extent, extension: str, member: Member, fault: str) -> Problem:
    reason, _, detail = fault.partition(": ")
    return Problem(reason, encodable(detail), shard, encodable(extent.key), extension, member.payload, index)


def _tar_idx_fault(shard: Path, starts: bytes, end: int) -> str:
    """Why the offsets beside a shard are not those of its samples; empty if they are, or there are none."""
    path = shard.with_suffix(".tar.idx")
    expected = starts + np.array([end], dtype="<u8").tobytes()
    try:
        if path.stat().st_size != len(expected):
            found = path.stat().st_size / _OFFSET - 1
            return f"{path.name} has offsets of {found:g} samples, the shard has {len(expected) // _OFFSET - 1}"
        found_offsets = path.read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if found_offsets == expected:
        return ""
    first = int((np.frombuffer(found_offsets, "<u8") != np.frombuffer(expected, "<u8")).argmax())
    return f"{path.name} has another offset for sample {first} than the shard"
