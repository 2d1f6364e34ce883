"""`Stats`: what a loader has done so far, as flat names and numbers; and a line in the log when the trainer starves."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

log = logging.getLogger(__name__)

_WINDOW_S = 60.0
_STARVING = 0.25  # of the trainer's time


class Stats:
    """Counts of one loader, since it was made."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._counts: Counter[str] = Counter()
        self._batches = 0
        self._wait_s = 0.0
        self._work_s = 0.0  # of all workers
        now = time.perf_counter()
        self._read = (now, 0, 0)  # when `numbers` was asked last, and the batches and items then
        self._window = (now, 0.0)  # its start, and the waiting by then

    def add(self, waited_s: float, worked_s: float, counts: dict[str, int | float]) -> None:
        """Count a batch for which the trainer waited so long, and in which this happened."""
        self._batches += 1
        self._wait_s += waited_s
        self._work_s += worked_s
        self.count(counts)
        begun, before = self._window
        now = time.perf_counter()
        if now - begun > _WINDOW_S:
            self._tell_starving(now - begun, self._wait_s - before)
            self._window = now, self._wait_s

    def count(self, counts: Mapping[str, int | float]) -> None:
        """Count what happened in stages."""
        self._counts.update(counts)

    def _tell_starving(self, seconds: float, waited: float) -> None:
        if waited < _STARVING * seconds:
            return
        shares = sorted(self._stage_shares().items(), key=lambda entry: -entry[1])
        where = ", ".join(f"{name} {share:.0%}" for name, share in shares[:3]) or "not measured yet"
        log.warning(
            "the trainer waited for data in %.0f of the last %.0f s; of the time that batches take to make: %s; "
            "num_workers is %d",
            waited,
            seconds,
            where,
            self._num_workers,
        )

    def _stage_shares(self) -> dict[str, float]:
        """Of the time that batches take to make, what goes into each stage; measured on some."""
        spent = {name[:-3]: number for name, number in self._counts.items() if name.endswith("/ns")}
        total = sum(spent.values())
        return {name: number / total for name, number in spent.items()} if total else {}

    def numbers(self) -> dict[str, int | float]:
        """Everything by name; rates are those since the last call."""
        now = time.perf_counter()
        items = self._counts["Encode/items"]
        then, batches, items_then = self._read
        self._read = now, self._batches, items
        seconds = max(now - then, 1e-9)
        counts = {name: number for name, number in self._counts.items() if not name.endswith("/ns")}
        return {
            "batches": self._batches,
            "batches_per_s": (self._batches - batches) / seconds,
            "items_per_s": (items - items_then) / seconds,
            "wait_s": self._wait_s,
            **{f"seconds/{name}": share * self._work_s for name, share in self._stage_shares().items()},
            **counts,
            **_fills(counts),
        }


def _fills(counts: Mapping[str, int | float]) -> dict[str, float]:
    """Of each packer, the part of its packs that holds tokens."""
    fills = {}
    for name, tokens in counts.items():
        stage = name.removesuffix("/tokens")
        room = counts.get(f"{stage}/room")
        if stage != name and room is not None and tokens + room:
            fills[f"{stage}/fill"] = tokens / (tokens + room)
    return fills
