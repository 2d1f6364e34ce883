"""Compressed tars written as plain ones, which can be read at an offset; their members stay the same.

    SRC/a.tar.gz, SRC/b/c.tgz, SRC/d.tar      ─▶      DST/a.tar, DST/b/c.tar, DST/d.tar

A tar that cannot be read to its end is left out. A tar that is in DST already is whole, and not written again.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from savable_pipeline.convert.changed import is_newer
from savable_pipeline.convert.compressed import DamagedError, opened
from savable_pipeline.convert.describe import describe
from savable_pipeline.convert.model import Reject
from savable_pipeline.convert.names import PACKED, TAR_ENDINGS, is_tar, printable
from savable_pipeline.errors import SavableError
from savable_pipeline.shards.index_file import ShardIndex
from savable_pipeline.shards.scan import scan

_CHUNK = 1 << 20


def packed_tars(source: Path) -> list[Path]:
    """The tars of a folder, or a tar by itself, if one of them is compressed; else nothing."""
    found = sorted(path for path in (source.rglob("*") if source.is_dir() else [source]) if path.is_file())
    tars = [path for path in found if is_tar(path.name) and not path.name.startswith(".")]
    return tars if any(path.name.lower().endswith(PACKED) for path in tars) else []


def repack(
    source: Path, tars: list[Path], target: Path, work: Path, progress: Callable[[int, int, int], None], *, moved: bool
) -> tuple[list[Reject], ShardIndex | None]:
    """Write the tars into `target`, by way of the folder `work`; gives what was left out, and their index.

    A tar that is there is compared with its source if that may have changed since, or the whole source was `moved`.
    Raises OSError where a file cannot be written, and ValueError for two tars that would have one name.
    """
    base = source if source.is_dir() else source.parent
    names = [_plain_name(path.relative_to(base).as_posix()) for path in tars]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{source}: two tars would become {twice}; convert them into two folders")
    rejected, size = [], 0
    for done, (path, name) in enumerate(zip(tars, names, strict=True)):
        progress(done, len(tars), size)
        size += path.stat().st_size
        same = (target / name).exists() and not moved and not is_newer(path, target / name)
        fault = "" if same else _repack_one(path, target, work, name)
        if fault:
            rejected.append(Reject(str(path), "", "damaged tar", printable(fault)))
    progress(len(tars), len(tars), size)
    if len(rejected) == len(tars):
        return rejected, None
    return rejected, describe(target)


def _repack_one(path: Path, target: Path, work: Path, name: str) -> str:
    """Write one tar, and move it to its place if it is whole; else gives the fault."""
    aside = work / "repacked.tar"
    with aside.open("wb") as file:
        try:
            with opened(path) as content:
                shutil.copyfileobj(content, file, _CHUNK)
        except (DamagedError, ValueError) as error:
            return f"{path.name}: {error}"
        file.flush()
        os.fsync(file.fileno())
    fault = scan(work, aside.name).entry.fault
    if not fault and (target / name).exists():
        if not filecmp.cmp(aside, target / name, shallow=False):
            raise SavableError(
                f"{target / name} was made of another {path.name}: it was changed since, at the same size. Convert "
                "into another folder, or remove this one"
            )
    elif not fault:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        aside.replace(target / name)
    return fault


def _plain_name(name: str) -> str:
    ending = next(ending for ending in TAR_ENDINGS if name.lower().endswith(ending))
    return f"{name[: -len(ending)]}.tar"


def digest_of(source: Path, tars: list[Path]) -> str:
    """A hash of the names and sizes of the tars: a conversion that continues must have the same."""
    base = source if source.is_dir() else source.parent
    digest = hashlib.sha256()
    for path in tars:
        digest.update(
            f"{path.relative_to(base).as_posix()}\0{path.stat().st_size}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()
