"""Finds a state that was not loaded: a loader begins at slot 0, and its ledger has this run's batches already."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from savable_pipeline.errors import SavableError
from savable_pipeline.run.ledger.records import SUFFIX, Batch, Saved, Start, read_records

log = logging.getLogger(__name__)


def check_not_forgotten(folder: Path, start: Start) -> None:
    """Warn if the ledger in a folder has batches of this run and rank, where its loader begins without a state.

    Raises `SavableError` if it also has a state that was saved after some batch: that one should have been loaded.
    """
    last, saved = (-1, -1), None
    for path in sorted(folder.glob(f"*-rank-{start.rank:05d}{SUFFIX}")):
        with contextlib.suppress(SavableError):  # of a damaged file its reader tells
            for record in read_records(path):
                if isinstance(record, Start) and (record.seed, record.lanes) != (start.seed, start.lanes):
                    break  # another run's: `LedgerWriter` refuses the folder
                if isinstance(record, Batch):
                    last = max(last, record.place)
                elif isinstance(record, Saved):
                    saved = record
    if last < (0, 0):
        return
    has = f"{folder} has this run's batches up to slot {last[1]} of epoch {last[0]}"
    if saved is not None:
        raise SavableError(
            f"{has}, and notes that a state was saved at slot {saved.slot} of epoch {saved.epoch}, but this loader "
            "begins at slot 0 with no state loaded: what the model has seen would come again. Load the state before "
            "the first batch, or give a new run another ledger="
        )
    log.warning(
        "%s, and this loader begins at slot 0 with no state loaded: they come again, and the ledger marks the earlier "
        "ones as lost. If there is a checkpoint, stop, and load its state before the first batch",
        has,
    )
