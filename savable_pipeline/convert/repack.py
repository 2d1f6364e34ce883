"""Compressed tars re-packed as plain ones, which can be read at an offset; their members stay as they are.

    SRC/a.tar.gz, SRC/b/c.tgz, SRC/d.tar      ─▶      DST/a.tar, DST/b/c.tar, DST/d.tar

A tar that cannot be read to its end is left out. A tar that lies in DST already is whole, and not made again.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from savable_pipeline.convert.energon import energon_files
from savable_pipeline.convert.shard import replace_bytes
from savable_pipeline.convert.source import Reject, printable
from savable_pipeline.indexing import INDEX_NAME, index_shards
from savable_pipeline.scan import scan
from savable_pipeline.shard_index import ShardIndex

_OPENERS: dict[str, Callable[[Path], Any]] = {  # each gives a file to read bytes from
    ".tar": partial(Path.open, mode="rb"),
    ".tar.gz": gzip.GzipFile,
    ".tgz": gzip.GzipFile,
    ".tar.bz2": bz2.BZ2File,
    ".tar.xz": lzma.LZMAFile,
}
_SUFFIXES = (*_OPENERS, ".tar.zst")  # the last one's program must be used by hand
_CHUNK = 1 << 20


def packed_tars(source: Path) -> list[Path]:
    """The tars of a folder, or a tar by itself, if one of them is compressed; else nothing."""
    found = sorted(path for path in (source.rglob("*") if source.is_dir() else [source]) if path.is_file())
    tars = [path for path in found if path.name.endswith(_SUFFIXES) and not path.name.startswith(".")]
    return tars if any(path.suffix != ".tar" for path in tars) else []


def repack(
    source: Path, tars: list[Path], target: Path, work: Path, progress: Callable[[int, int], None]
) -> tuple[list[Reject], ShardIndex | None]:
    """Write the tars into `target`, by way of the folder `work`; gives what was left out, and their index.

    Raises OSError where a file cannot be written, and ValueError for two tars that would have one name.
    """
    base = source if source.is_dir() else source.parent
    names = [_plain_name(path.relative_to(base).as_posix()) for path in tars]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{source}: two tars would become {twice}; convert them into two folders")
    rejected = []
    for done, (path, name) in enumerate(zip(tars, names, strict=True)):
        progress(done, len(tars))
        fault = "" if (target / name).exists() else _repack_one(path, target, work, name)
        if fault:
            rejected.append(Reject(str(path), "", "damaged tar", printable(fault)))
    progress(len(tars), len(tars))
    if len(rejected) == len(tars):
        return rejected, None
    place, _ = index_shards(target)
    index = ShardIndex(place)
    counts = {entry.name: entry.samples for entry in index.shards}
    layouts = {frozenset(layout.position) for layout in index.layouts}
    for file, content in energon_files(counts, layouts, frozenset()).items():
        replace_bytes((target / INDEX_NAME).with_name(file), content.encode())
    return rejected, index


def _repack_one(path: Path, target: Path, work: Path, name: str) -> str:
    """Write one tar and put it in its place if it is whole; gives why it is not."""
    suffix = _suffix_of(path.name)
    if suffix not in _OPENERS:
        return f"{path.name}: this kind of compression is not known here; decompress it first"
    aside = work / "repacked.tar"
    with aside.open("wb") as file:
        try:
            with _OPENERS[suffix](path) as content:
                shutil.copyfileobj(content, file, _CHUNK)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, ValueError) as error:
            return f"{path.name}: {error}"
        except OSError as error:
            if error.errno is not None:  # of a disk; bz2 has none for data
                raise
            return f"{path.name}: {error}"
        file.flush()
        os.fsync(file.fileno())
    fault = scan(work, aside.name).entry.fault
    if not fault:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        aside.replace(target / name)
    return fault


def _plain_name(name: str) -> str:
    return f"{name.removesuffix(_suffix_of(name))}.tar"


def _suffix_of(name: str) -> str:
    return next(suffix for suffix in _SUFFIXES if name.endswith(suffix))


def digest_of(source: Path, tars: list[Path]) -> str:
    """A hash of the names and sizes of the tars: what a conversion that goes on must agree on."""
    base = source if source.is_dir() else source.parent
    digest = hashlib.sha256()
    for path in tars:
        digest.update(
            f"{path.relative_to(base).as_posix()}\0{path.stat().st_size}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()
