"""`LedgerKeeper`: writes a rank's batches and counters to the run's ledger."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from msgspec.structs import replace

from savable_pipeline.core.run_facts import NO_FACTS
from savable_pipeline.errors import SavableError
from savable_pipeline.run.ledger import records
from savable_pipeline.run.loader.acknowledgements import AcknowledgedRows
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.position import BatchStep, Observer, Position
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.states import States
from savable_pipeline.run.loader.stats import Stats
from savable_pipeline.run.state.flights import mask_bytes
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage

log = logging.getLogger(__name__)

_LEAST_S = 10.0  # least seconds between two records of counters
_LEAST_FRACTION = 0.01  # least fraction of the time since the file started between two records of counters
_COSTS = ("Balance/cost", "OnlinePacker/cost")  # the last stage with costs comes first


class LedgerKeeper(Observer):
    """Observer that writes batches and counters to a ledger file.

    The file is created at the first batch or skip of a new or loaded loader. Ranks that can communicate create their
    files together. If one fails, every rank raises that error. The run's counters are written at the start and end of a
    file, and in between. `pop_acknowledged` returns what the trainer has acknowledged since the last call.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        local: LocalLanes,
        states: States,
        stats: Stats,
        pop_acknowledged: Callable[[], AcknowledgedRows],
    ) -> None:
        self._folder = Path(settings.ledger or "")
        self._seed = settings.seed
        self._local, self._states, self._stats, self._pop_acknowledged = local, states, stats, pop_acknowledged
        self._lock = Lock()  # locked because other threads save
        self._writer: records.LedgerWriter | None = None
        self._file_started = self._counters_due = 0.0
        self._last = (0, 0)  # epoch and slot of the last batch
        self._facts = NO_FACTS  # the facts that were last written to the file
        self._is_first_start = True  # whether no state was loaded, and nothing was skipped
        self._saved: records.Saved | None = None  # the last saved state, until the next batch

    def on_batch(self, step: BatchStep) -> None:
        """Write a batch. Raises `SavableError` if it cannot be written."""
        if step.repeated is None:
            self._write(step)
        elif step.delivery.remaining:
            epoch, slot = step.epoch_and_slot
            record = records.Batch.of(epoch, slot, in_rows(step.samples, step.delivery.remaining))
            writer = self._open(step.before)
            with self._lock:
                writer.write(replace(record, again=mask_bytes(step.repeated) or b"\0"))
        self._write_acknowledged()

    def _write(self, step: BatchStep) -> None:
        """Write the batch of a new slot, and before it what has changed since the last batch."""
        now, position, counts = time.monotonic(), step.before, step.delivery.counts
        writer = self._open(position)
        lane = position.own_slot % position.lane_count
        cost = next((int(counts[name]) for name in _COSTS if name in counts), 0)
        self._last = position.epoch, position.own_slot
        if now >= self._counters_due:
            self._counters_due = now + max(_LEAST_S, _LEAST_FRACTION * (now - self._file_started))
            self._write_counters(writer)
        if position.facts is not self._facts and position.facts != self._facts:
            if position.facts.decisions != self._facts.decisions:
                writer.forget_lanes()
            self._facts = position.facts
            writer.write(records.Facts(position.facts))
        self._write_saved(writer)
        with self._lock:
            writer.append(position.epoch, position.own_slot, lane, position.lanes[lane].state, step.samples, cost)

    def _write_acknowledged(self) -> None:
        """Write the acknowledgements since the last call if there is a file, in any thread."""
        if self._writer is not None:
            with self._lock:
                for (kind, reason), rows in self._pop_acknowledged().items():
                    masks = {batch: mask_bytes(mask) for batch, mask in rows.items()}
                    self._writer.write(records.Acknowledged(kind, reason, masks))

    def on_save(self, position: Position, state: MutableMapping[str, Any], lag: int) -> None:
        """Record the saved state with the next batch.

        It is not recorded earlier, because a kill before that batch may lose the state.
        """
        if (position.epoch, position.slot) > (0, 0):
            self._saved = records.Saved(position.epoch, position.slot)
        self._write_acknowledged()

    def _write_saved(self, writer: records.LedgerWriter) -> None:
        if self._saved is not None:
            writer.write(self._saved)
            self._saved = None

    def _write_counters(self, writer: records.LedgerWriter) -> None:
        writer.write(records.Numbers(*self._last, time.time_ns(), self._stats.totals(), self._stats.names()))

    def on_skip(self, position: Position) -> None:
        """Record that slots are skipped. Raises `SavableError` if it cannot be written."""
        if not position.is_over:
            self._is_first_start = False
            if (position.epoch, position.own_slot) <= self._last:
                self._start_new_file()  # the run went back before the last batch, which must count as lost
            self._open(position)

    def _open(self, position: Position) -> records.LedgerWriter:
        """Return the writer of the current file. Create a file if there is none, or the run went back."""
        if (position.epoch, position.own_slot) < self._last:
            self._start_new_file()  # the run has returned to an earlier position
        if self._writer is None:
            self._writer = self._create_agreed_file(position, _sources(self._local.last_stage), self._states.packed)
            self._file_started = time.monotonic()
            self._counters_due = 0.0  # counters are due before the first batch
        return self._writer

    def _create_agreed_file(
        self, position: Position, sources: list[records.LedgerSource], fingerprint: bytes
    ) -> records.LedgerWriter:
        """Create this rank's file. If another rank that can communicate fails to create its own, raise that error."""
        ranks = position.ranks
        number = records.next_number(self._folder)
        if ranks.has_group:
            number = ranks.agree(number, smallest=False)
        rank, where = (ranks.rank, ranks.world_size), (position.lane_count, self._seed, position.epoch, position.slot)
        cores = os.cpu_count() or 0
        start = records.Start(records.FORMAT, number, *rank, *where, sources, fingerprint, position.pad, cores)
        if not ranks.has_group:
            return self._create_file(start)
        try:
            writer, own_error = self._create_file(start, checks_folder=ranks.rank == 0), ""
        except SavableError as error:
            writer, own_error = None, str(error)
        errors_by_rank = {rank: found for rank, found in enumerate(ranks.gather(own_error)) if found}
        if writer is not None and not errors_by_rank:
            return writer
        if writer is not None:
            writer.discard()
        raise SavableError("; ".join(f"rank {rank}: {found}" for rank, found in errors_by_rank.items()))

    def _create_file(self, start: records.Start, *, checks_folder: bool = True) -> records.LedgerWriter:
        """Create this rank's file. With `checks_folder`, first check that no saved state should have been loaded."""
        if self._is_first_start and checks_folder:
            check_not_forgotten(self._folder, start)
        return records.LedgerWriter(self._folder, start)

    def close(self) -> None:
        """Close the file. The next batch continues it, without waiting for other ranks."""
        self._write_acknowledged()
        if self._writer is None:
            return
        try:
            self._write_counters(self._writer)
            if sys.exception() is None:  # after an exception, the state may not have been written
                self._write_saved(self._writer)
        except SavableError as error:
            log.warning("the ledger lacks the last counters of this start: %s", error)
        self._writer.close()
        self._counters_due = 0.0

    def on_load(self, position: Position, state: Mapping[str, Any] | None) -> Callable[[], None] | None:
        """Return a function that closes the file if a state is loaded.

        The next batch creates another file.
        """
        return None if state is None else self._start_new_file

    def _start_new_file(self) -> None:
        self.close()
        self._writer, self._facts, self._is_first_start, self._last = None, NO_FACTS, False, (0, 0)


