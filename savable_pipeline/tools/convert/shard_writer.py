"""`ShardWriter`: shards that a program writes, and resumes after a kill.

    out/000000.tar  000000.tar.idx            finished, and safe
    out/.nv-meta/savable.writer/000001.tar    unfinished                   ─ renamed when it is full ─▶  out/000001.tar
    out/.nv-meta/savable.writer/000000.tar.index   its rows of the index, until they are joined
    out/.nv-meta/savable.writer/settings.json      must equal those of a writer that continues
    out/.nv-meta/savable.writer/open               exists until the writer has finished: readers warn

With `part=(3, 16)` the names start with `00003-of-00016-`, and no two processes write one file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.shards.byte_source import opened
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.indexing import known_files
from savable_pipeline.data.shards.metadata import OPEN, WRITTEN
from savable_pipeline.data.shards.part_types import part_type
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.shards.tar import samples as tar_samples
from savable_pipeline.data.shards.tar_format import TarIndex, write_tar_idx
from savable_pipeline.data.stores.record_files import npy
from savable_pipeline.data.stores.sample_names import name_fault
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.describe import describe
from savable_pipeline.tools.convert.options import MANIFEST
from savable_pipeline.tools.convert.shard_series import ShardSeries, locked, room_on


def sample_parts(sample: Mapping[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Return the key and parts of a sample, `{"__key__": …, "jpg": …}`.

    Other `__names__` are no parts.

    Raises ValueError and TypeError, which name the key, for what cannot be written.
    """
    key = sample.get("__key__")
    if not isinstance(key, str) or not key:
        raise ValueError(f"a sample needs a '__key__' such as 'cat/0001', not {key!r}")
    parts: dict[str, bytes] = {}
    for extension, value in sample.items():
        if not (extension.startswith("__") and extension.endswith("__")):
            fault = name_fault(key, extension)
            if fault:
                raise ValueError(f"sample {key!r}: {fault}")
            parts[extension] = part_bytes(key, extension, value)
    if len({extension.lower() for extension in parts}) < len(parts) or not parts:
        raise ValueError(f"sample {key!r} needs parts, whose names differ in more than case: {list(parts)}")
    return key, parts


def part_bytes(key: str, extension: str, value: Any) -> bytes:
    """Return the bytes of a part.

    Text becomes UTF-8, a number its digits. JSON and arrays are recognized by the extension.
    """
    kind = part_type(extension)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and kind != "json":
        return value.encode()
    if kind == "npy" and isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return npy(value)
    if kind == "json":
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"sample {key!r}: the part {extension!r} cannot be JSON: {error}") from error
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value).encode()
    raise TypeError(
        f"sample {key!r}: the part {extension!r} has the type {type(value).__name__}. Pass bytes, str, int, a numpy "
        "array for npy or JSON values, and encode images and tensors yourself"
    )


class _Settings(msgspec.Struct, frozen=True):
    max_bytes: int
    max_samples: int | None
    part: tuple[int, int] | None


