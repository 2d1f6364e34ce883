"""`LocalFiles`: shards on a disk, each checked against the index when it is opened."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from savable_pipeline.core.open_files import is_out_of_handles
from savable_pipeline.data.shards.file_bytes import LocalBytes
from savable_pipeline.data.shards.fresh_mark import forget_mark
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.pins import Pins
from savable_pipeline.data.stores.shard_files import ShardFiles
from savable_pipeline.errors import ShardError

_SLOTS_SHOWN = 20


class LocalFiles(ShardFiles):
    """The shards of a folder."""

    def __init__(self, found: IndexedFiles) -> None:
        super().__init__()
        self._found = found
        self._checked: set[int] = set()  # shards whose rows in the index, and some of whose samples, were checked
        self._pins = Pins()
        self._viewed: dict[int, Path] = {}  # files that are mapped: used also while no descriptor of them is kept

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self._found.root / self._found.entries.names[shard]

    def open(self, shard: int) -> int:
        """A new descriptor of a shard. Raises `ShardError` if it is gone or was changed since it was indexed."""
        path = self.path(shard)
        try:
            descriptor = _open_without_atime(path)
        except OSError as error:
            if is_out_of_handles(error):
                raise
            raise ShardError(
                f"{path}: {error.strerror}; it was there when the shards were indexed",
                reason="missing shard" if isinstance(error, FileNotFoundError) else "unreadable shard",
            ) from error
        try:
            self._check(shard, descriptor, path)
        except BaseException as error:
            if isinstance(error, ShardError):
                forget_mark(self._found.index_path)
            os.close(descriptor)
            raise
        return descriptor

    def beside(self, name: str) -> Path | None:
        """What lies beside the files under this name."""
        path = self._found.root / name
        return path if path.exists() else None

    def watch_view(self, number: int, path: Path) -> None:
        """Looks from now on also at a file that is mapped: a shard, or at the number `~shard` what lies beside one."""
        self._viewed[number] = path
        if number < 0:  # a shard was pinned when it was opened
            self._pins.pin(self, number, path.stat())

    def path_of(self, number: int) -> Path:
        """See `Watched.path_of`."""
        return self._viewed.get(number) or self.path(number)

    def is_as_indexed(self, number: int, descriptor: int | None) -> bool:
        """See `Watched.is_as_indexed`; of what lies beside a shard: both together."""
        shard, own = number if number >= 0 else ~number, -1
        try:
            if descriptor is None or number < 0:
                descriptor = own = _open_without_atime(self.path(shard))
            return self._found.is_as_indexed(shard, LocalBytes(self.path(shard), descriptor))
        except (OSError, ShardError):
            return False
        finally:
            if own >= 0:
                os.close(own)

    def _closed_views(self) -> Iterator[tuple[int, os.stat_result]]:
        for number, path in list(self._viewed.items()):
            if number not in self:
                with contextlib.suppress(OSError):  # gone: what is mapped stays as it is
                    yield number, path.stat()

    def _check(self, shard: int, descriptor: int, path: Path) -> None:
        """Raises `ShardError` unless size and some samples are as indexed, and the file that it was before.

        (The first sample, one in the middle and the last: the rest of the shard is not read.)
        """
        found, stat = self._found, os.fstat(descriptor)
        size = int(found.entries.sizes[shard])
        if stat.st_size != size:
            raise ShardError(
                f"{path}: {stat.st_size} bytes, but {size} when it was indexed; the shard was rewritten or cut short "
                "since: start again or run `savable index` to index it, or put the old shard back",
                reason="changed shard",
            )
        if shard not in self._checked:
            found.check_rows(shard)
            if not found.is_as_indexed(shard, LocalBytes(path, descriptor)):
                beside = found.form.beside[1]
                what = f"the shard, or its {beside}, was" if beside else "its samples lie elsewhere: the shard was"
                raise ShardError(
                    f"{path}: as large as when it was indexed, but {what} rewritten since; remove {found.index_path} "
                    "and start again to index it, or put the old shard back",
                    reason="changed shard",
                )
            self._checked.add(shard)
        if not self._pins.pin(self, shard, stat, descriptor):
            raise ShardError(
                f"{path}: it was replaced while this run read from it; put the old shard back, or start again",
                reason="changed shard",
            )

    def close_oldest(self) -> None:
        """Closes the shard that was opened first, after a last look at it."""
        self._pins.look(self, [next(iter(self.items()))])
        super().close_oldest()

    def verify(self, slot: int) -> None:
        """See `ShardFiles.verify`: at most once a second, open and mapped files are looked at."""
        if self._pins.note(slot):
            self._look(f", of which that of slot {slot} was not given")

    def verify_given(self) -> None:
        """See `ShardFiles.verify_given`."""
        if self._pins.has_noted:
            self._look("")

    def _look(self, not_given: str) -> None:
        changed = self._pins.changed(self, self._closed_views())
        if changed:
            raise ShardError(
                f"{self.path_of(changed[0])}: it was overwritten while this run read from it; the batches of the slots "
                f"{_numbers(self._pins.slots())} may hold bytes of both{not_given}. Put the old shard back, and start "
                "again from a state before them",
                reason="changed shard",
            )


def _open_without_atime(path: Path) -> int:
    """A descriptor whose reads do not update the file's access time, if permitted: that costs a tenth of a read."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # only the owner of a file may use O_NOATIME
        return os.open(path, flags)


def _numbers(slots: list[int]) -> str:
    """`3, 99 and 8 more up to 401`."""
    more = f" and {len(slots) - _SLOTS_SHOWN} more up to {slots[-1]}" if len(slots) > _SLOTS_SHOWN else ""
    return ", ".join(map(str, slots[:_SLOTS_SHOWN])) + more
