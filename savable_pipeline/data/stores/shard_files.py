"""`ShardFiles`: the open files of a store.

`LocalFiles` are on a disk. For remote files see cached_blocks.py.

A shard that is overwritten in place changes under a process that has it open. Therefore `LocalFiles` pins the status
of each shard when this process first opens it, checks each open shard once a second (`fstat`: about 0.6 µs), and checks
a shard again before closing it. A batch is yielded only if none of its shards had changed a second ago. Later batches
are checked when a run pauses or ends.

    size, or time of the last write       changed: the shard was overwritten
    time of the last change of the inode  changed: explained by mode, owner or links that changed with it. Otherwise
                                          some bytes are compared with the index, because a writer can reset the other
                                          time: different bytes are an error, equal ones a warning
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.files import Descriptor, evict, lacks_handles, register, retry, with_handles, with_retries
from savable_pipeline.data.shards.byte_source import ByteSource, FileVersion, LocalFile
from savable_pipeline.data.shards.index import IndexedFiles
from savable_pipeline.data.shards.indexing import forget_mark
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

OPEN_SHARDS = 256  # most descriptors that one dataset keeps open in a process
# pause between checks: seconds, or if that is longer, as on a network disk, this multiple of a check's duration
_CHECK_S, _CHECK_MULTIPLE = 1.0, 50
_SLOTS_SHOWN = 20

Location = TypeVar("Location")  # type of what locates bytes of a sample, such as an extension
T = TypeVar("T")
Locate: TypeAlias = Callable[[Rows, Rows], Rows]  # from shards, and positions in them, to rows of the index
ReadRow: TypeAlias = Callable[[int, int, Location], T]  # from shard, row, and location in the sample, to the value


def unreadable_error(path: object, error: OSError) -> ShardError:
    """Return the error for an indexed file that is missing or cannot be read."""
    reason = "missing shard" if isinstance(error, FileNotFoundError) else "unreadable shard"
    return ShardError(f"{path}: {error.strerror}. It was there when indexed: restore it", reason=reason)


class MemberReader(Protocol):
    """Reader of parts of samples by shard and row.

    Parts are bytes, uint8 (bytes,), or the bytes at (offset, size) of the shard.
    """

    def read(self, shard: int, row: int, extension: str, /) -> bytes: ...
    def array(self, shard: int, row: int, extension: str, /) -> NDArray[np.uint8]: ...
    def span(self, shard: int, row: int, extent: tuple[int, int], /) -> bytes: ...


class ShardFiles(dict[int, Descriptor], ABC):
    """Open files of some shards: `files[shard]` is a descriptor.

    A descriptor stays open as long as the caller refers to it.

    A missing shard is opened and checked. At most `OPEN_SHARDS` stay open, and all datasets of a process together have
    no more open files than the system permits (see core/files.py). The shard that was opened first is closed first. Any
    thread may open and close shards, so iterate over a `copy()`. The class is a dict, because a method call instead of
    the look-up would cost a tenth of a read.
    """

    is_remote: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        register(self)

    def __missing__(self, shard: int) -> Descriptor:
        evict()
        descriptor = self[shard] = Descriptor(with_handles(lambda: self.open(shard)))
        while len(self) > OPEN_SHARDS:
            self.close_oldest()
        return descriptor

    def close_oldest(self) -> None:
        """Close the shard that was opened first, once no thread reads it."""
        with contextlib.suppress(RuntimeError, StopIteration):  # another thread just opened or closed a shard
            self._close(next(iter(self)))

    def _close(self, shard: int) -> Descriptor | None:
        """Forget the descriptor of a shard and return it, or None if another thread was first."""
        return self.pop(shard, None)

    @property
    def prefetch_refs(self) -> int:
        """See `RecordStore.prefetch_refs`."""
        return 0

    def refs_ahead(self, mean_bytes: float) -> int:
        """Return the number of refs to announce ahead, for samples of this mean size."""
        return 0

    @abstractmethod
    def open(self, shard: int) -> int:
        """Open a new descriptor of a checked shard.

        Raises `ShardError`, `RemoteError`, or OSError if no descriptor is left.
        """

    @abstractmethod
    def path(self, shard: int) -> Path:
        """Return the local file of a shard."""

    @abstractmethod
    def entry(self, shard: int) -> tuple[str, int]:
        """Return name and size in bytes of a file, as indexed."""

    def sidecar(self, name: str) -> Path | None:
        """Return the local sidecar of this name, relative to the dataset, or None."""
        return None

    def prefetch(self, indices: Rows) -> None:
        """Announce that these samples will be read.

        Local files need no announcement.
        """

    def prefetch_bytes(self, shard: int, begins: Rows, ends: Rows, *, soon: bool = False) -> None:
        """Announce reads of byte ranges of a file.

        Range i is from `begins[i]` to `ends[i]`.
        """

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Return `size` bytes of a shard from `offset` on.

        Raises `ShardError` if it cannot be read or is too short.
        """
        descriptor = self[shard]
        try:
            data = os.pread(descriptor, size, offset)
        except OSError as error:
            data = self.read_again(shard, offset, size, error)
        return data if len(data) == size else data + self.read_rest(shard, offset + len(data), size - len(data))

    def read_again(self, shard: int, offset: int, size: int, error: OSError) -> bytes:
        """Repeat a read that failed, after opening the file again.

        It may return fewer bytes. Raises the errors of `read`, and `RemoteError` for a network disk.
        """

        def act() -> bytes:
            self.reopen(shard)
            return os.pread(self[shard], size, offset)

        try:
            return retry(self.path(shard), error, act)
        except OSError as last:
            raise unreadable_error(self.path(shard), last) from last

    def reopen(self, shard: int) -> None:
        """Open and check a shard again.

        A thread that is reading from it keeps the old descriptor.
        """
        self[shard] = Descriptor(with_handles(lambda: self.open(shard)))

    def read_into(self, array: NDArray[np.uint8], shard: int, offset: int) -> None:
        """Fill `array`, uint8 (bytes,), with bytes of a shard.

        Raises the errors of `read`.
        """
        done = -1
        if hasattr(os, "preadv"):
            with contextlib.suppress(OSError):
                done = os.preadv(self[shard], [array], offset)  # type: ignore[list-item]
        if done != len(array):
            array[:] = np.frombuffer(ShardFiles.read(self, shard, offset, len(array)), np.uint8)

    def read_ahead(self, shard: int, offset: int, size: int, stop: int) -> bytes:
        """Return bytes of a shard. Remote files may download more, up to `stop`."""
        return self.read(shard, offset, size)

    def read_rest(self, shard: int, offset: int, missing: int) -> bytes:
        """Return the rest of a short read, `missing` bytes at `offset`.

        Linux returns at most 2 GB at once.
        """
        pieces = []
        while missing:
            try:
                piece = os.pread(self[shard], missing, offset)
            except OSError as error:
                piece = self.read_again(shard, offset, missing, error)
            if not piece:
                raise ShardError(
                    f"{self.path(shard)}: {missing} bytes at byte {offset} are missing. The file was cut short: "
                    "restore it",
                    reason="changed shard",
                )
            pieces.append(piece)
            offset, missing = offset + len(piece), missing - len(piece)
        return b"".join(pieces)

    def watch_view(self, number: int, path: Path) -> None:
        """Watch a memory-mapped file: a shard, or under the number `~shard` its sidecar."""

    def verify(self, slot: int) -> None:
        """Raise `ShardError` if a shard changed, before the batch of this slot is yielded.

        The slot is the batch's position in the run. The batch may have been read from the changed shard.
        """

    def verify_yielded(self) -> None:
        """Raise `ShardError` if a shard changed under batches since the last check."""

    def request(self, rows: Rows) -> None:
        """Announce that these rows will be read next. Local files need no announcement."""

    def peek(self, shard: int, row: int, extent: tuple[int, int]) -> bytes | None:
        """Return the bytes at (offset, size) of a sample too long to download, or None.

        For None, the caller reads them from the file.
        """
        return None

    def fetch_rows(self, numbers: Rows) -> None:
        """Fetch the missing index rows of shards with these numbers."""

    def fetch_rows_first(self, locate: Locate) -> Locate:
        """Return the function `locate`, extended to fetch missing index rows first."""
        return locate

    def has_all_rows(self) -> bool:
        """Return whether the index has the rows of all shards."""
        return True

    def long_sample_reader(self, reader: MemberReader, extent: Callable[[int, str], tuple[int, int]]) -> MemberReader:
        """Return a reader for samples too long to download whole, or `reader`.

        `extent` returns offset and size of a part by row and extension.
        """
        return reader

    def download_first(self, read: ReadRow[Location, T], read_long: ReadRow[Location, T]) -> ReadRow[Location, T]:
        """Return `read`, extended to download the row first if it is missing.

        The read is repeated if the row is evicted in the meantime. `read_long` reads a missing row that is too long to
        download whole.
        """
        return read


