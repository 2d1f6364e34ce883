"""Which shards a user means: a folder, a glob, a brace pattern, one tar, or a list of these."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

Shards: TypeAlias = str | os.PathLike[str] | Iterable["str | os.PathLike[str]"]

_RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})(?:\.\.(\d{1,18}))?\}")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")
_MOST_NAMES = 1_000_000  # that one pattern may mean
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def find_shards(shards: Shards, *, missing_too: bool = False) -> tuple[Path, list[str]]:
    """The root of the dataset and the names of its shards relative to it, sorted.

    The root is the folder given, or the deepest folder that holds all the shards. Raises `ShardError` if there is
    nothing, or a shard twice, or a name without a file unless `missing_too`.
    """
    specs = [shards] if isinstance(shards, str | os.PathLike) else list(shards)
    if not specs:
        raise ShardError("the list of shards is empty")
    if len(specs) == 1 and Path(specs[0]).is_dir():
        root = Path(specs[0]).absolute()  # a relative one would change its meaning with the working folder
        return root, _tars_below(root)
    paths = [path for spec in specs for path in _expand(os.fspath(spec), missing_too)]
    if len(set(paths)) < len(paths):
        twice = Counter(paths).most_common(1)[0][0]
        raise ShardError(f"{twice}: the same shard is named twice")
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return root, sorted(path.relative_to(root).as_posix() for path in paths)


def _expand(spec: str, missing_too: bool) -> list[Path]:
    if "://" in spec:
        raise ShardError(f"{spec}: shards behind a URL cannot be read yet; copy them to a local folder first")
    paths: list[Path] = []
    for pattern in expand_braces(spec):
        path = Path(pattern).absolute()
        if path.is_dir():
            paths += [path / name for name in _tars_below(path)]
        elif glob.has_magic(pattern) and not path.exists():
            matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
            if not matches:
                raise ShardError(f"{pattern}: no file matches")
            paths += [Path(match).absolute() for match in matches]
        elif path.is_file() or (missing_too and path.suffix == ".tar"):
            paths.append(path)
        else:
            raise ShardError(f"{pattern}: no such shard or folder")
    for path in paths:
        if path.name.endswith(_COMPRESSED):
            raise ShardError(f"{path}: a compressed tar cannot be read at an offset; `savable convert` re-packs it")
    return paths


def expand_braces(pattern: str) -> list[str]:
    """`a-{00..02}.tar` and `{x,y}.tar` spelled out, from left to right. Raises `ShardError` where it means too many."""
    spelled, unfinished = [], [pattern]
    while unfinished:
        pattern = unfinished.pop()
        choices = _choices(pattern)
        if choices is None:
            spelled.append(pattern)
            continue
        before, middle, after = choices
        if len(spelled) + len(unfinished) + len(middle) > _MOST_NAMES:
            raise ShardError(f"{pattern[:200]}: the braces mean more than {_MOST_NAMES:,} names")
        unfinished += [before + choice + after for choice in reversed(middle)]
    return spelled


def _choices(pattern: str) -> tuple[str, Sequence[str], str] | None:
    """What stands before the first braces, what they mean, and what stands behind them; None without braces."""
    match = _RANGE.search(pattern)
    if match:
        low, high, step = match[1], match[2], int(match[3] or 1)
        width = len(low) if low.startswith("0") or len(low) == len(high) else 0
        numbers = range(int(low), int(high) + 1, step or 1)
        if not numbers:
            raise ShardError(f"{pattern}: the range {match[0]} is empty")
        if len(numbers) > _MOST_NAMES:
            raise ShardError(f"{pattern}: the range {match[0]} means more than {_MOST_NAMES:,} names")
        choices = [str(number).zfill(width) for number in numbers]
    else:
        match = _CHOICE.search(pattern)
        if not match:
            return None
        choices = match[1].split(",")
    return pattern[: match.start()], choices, pattern[match.end() :]


def _tars_below(root: Path) -> list[str]:
    names = []
    compressed = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(folder).relative_to(root)
        names += [(here / name).as_posix() for name in files if name.endswith(".tar") and name[0] != "."]
        compressed += [name for name in files if name.endswith(_COMPRESSED)]
    if not names:
        also = f"; {len(compressed)} compressed tars are there: `savable convert` re-packs them" if compressed else ""
        raise ShardError(f"{root}: no .tar file in this folder or below it{also}")
    if compressed:
        log.warning("%s: %d compressed tars are left out: `savable convert` re-packs them", root, len(compressed))
    return sorted(names)
