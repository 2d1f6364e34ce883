"""`ExcludeFile`: which samples of a dataset must not be given again, as a file names them.

s000042                                           all samples with this key
{"shard": "0001.tar", "key": "s000042", …}        the one of this shard: a line of a quarantine file
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from savable_pipeline.core.wording import listed
from savable_pipeline.dataset.dataset import Dataset
from savable_pipeline.dataset.key_index import key_index
from savable_pipeline.errors import SavableError
from savable_pipeline.stores.tar_store import TarStore

log = logging.getLogger(__name__)

_SECONDS = 1.0  # between two looks at the file


class ExcludeFile:
    """The samples of `dataset` that the file at `path` names: `numbers`, as the dataset counts them.

    Keys that no sample has, and lines without a key, are a warning with their number. Raises ValueError for a line that
    is no key and no JSON, `SavableError` if the file cannot be read, `ShardError` if the keys of the samples cannot.
    """

    def __init__(self, path: str | os.PathLike[str], dataset: Dataset) -> None:
        self.path = Path(path).absolute()
        self._stamp, self._looked_at = self._stamp_now(), time.monotonic()  # before it is read
        content = self._read()
        self._content = _digest(content)
        keys, of_shards, unnamed = _parsed(self.path, content)
        found: set[int] = set()
        unknown = list(_take_keys(dataset, keys, found)) + list(_take_of_shards(dataset, of_shards, found))
        self.numbers = frozenset(found)
        if unknown:
            log.warning(
                "%s: exclude=%s names %d samples that are not there: %s",
                dataset.address,
                self.path,
                len(unknown),
                listed(unknown),
            )
        if unnamed:
            log.warning("exclude=%s: %d lines name no key, only a shard: they exclude nothing", self.path, unnamed)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that depend on the samples alone, not on the order of lines or on unknown keys."""
        return _digest(np.array(sorted(self.numbers), dtype="<u8").tobytes())

    def verify(self) -> None:
        """Raise `SavableError` if the file is not as it was when it was read; looks at most once a second."""
        now = time.monotonic()
        if now - self._looked_at < _SECONDS:
            return
        self._looked_at, stamp = now, self._stamp_now()
        if stamp != self._stamp and _digest(self._read()) != self._content:
            raise SavableError(
                f"exclude={self.path} changed while the run goes on, whose processes must agree on it: save, and load "
                'the state with allow={"exclude"}; to add samples later, write another file and begin with that'
            )
        self._stamp = stamp

    def _stamp_now(self) -> tuple[int, int, int]:
        try:
            found = self.path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> SavableError:
        return SavableError(
            f"exclude={self.path}: {error.strerror}; without the file, samples that must not be given might be"
        )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _parsed(path: Path, content: bytes) -> tuple[set[str], dict[str, set[str]], int]:
    """The keys in a file; those of one shard, by its name; and the number of lines with neither."""
    keys: set[str] = set()
    of_shards: dict[str, set[str]] = {}
    unnamed = 0
    for number, raw in enumerate(content.split(b"\n"), 1):
        line = os.fsdecode(raw.removesuffix(b"\r"))
        if not line.startswith("{"):
            keys |= {line} - {""}
            continue
        shard, key = _entry(path, number, line)
        unnamed += key is None
        if key is not None and shard is None:
            keys.add(key)
        elif key is not None:
            of_shards.setdefault(shard or "", set()).add(key)
    return keys, of_shards, unnamed


def _entry(path: Path, number: int, line: str) -> tuple[str | None, str | None]:
    """Shard and key in a line of JSON."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'exclude={path}, line {number}: no JSON ({error}); a line is a key, or JSON with "shard" and "key"'
        ) from error
    shard, key = found.get("shard"), found.get("key")
    if not isinstance(shard, str | None) or not isinstance(key, str | None):
        raise ValueError(f'exclude={path}, line {number}: "shard" and "key" must be texts: {line[:100]}')
    return shard, key


def _take_keys(dataset: Dataset, keys: set[str], found: set[int]) -> Iterator[str]:
    """Add the numbers of all samples with these keys to `found`. Gives the keys that no sample has."""
    wanted = sorted(keys)
    # The index of keys is known by the shards: of tables, a setting of the reader says which column is the key.
    index = key_index(dataset) if wanted and isinstance(dataset.store, TarStore) else None
    if index is not None and index.twice is None:
        for key, number in zip(wanted, index.find(wanted).tolist(), strict=True):
            if number >= 0:
                found.add(number)
            else:
                yield key
    elif wanted:
        here = {number: key for number, key in enumerate(dataset.all_keys()) if key in keys}
        found.update(here)
        yield from keys.difference(here.values())


def _take_of_shards(dataset: Dataset, of_shards: dict[str, set[str]], found: set[int]) -> Iterator[str]:
    """The same for keys of single shards, by the shard's name."""
    numbers = {entry.name: shard for shard, entry in enumerate(dataset.entries)}
    for name, keys in of_shards.items():
        missing = set(keys)
        if name in numbers:
            first = int(dataset.firsts[numbers[name]])
            here = {first + row: key for row, key in enumerate(dataset.keys_of(numbers[name])) if key in keys}
            found.update(here)
            missing -= set(here.values())
        yield from (f"{name}: {key}" for key in missing)
