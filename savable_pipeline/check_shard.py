"""Checking one shard: its tar, what was indexed of it, and every part of every sample."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from savable_pipeline.cache_room import cache_bytes, cache_folder
from savable_pipeline.content import content_fault, text_fault
from savable_pipeline.errors import SavableError
from savable_pipeline.fetcher import Fetcher
from savable_pipeline.scan import printable, scan
from savable_pipeline.tar import Extent, Member, samples

_LARGEST = 1 << 30  # bytes of a part that is looked into
_OFFSET = 8  # bytes of an offset in X.tar.idx


class Problem(msgspec.Struct, frozen=True):
    """Something wrong: in a dataset, one of its shards, or a part of one of its samples."""

    reason: str
    detail: str
    shard: str = ""
    key: str = ""
    part: str = ""
    offset: int | None = None
    index: int | None = None  # of the sample in the shard


class ShardReport(msgspec.Struct):
    """What was found in a shard: how much there is, and what is wrong with it."""

    name: str
    size: int
    samples: int
    digest: int
    problems: list[Problem]


def check_shard(root: Path, name: str) -> ShardReport:
    """Read all of a shard. Nothing in it is more than looked at; faults are problems, never errors."""
    table = scan(root, name)
    entry = table.entry
    problems = []
    if entry.fault:
        gone = not (root / name).exists()
        problems.append(
            Problem("missing shard" if gone else "damaged shard", entry.fault.removeprefix(f"{name}: "), name)
        )
    if entry.size:
        problems += _part_problems(root, name, entry.samples)
    fault = "" if entry.fault else _tar_idx_fault(root / name, table.starts, table.end)
    if fault:
        problems.append(Problem("wrong .tar.idx", fault, name))
    return ShardReport(name, entry.size, entry.samples, entry.digest, problems)


def check_remote_shard(url: str, folder: Path, name: str) -> ShardReport:
    """The same of a shard behind a URL, which is fetched whole into an empty folder for that time."""
    cache = cache_folder(None)
    try:
        with contextlib.closing(Fetcher(cache, cache_bytes(None, cache))) as fetcher:
            for each in (name, str(Path(name).with_suffix(".tar.idx"))):
                stat = fetcher.ask("stat", url, each)
                if stat is not None:
                    fetcher.ask("whole", url, each, stat[0], str(folder / each))
        return check_shard(folder, name)
    except SavableError as error:
        return ShardReport(name, 0, 0, 0, [Problem("cannot be checked", str(error), name)])
    finally:
        for path in (folder / name, (folder / name).with_suffix(".tar.idx")):
            path.unlink(missing_ok=True)


def _part_problems(root: Path, name: str, count: int) -> Iterator[Problem]:
    fd = os.open(root / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for index, extent in enumerate(itertools.islice(samples(name, fd), count)):  # what follows is damaged
            for extension, member in zip(extent.extensions, extent.members, strict=True):
                fault = _part_fault(fd, extension, member)
                if fault:
                    yield _problem(name, index, extent, extension, member, fault)
    finally:
        os.close(fd)


def _part_fault(fd: int, extension: str, member: Member) -> str:
    if member.size > _LARGEST:
        return ""  # no image or text is so large; a film may be
    try:
        data = os.pread(fd, member.size, member.payload)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    if len(data) >= 64 and not data.strip(b"\0"):
        return f"zero-filled: all {len(data)} bytes are zeros"
    return content_fault(extension, data) or text_fault(extension, data)


def _problem(shard: str, index: int, extent: Extent, extension: str, member: Member, fault: str) -> Problem:
    reason, _, detail = fault.partition(": ")
    return Problem(reason, printable(detail), shard, printable(extent.key), extension, member.payload, index)


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