def in_rows(samples: BatchSamples, numbers: Sequence[int]) -> BatchSamples:
    """Return the same samples with their rows renumbered: row i becomes `numbers[i]`."""
    if list(numbers) == list(range(len(numbers))):
        return samples
    rows = np.array(numbers, np.int64)
    return BatchSamples(arrays=(samples.refs, rows if samples.rows is None else rows[samples.rows]))


def _sources(last: Stage) -> list[records.LedgerSource]:
    """Return the sources of a pipeline, in the order of the data path."""
    return [
        records.LedgerSource(
            stage.info.branch, tag, _address(stage), saved_files(stage.files) if isinstance(stage, RecordReader) else ""
        )
        for stage in upstream(last)
        if not stage.sources
        for tag in stage.info.tags
    ]


def _address(reader: Stage) -> str:
    """Return the address of a reader's samples, or "" for a user's own reader."""
    return str(getattr(getattr(reader, "dataset", None), "address", ""))


def saved_files(files: str | tuple[str, ...]) -> str | list[str]:
    """Return a reader's files as absolute paths; "" if one has a password."""
    named = [files] if isinstance(files, str) else list(files)
    if not any(named) or any("@" in name.partition("://")[2].partition("/")[0] for name in named):
        return ""
    absolute = [name if "://" in name else str(Path(name).absolute()) for name in named]
    return absolute[0] if isinstance(files, str) else absolute


def check_not_forgotten(folder: Path, start: records.Start) -> None:
    """Warn if the ledger already has batches of a run that starts without a state.

    Raises `SavableError` if the run has also saved a state, because that should be loaded.
    """
    last, saved = (-1, -1), None
    for path in sorted(folder.glob(f"*-rank-{start.rank:05d}{records.SUFFIX}")):
        with contextlib.suppress(SavableError):  # the reader of a damaged file reports it
            for record in records.read_records(path):
                if isinstance(record, records.Start) and (record.seed, record.lanes) != (start.seed, start.lanes):
                    break  # a file of another run; `LedgerWriter` rejects such a folder
                if isinstance(record, records.Batch):
                    last = max(last, record.position)
                elif isinstance(record, records.Saved):
                    saved = record
    if last < (0, 0):
        return
    has = f"{folder} has this run's batches up to slot {last[1]} of epoch {last[0]}"
    if saved is not None:
        raise SavableError(
            f"{has}, and its state was saved at slot {saved.slot} of epoch {saved.epoch}. Load the state before the "
            "first batch, or set another ledger=."
        )
    log.warning("%s, which are repeated now. If there is a checkpoint, stop and load it before the first batch.", has)
