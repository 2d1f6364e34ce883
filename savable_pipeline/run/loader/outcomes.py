"""What became of samples after they were given: trained on, dropped, given again, or not known.

start 1    given ── trained ── killed                     trained, but lost: the model of the checkpoint has not seen it
start 2    given again ── trained                         trained
           given again ── dropped: stale                  dropped: stale
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from savable_pipeline.run.ledger.reader import GivenBatch, LedgerFiles
from savable_pipeline.run.state.flights import EPOCH_SHIFT


class Outcome(NamedTuple):
    """What became of a sample; "" if that is not known. `lost`: in a model that was thrown away."""

    name: str
    lost: bool


_Row = tuple[int, int]  # a batch, as receipts name it, and a row


def outcomes(ledger: LedgerFiles, given: Sequence[tuple[GivenBatch, int]]) -> list[Outcome]:
    """What became of these rows, as bits, of batches, which are in the order in which they were given."""
    rows = [_rows(each, bits) for each, bits in given]
    said = _acknowledged(ledger, {batch for named in rows for batch, _ in named})
    last: dict[_Row, int] = {}  # the last start in which each was given
    last_time: dict[tuple[int, _Row], int] = {}  # the last time in a start
    for time, ((each, _), named) in enumerate(zip(given, rows, strict=True)):
        for row in named:
            last[row] = max(last.get(row, 0), each.began)
            last_time[each.began, row] = time
    found = []
    for time, ((each, _), named) in enumerate(zip(given, rows, strict=True)):
        names, lost = set(), each.lost
        for row in named:
            name = said.get((each.began, row), "") if last_time[each.began, row] == time else ""
            is_later = last[row] > each.began or last_time[each.began, row] > time
            lost |= bool(name) and is_later
            names.add(name or ("given again" if is_later and not each.lost else ""))
        found.append(Outcome(" and ".join(sorted(filter(None, names))), lost))
    return found


def _rows(given: GivenBatch, bits: int) -> list[_Row]:
    batch = given.batch.epoch << EPOCH_SHIFT | given.batch.slot
    return [(batch, row) for row in range(bits.bit_length()) if bits >> row & 1]


def _acknowledged(ledger: LedgerFiles, batches: Iterable[int]) -> dict[tuple[int, _Row], str]:
    """What was said of each row of these batches, in each start."""
    wanted, found = set(batches), {}
    for began, record in ledger.acknowledged():
        for batch in wanted & record.rows.keys() if record.kind != "again" else ():
            bits = int.from_bytes(record.rows[batch], "little")
            for row in (row for row in range(bits.bit_length()) if bits >> row & 1):
                found[began, (batch, row)] = "trained" if record.kind == "done" else f"dropped: {record.reason}"
    return found
