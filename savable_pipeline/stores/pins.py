"""`Pins`: what each shard was when this process first opened it; looked at again before a batch made of it is given.

A shard that is overwritten in place changes under whoever has it open. So each open shard is looked at once a second
(`fstat`: about 0.6 µs), and one that is closed once more before that: a batch is given only if nothing that it may have
been read from had changed a second ago.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping

_LOOK_S, _LOOK_SHARE = 1.0, 50  # between two looks: seconds, and times what a look takes (on a network disk)


class Pins:
    """The shards that were opened, by number, with their inode, size and time of the last change of their bytes."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, int, int]] = {}
        self._changed: list[int] = []
        self._slots: list[int] = []  # of the batches since the last look
        self._look_at = 0.0

    def pin(self, shard: int, stat: os.stat_result) -> bool:
        """Remembers a shard that was opened; False if it is another than when it was opened before."""
        found = stat.st_ino, stat.st_size, stat.st_mtime_ns
        return self._found.setdefault(shard, found) == found

    def look_at_views(self, views: Iterable[tuple[int, os.stat_result]]) -> None:
        """Looks at files that are mapped, by their paths: another file in the place of one leaves the map as it is."""
        for number, stat in views:
            found = self._found[number]
            if stat.st_ino == found[0] and (stat.st_size, stat.st_mtime_ns) != found[1:]:
                self._changed.append(number)

    def look(self, shards: Iterable[tuple[int, int]]) -> None:
        """Looks at these open shards: pairs of shard and descriptor."""
        fstat, pins = os.fstat, self._found
        for shard, descriptor in shards:
            stat, found = fstat(descriptor), pins[shard]
            if stat.st_mtime_ns != found[2] or stat.st_size != found[1]:  # an open file keeps its inode
                self._changed.append(shard)

    def changed(
        self, files: Mapping[int, int], slot: int, views: Callable[[], Iterable[tuple[int, os.stat_result]]]
    ) -> tuple[int, list[int]] | None:
        """A shard that has changed, and the slots of the batches since the last look; None if none has.

        `files` has the descriptors of open shards, `views` finds those that are mapped only; `slot` is of the batch to
        give. Once a shard has changed, no batch is right any more: it is named each time.
        """
        if slot not in self._slots[-1:]:
            self._slots.append(slot)
        now = time.monotonic()
        if not self._changed:
            if now < self._look_at:
                return None
            self.look(files.items())
            self.look_at_views(views())
            self._look_at = time.monotonic() + max(_LOOK_S, _LOOK_SHARE * (time.monotonic() - now))
        if self._changed:
            return self._changed[0], sorted(set(self._slots))
        self._slots.clear()
        return None
