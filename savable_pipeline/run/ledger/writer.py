"""`LedgerWriter`: appends the batches that a rank is given to its file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from savable_pipeline.errors import SavableError
from savable_pipeline.run.ledger.records import Batch, LaneAt, Numbers, Record, Start, framed
from savable_pipeline.stages.batch_samples import BatchSamples

SUFFIX = ".ledger"
STATE_EVERY = 1000  # batches of a lane from one of its states in the ledger to the next


class LedgerWriter:
    """One rank's file of one start in the folder `folder`, which is made. Raises `SavableError` if it cannot be."""

    def __init__(self, folder: Path, start: Start) -> None:
        self._path = folder / f"{start.number:020d}-rank-{start.rank:05d}{SUFFIX}"
        self._since: dict[int, int] = {}  # batches of each lane since its last state
        self._fd = -1  # where it is closed
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = self._opened(os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._write(start)
        except BaseException:
            self.discard()
            raise

    def _opened(self, more: int = 0) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | more, 0o666)

    def given(self, epoch: int, slot: int, lane: int, before: bytes, samples: BatchSamples, cost: int = 0) -> None:
        """Write that the batch of this slot is given; `before` is the state of its lane before it, `cost` its packs'.

        Raises `SavableError` if that fails, as on a full disk.
        """
        since = self._since.get(lane, STATE_EVERY)
        if since >= STATE_EVERY:
            self._write(LaneAt(epoch, slot, lane, before))
            since = 0
        self._write(Batch.of(epoch, slot, samples, cost))
        self._since[lane] = since + 1

    def note(self, numbers: Numbers) -> None:
        """Write the run's counters. Raises `SavableError` if that fails."""
        self._write(numbers)

    def _write(self, record: Record) -> None:
        data = framed(record)
        try:
            if self._fd < 0:
                self._fd = self._opened()
            written = os.write(self._fd, data)
            if written < len(data):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> SavableError:
        return SavableError(
            f"ledger {self._path}: {error.strerror}; free space or give another ledger=. The batch has not been given: "
            "continue from here, or save"
        )

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def discard(self) -> None:
        """Close the file and remove it: it has no record that counts."""
        self.close()
        self._path.unlink(missing_ok=True)