class StoreFile(ByteSource):
    """File of `files`, as formats read it.

    It is checked when it is opened, and usable as long as `files`.
    """

    __slots__ = ("_files", "_shard", "_whole_name")

    def __init__(self, files: ShardFiles, shard: int) -> None:
        self._files, self._shard = files, shard
        self._whole_name, size = files.entry(shard)
        read = files.read
        super().__init__(lambda offset, wanted: read(shard, offset, wanted), size, self._whole_name.rpartition("/")[2])

    def expect(self, ranges: list[tuple[int, int]]) -> None:
        """See `ByteSource.expect`."""
        begins, sizes = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
        self._files.prefetch_bytes(self._shard, begins, np.minimum(begins + sizes, self.size), soon=True)

    def sidecar(self, suffix: str, name: str = "") -> Path | None:
        """See `ByteSource.sidecar`."""
        return self._files.sidecar(suffix if name else str(PurePosixPath(self._whole_name).with_suffix(suffix)))


class LocalFiles(ShardFiles):
    """Shards of a folder, pinned as they were when this process first opened them."""

    def __init__(self, indexed: IndexedFiles) -> None:
        super().__init__()
        self._indexed = indexed
        self._checked: set[int] = set()  # shards whose index rows and sampled bytes were checked
        self._pins: dict[int, FileVersion] = {}
        self._changed: list[Path] = []  # files that changed during the run
        self._warned: set[int] = set()  # shards with a warning
        self._slots: dict[int, None] = {}  # slots of the batches since the last check, in order
        self._next_check = 0.0
        self._viewed: dict[int, Path] = {}  # mapped files, which are read even without an open descriptor

    def path(self, shard: int) -> Path:
        """Return the path of a shard."""
        return self._indexed.root / self._indexed.entries.names[shard]

    def entry(self, shard: int) -> tuple[str, int]:
        """See `ShardFiles.entry`."""
        return self._indexed.entries.names[shard], int(self._indexed.entries.sizes[shard])

    def open(self, shard: int) -> int:
        """Open a new descriptor of a shard.

        Raises `ShardError` if it is missing or changed since it was indexed.
        """
        path = self.path(shard)
        try:
            return with_retries(path, lambda: self._open_checked(shard, path))
        except OSError as error:
            if lacks_handles(error):
                raise
            raise unreadable_error(path, error) from error

    def _open_checked(self, shard: int, path: Path) -> int:
        descriptor = _open_without_atime(path)
        try:
            self._check(shard, descriptor, path)
        except BaseException as error:
            if isinstance(error, ShardError):
                forget_mark(self._indexed.index_path)
            os.close(descriptor)
            raise
        return descriptor

    def sidecar(self, name: str) -> Path | None:
        """See `ShardFiles.sidecar`."""
        path = self._indexed.root / name
        return path if path.exists() else None

    def watch_view(self, number: int, path: Path) -> None:
        """See `ShardFiles.watch_view`."""
        self._viewed[number] = path
        if number < 0:  # a shard itself was pinned when it was opened
            self._pin(number, path.stat(), None)

    def _check(self, shard: int, descriptor: int, path: Path) -> None:
        """Raise `ShardError` unless a shard's size and compared bytes are as indexed, and it is the pinned file."""
        indexed, stat = self._indexed, os.fstat(descriptor)
        size = int(indexed.entries.sizes[shard])
        if stat.st_size != size:
            raise ShardError(
                f"{path}: {stat.st_size} bytes, but {size} when indexed. Start again to index it, or restore it",
                reason="changed shard",
            )
        if shard not in self._checked:
            indexed.check_rows(shard)
            if not indexed.matches_index(shard, LocalFile(path, descriptor)):
                sidecar = indexed.form.sidecar[1]
                file = f"the shard or its {sidecar} was" if sidecar else "the shard was"
                raise ShardError(
                    f"{path}: {file} rewritten since it was indexed, at the same size. Remove {indexed.index_path} and "
                    "start again, or restore the old shard",
                    reason="changed shard",
                )
            self._checked.add(shard)
        if not self._pin(shard, stat, descriptor):
            raise ShardError(
                f"{path}: it was replaced while this run read it. Restore the old shard, or start again",
                reason="changed shard",
            )

    def _close(self, shard: int) -> Descriptor | None:
        """Forget the descriptor of a shard, after a last check of the file."""
        if (descriptor := super()._close(shard)) is not None:
            self._check_open([(shard, descriptor)])
        return descriptor

    def verify(self, slot: int) -> None:
        """See `ShardFiles.verify`. Open and mapped files are checked once a second."""
        self._slots[slot] = None
        if self._changed or time.monotonic() >= self._next_check:
            self._check_shards(f", but slot {slot} was not yielded")

    def verify_yielded(self) -> None:
        """See `ShardFiles.verify_yielded`."""
        if self._slots:
            self._check_shards("")

    def _check_shards(self, message_end: str) -> None:
        """Check open shards, and files that are only mapped. Raises `ShardError` for a change.

        The error repeats at each check, because no later batch is right either. Other threads may open and close
        shards, and add slots, during the check.
        """
        checked_slots, started_s = list(self._slots), time.monotonic()
        if not self._changed:
            self._check_open(self.copy().items())
            for number, path in list(self._viewed.items()):
                # the file was deleted or replaced, but the mapped content is unchanged
                with contextlib.suppress(OSError):
                    if number not in self and (stat := path.stat()).st_ino == self._pins[number].inode:
                        self._record_if_changed(number, stat, None)
            self._next_check = time.monotonic() + max(_CHECK_S, _CHECK_MULTIPLE * (time.monotonic() - started_s))
        if not self._changed:
            for slot in checked_slots:  # remove only these, because another thread may have added more
                self._slots.pop(slot, None)
            return
        raise ShardError(
            f"{self._changed[0]}: it was overwritten while this run read it. Restore it, and resume from an earlier "
            f"state\nThe slots {_format_slots(sorted(self._slots))} may have bytes of both{message_end}",
            reason="changed shard",
        )

    def _check_open(self, shards: Iterable[tuple[int, Descriptor]]) -> None:
        """Check some of the open shards, pairs of shard and descriptor."""
        fstat, pins = os.fstat, self._pins
        for shard, descriptor in shards:
            pin = pins[shard]
            try:
                stat = fstat(descriptor)
            except OSError:
                if self.get(shard) is descriptor:  # no other thread has closed or reopened the shard
                    self.reopen(shard)  # compares the file with its pin
                continue
            pinned_ns = pin.changed_ns, pin.written_ns
            if (stat.st_ctime_ns, stat.st_mtime_ns) != pinned_ns or stat.st_size != pin.size:
                self._record_if_changed(shard, stat, descriptor)

    def _record_if_changed(self, number: int, stat: os.stat_result, descriptor: int | None) -> None:
        """Add the file's path to the changed ones unless its content seems to be the same."""
        if not self._is_same(number, FileVersion.of(stat), descriptor):
            self._changed.append(self._path_of(number))

    def _pin(self, number: int, stat: os.stat_result, descriptor: int | None) -> bool:
        """Record the status of an opened file, and return whether it equals a status recorded earlier."""
        now = FileVersion.of(stat)
        pin = self._pins.setdefault(number, now)
        return pin.inode == now.inode and self._is_same(number, now, descriptor)

    def _is_same(self, number: int, now: FileVersion, descriptor: int | None) -> bool:
        """Return whether a file seems to have the same content, and record its new status if so."""
        pin = self._pins[number]
        if (now.size, now.written_ns) != (pin.size, pin.written_ns):
            return False
        if now.changed_ns != pin.changed_ns:
            if now.rights == pin.rights and not self._matches_index(number, descriptor):
                return False
            self._pins[number] = now
        return True

    def _matches_index(self, number: int, descriptor: int | None) -> bool:
        """Return whether compared bytes of a shard, or of it and its sidecar, are as indexed. If so, warn once.

        Without a descriptor, the file is opened.
        """
        shard = number if number >= 0 else ~number
        opened = -1
        try:
            if descriptor is None or number < 0:
                descriptor = opened = _open_without_atime(self.path(shard))
            if not self._indexed.matches_index(shard, LocalFile(self.path(shard), descriptor)):
                return False
        except (OSError, ShardError):
            return False
        finally:
            if opened >= 0:
                os.close(opened)
        if number not in self._warned:
            self._warned.add(number)
            log.warning(
                "%s: its inode changed during the run (ctime), but not its size, times or compared bytes. Compare it "
                "with its source, for example by `rsync --checksum --dry-run`",
                self._path_of(number),
            )
        return True

    def _path_of(self, number: int) -> Path:
        """Return the path of a shard, or under the number `~shard` that of its sidecar."""
        return self._viewed.get(number) or self.path(number)


def _open_without_atime(path: Path) -> int:
    """Open a file without updating its access time if permitted. The update costs a tenth of a read."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # only the owner of a file may use O_NOATIME
        return os.open(path, flags)


def _format_slots(slots: list[int]) -> str:
    """Format slots, such as `3, 99 and 8 more up to 401`."""
    more = f" and {len(slots) - _SLOTS_SHOWN} more up to {slots[-1]}" if len(slots) > _SLOTS_SHOWN else ""
    return ", ".join(map(str, slots[:_SLOTS_SHOWN])) + more