class ShardWriter:
    """Write samples into the shards of a folder.

    After a kill and a restart, it continues after the samples that are safe.

    A sample is a dict with its `"__key__"` and its parts by extension: bytes, str (UTF-8), int (its digits), a NumPy
    array for `npy`, any JSON value for `json`. Equal samples in equal order produce equal bytes. Leaving the `with`
    block ends the last shard and indexes the folder. After an error it does not, and the samples of the last shard are
    not safe. One thread at a time may use a writer.

    Args:
        folder: The folder of the shards, created if missing.
        max_bytes: The most bytes of a shard, unless one sample alone is larger.
        max_samples: The most samples of a shard. None: no limit.
        part: (i, n) for process i of n that write into one folder, such as tasks of Ray. `savable index` joins their
            shards. None: one process.

    Raises:
        ValueError: A setting, or a sample's value, is wrong.
        TypeError: A part of a sample is of a type that cannot be written.
        SavableError: The folder has shards of another origin or of other settings, another writer is using it, or its
            disk is full.

    Example:
        >>> samples = [{"__key__": f"{i:06d}", "txt": f"no. {i}", "json": {"n": i}} for i in range(3)]
        >>> with sp.ShardWriter("written/", max_bytes=1_000_000) as writer:
        ...     for sample in samples[writer.written :]:  # all of them, or after a kill those that are not safe
        ...         writer.write(sample)
        >>> writer.written
        3
        >>> [sample.text() for sample in sp.TarShardReader("written/", sp.Lane(), shuffle=False, epochs=1)]
        ['no. 0', 'no. 1', 'no. 2']
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = 256_000_000,
        max_samples: int | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        _check(max_bytes, max_samples, part)
        self._folder = Path(folder)
        self._work = self._folder / WRITTEN
        self._settings = _Settings(max_bytes, max_samples, part)
        self._prefix = "" if part is None else f"{part[0]:05d}-of-{part[1]:05d}-"
        self._open_mark = self._work / f"{self._prefix}{OPEN}"
        self._ended = ""  # why nothing can be written any more, such as "is closed"; "" while it can
        self._reject_other_origins()
        self._work.mkdir(parents=True, exist_ok=True)
        self._lock, lock_path = contextlib.ExitStack(), self._work / f"{self._prefix}lock"
        lock_path.touch()
        busy = f"another writer is at {self._prefix}*.tar. Give each process its part=(i, n)"
        self._lock.enter_context(locked(lock_path, f"{self._folder}: {busy}"))
        try:
            self._store_settings()
            self._remove_unfinished()
            self._entries = [*self._finished()]
            self._series = ShardSeries(
                self._work, self._name, max_bytes, max_samples, self._publish, len(self._entries)
            )
            self._first_written = self._first_key()  # "" if no sample is safe yet, or for a writer that resumes
            self._open_mark.touch()
        except BaseException:
            self._lock.close()
            raise

    @property
    def written(self) -> int:
        """Number of samples that are safe.

        These are in finished shards of this part, by this writer and earlier ones.
        """
        return sum(entry.samples for entry in self._entries)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample. It is safe when its shard is: see `written`.

        Args:
            sample: Its key and parts, as the class describes them.

        Example:
            >>> with sp.ShardWriter("single/") as writer:
            ...     writer.write({"__key__": "a/b", "cls": 3})
        """
        if self._ended:
            raise ValueError(f"{self._folder}: this writer {self._ended}. Open another to continue")
        key, parts = sample_parts(sample)
        if self._first_written and key == self._first_written:
            raise ValueError(
                f"{self._folder}: sample {key!r} is the first of {self.written} written ones. Continue with "
                "`samples[writer.written:]`, or remove the folder"
            )
        if key == self._series.last_key:
            raise ValueError(f"two samples in a row have the key {key!r}. Give each its own")
        try:
            with room_on(self._folder):
                self._series.add(key, parts)
                self._first_written = ""
        except (OSError, SavableError):
            self._abandon("met an error of the disk")
            raise

    def close(self) -> None:
        """End the last shard, and index the folder unless it has several parts.

        A second call does nothing.

        >>> writer = sp.ShardWriter("closed/")
        >>> writer.write({"__key__": "a", "txt": "one"})
        >>> writer.close()
        """
        if self._ended:
            return
        try:
            with room_on(self._folder):
                self._series.finish()
                if self._settings.part is None and self._entries:
                    describe(self._folder)
            self._open_mark.unlink()
        finally:
            self._abandon("is closed")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon("was left by an error")

    def _publish(self, table: ShardTable) -> None:
        """Rename a finished shard, after its offsets and its index rows. It is safe once the tar is in place."""
        name = table.entry.name
        write_index(self._work / f"{name}.index", [table], TARS)
        write_tar_idx(self._work / name, table)
        for file in (f"{name}.idx", name):
            (self._work / file).replace(self._folder / file)
        self._entries.append(table.entry)

    def _abandon(self, why: str) -> None:
        """Remove the open shard, and unlock the folder. `why` completes "this writer …" in later errors."""
        if self._ended:
            return
        self._ended = why
        self._series.close()
        self._lock.close()

    def _name(self, number: int) -> str:
        """Return the name of the shard with this number."""
        return f"{self._prefix}{number:06d}.tar"

    def _reject_other_origins(self) -> None:
        """Raise `SavableError` for shards of another origin."""
        written = any(self._work.glob("*settings.json"))
        if (self._folder / MANIFEST).exists() or (not written and any(self._folder.glob("*.tar"))):
            raise SavableError(f"{self._folder} has shards of another origin. Write into another folder")

    def _store_settings(self) -> None:
        """Store the settings in the folder. Raises `SavableError` if it was started with others."""
        ours = self._settings
        for path in self._work.glob("*settings.json"):
            found = msgspec.json.decode(path.read_bytes(), type=_Settings)
            counts = {(settings.part or (0, 1))[1] for settings in (found, ours)}  # of processes
            if len(counts) > 1 or (found.part == ours.part and found != ours):
                raise SavableError(
                    f"{self._folder} was started with other settings. Pass the same, or another folder\n"
                    f"{_described(found)}, here {_described(ours)}"
                )
        replace_file(self._work / f"{self._prefix}settings.json", [msgspec.json.encode(ours)], sync=True)

    def _remove_unfinished(self) -> None:
        """Remove the unfinished files of a killed writer."""
        for pattern in ("*.tmp", "[0-9]*.tar", "[0-9]*.tar.idx"):
            for path in self._work.glob(f"{self._prefix}{pattern}"):
                path.unlink()

    def _finished(self) -> list[ShardEntry]:
        """Return the finished shards. Raises `SavableError` if one of them is damaged or missing."""
        names = [self._name(number) for number, _ in enumerate(self._folder.glob(f"{self._prefix}[0-9]*.tar"))]
        if missing := next((name for name in names if not (self._folder / name).exists()), ""):
            raise SavableError(f"{self._folder / missing} is gone, but later shards are there. Restore it")
        known = known_files(self._folder, TARS)
        return [self._entry(name, known) for name in names]

    def _first_key(self) -> str:
        """Return the key of the first sample that is safe."""
        if not self._entries:
            return ""
        name = self._name(0)
        with opened(self._folder / name) as file:
            return next(extent.key for extent in tar_samples(name, file.fileno()))

    def _entry(self, name: str, known: dict[str, ShardEntry]) -> ShardEntry:
        """Return the entry of a finished shard. Raises `SavableError` if the shard was changed."""
        try:
            entry = TarIndex(self._work / f"{name}.index").shards[0]
        except (OSError, ValueError, SavableError, IndexError):
            entry = known.get(name) or TARS.scan(self._folder, name).entry
        if entry.fault or entry.size != (self._folder / name).stat().st_size:
            raise SavableError(f"{self._folder / name}: changed since it was written: {entry.fault or 'another size'}")
        return entry


def _check(max_bytes: int, max_samples: int | None, part: tuple[int, int] | None) -> None:
    if max_bytes < 1 or (max_samples is not None and max_samples < 1):
        raise ValueError(f"max_bytes and max_samples must be at least 1, not {max_bytes} and {max_samples}")
    if part is not None and not 0 <= part[0] < part[1] <= 99_999:
        raise ValueError(f"part={part}: expected (i, n) with i from 0 to n - 1")


def _described(settings: _Settings) -> str:
    return ", ".join(f"{name}={getattr(settings, name)}" for name in settings.__struct_fields__)
