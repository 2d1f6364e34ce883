"""`Pins`: what each shard was when this process first opened it; looked at again before a batch made of it is given.

A shard that is overwritten in place changes under whoever has it open. So each open shard is looked at once a second
(`fstat`: about 0.6 µs), and one that is closed once more before that: a batch is given only if nothing that it may have
been read from had changed a second ago. What was given since is looked at where a run pauses or ends.

    size, or time of the last write      another: the shard was overwritten
    time of the last change of the inode another: explained by mode, owner or links that changed with it; else some
                                         bytes are compared with the index, since whoever writes can put the other time
                                         back: other bytes are an error, equal ones a warning
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import ItemsView, Iterable
from pathlib import Path
from typing import Protocol

from savable_pipeline.data.shards.file_bytes import FileVersion

log = logging.getLogger(__name__)

_LOOK_S, _LOOK_SHARE = 1.0, 50  # between two looks: seconds, and times what a look takes (on a network disk)


class Watched(Protocol):
    """The files that are pinned. `~shard` is the number of what lies beside a shard."""

    def items(self) -> ItemsView[int, int]:
        """Those that are open: shard and descriptor."""

    def get(self, shard: int, /) -> int | None: ...
    def path_of(self, number: int, /) -> Path: ...
    def is_as_indexed(self, number: int, descriptor: int | None, /) -> bool:
        """Whether some bytes of a shard are as the index says; without a descriptor, of one that is closed."""


class Pins:
    """The shards that were opened, by number, as they were then."""

    def __init__(self) -> None:
        self._found: dict[int, FileVersion] = {}
        self._changed: list[int] = []
        self._told: set[int] = set()  # of which there was a warning
        self._slots: list[int] = []  # of the batches since the last look
        self._look_at = 0.0

    def pin(self, files: Watched, shard: int, stat: os.stat_result, descriptor: int | None = None) -> bool:
        """Remembers a shard that was opened; False if it is another than when it was opened before."""
        now = FileVersion.of(stat)
        was = self._found.setdefault(shard, now)
        return was.inode == now.inode and self._is_same(files, shard, now, descriptor)

    def note(self, slot: int) -> bool:
        """Notes the slot of a batch that is to be given. Returns whether the shards must be looked at before."""
        if slot not in self._slots[-1:]:
            self._slots.append(slot)
        return bool(self._changed) or time.monotonic() >= self._look_at

    @property
    def has_noted(self) -> bool:
        """Whether there were batches since the last look."""
        return bool(self._slots)

    def changed(self, files: Watched, views: Iterable[tuple[int, os.stat_result]]) -> list[int]:
        """Looks at open shards, by number, and at files that are mapped only. Returns those that have changed.

        Once a shard has changed, no batch is right any more: it is named each time. Another thread may open and close
        shards, and note slots, meanwhile.
        """
        noted, began = len(self._slots), time.monotonic()
        if not self._changed:
            self.look(files, list(files.items()))
            self._look_at_views(files, views)
            self._look_at = time.monotonic() + max(_LOOK_S, _LOOK_SHARE * (time.monotonic() - began))
        if not self._changed:
            del self._slots[:noted]
        return self._changed

    def slots(self) -> list[int]:
        """The slots of the batches since the last look that found nothing."""
        return sorted(set(self._slots))

    def look(self, files: Watched, shards: Iterable[tuple[int, int]]) -> None:
        """Looks at some of the open shards: pairs of shard and descriptor, which another thread may have closed."""
        fstat, pins = os.fstat, self._found
        for shard, descriptor in shards:
            was = pins[shard]
            try:
                stat = fstat(descriptor)
            except OSError:
                if files.get(shard) == descriptor:
                    raise
                continue
            same = (
                stat.st_ctime_ns == was.changed_ns and stat.st_mtime_ns == was.written_ns and stat.st_size == was.size
            )
            if not same and files.get(shard) == descriptor:
                self._look_closer(files, shard, FileVersion.of(stat), descriptor)

    def _look_at_views(self, files: Watched, views: Iterable[tuple[int, os.stat_result]]) -> None:
        """Looks at files by their paths: another file in the place of one leaves the map as it is."""
        for number, stat in views:
            if stat.st_ino == self._found[number].inode:
                self._look_closer(files, number, FileVersion.of(stat), None)

    def _look_closer(self, files: Watched, number: int, now: FileVersion, descriptor: int | None) -> None:
        if not self._is_same(files, number, now, descriptor):
            self._changed.append(number)

    def _is_same(self, files: Watched, number: int, now: FileVersion, descriptor: int | None) -> bool:
        """Whether a file holds what it did, as far as can be seen; then it is remembered as it is now."""
        was = self._found[number]
        if (now.size, now.written_ns) != (was.size, was.written_ns):
            return False
        if now.changed_ns != was.changed_ns:
            if now.rights == was.rights and not self._holds_the_same(files, number, descriptor):
                return False
            self._found[number] = now
        return True

    def _holds_the_same(self, files: Watched, number: int, descriptor: int | None) -> bool:
        same = files.is_as_indexed(number, descriptor)
        if same and number not in self._told:
            self._told.add(number)
            log.warning(
                "%s: its inode changed while this run read from it (ctime), but neither mode, owner and links nor size "
                "and time of writing, and what was compared of its bytes is as it was indexed: it was moved or backed "
                "up, or overwritten by a program that put the time of writing back. Compare it with its source, such "
                "as by `rsync --checksum --dry-run`",
                files.path_of(number),
            )
        return same
