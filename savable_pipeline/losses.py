"""`Losses`: the samples of which an `Encode` stage makes no item; which may be left out, how many, and which again."""

from __future__ import annotations

import logging
import weakref
from typing import Any, NamedTuple

import numpy as np

from savable_pipeline.encoder import Skip
from savable_pipeline.errors import EncodeError, SavableError, ShardError
from savable_pipeline.on_error import OnError, check_on_error, is_of_environment, reason_of, skips
from savable_pipeline.sample import REF, Sample
from savable_pipeline.stage import Stage, dry_limit

log = logging.getLogger(__name__)

_ALWAYS = 100  # so many errors of a lane are never too large a share


class Mark(NamedTuple):
    """Where the counting stands, to come back to if a call fails."""

    errors: int
    row: int
    given: int


class Losses:
    """What is left out by one stage, counted in its `counts` by reason."""

    def __init__(self, stage: Stage, encoder: str, on_error: OnError, max_errors: int | float) -> None:
        check_on_error("Encode", on_error)
        if max_errors < 0 or (isinstance(max_errors, float) and not max_errors <= 1):
            raise ValueError(f"Encode: max_errors must be a count or a share of at most 1.0, not {max_errors!r}")
        self._stage = weakref.proxy(stage)  # so that a stage is freed when it is dropped
        self._encoder = encoder
        self._on_error = on_error
        self._max_errors = max_errors
        self.errors = 0  # samples left out because of one
        self.avoided: dict[tuple[int, int], str] = {}  # (index, epoch) of samples not to be tried again: why
        self._row = 0  # how many in a row gave no item
        self._given = 0  # items that had been given when the row began
        self._counted: list[str] = []  # what was counted since the last mark

    def mark(self) -> Mark:
        """Begin a call that may fail."""
        self._counted.clear()
        return Mark(self.errors, self._row, self._given)

    def back_to(self, mark: Mark) -> None:
        """Nothing of the call has taken place."""
        self._stage.counts.subtract(self._counted)
        self.errors, self._row, self._given = mark

    def skipped(self, skip: Skip, given: int) -> None:
        """Count it; end the run when so many samples in a row give nothing that none ever will.

        `given`: how many items the stage has given so far.
        """
        name = f"skipped/{skip.reason}"
        self._stage.counts[name] += 1
        self._counted.append(name)
        if given != self._given:
            self._row, self._given = 0, given
        self._row += 1
        if self._row & 1023 == 0 and self._row.bit_count() == 1:
            log.warning("%d samples in a row were skipped, the last as %r", self._row, skip.reason)
        if self._row >= dry_limit(self._stage.population):
            raise EncodeError(
                f"{self._encoder}.encode skipped {self._row} samples in a row, the last as {skip.reason!r}: no item "
                "will ever come of this data; mend the encoder's conditions or the data"
            )

    def tolerate(self, sample: Sample, error: Exception, done: int, given: int) -> None:
        """Leave a sample, the lane's number `done`, out because of an error if the policy allows it; else raise."""
        fault: SavableError
        on_error: OnError
        if isinstance(error, ShardError):
            fault, on_error = error, sample._dataset.on_error  # of the shard, not of the encoder
        elif isinstance(error, SavableError):
            raise error
        else:
            fault, on_error = self.failed(sample, error), self._on_error
            fault.__cause__ = error
        if not skips(on_error, fault):
            raise fault
        if is_of_environment(error):
            self.avoid(sample._index, sample._epoch, reason_of(error))
            self._forget_before(sample._epoch - 1)
        self._lost(sample, reason_of(error), str(fault), done, given)

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        """Do not try this sample again."""
        self.avoided[index, epoch] = reason

    def avoided_again(self, sample: Sample, done: int, given: int) -> None:
        """Leave out a sample that is not to be tried again."""
        reason = self.avoided[sample._index, sample._epoch]
        self._lost(sample, reason, "avoided since it failed before", done, given)

    def _forget_before(self, epoch: int) -> None:
        """Refs of epochs long gone do not come again."""
        for ref in [ref for ref in self.avoided if ref[1] < epoch]:
            del self.avoided[ref]

    def _lost(self, sample: Sample, reason: str, detail: str, done: int, given: int) -> None:
        """Count it, write it down, and end the run if there are too many."""
        log.info("skipping index %d of epoch %d: %s", sample._index, sample._epoch, detail)
        quarantine = sample._dataset.quarantine
        if quarantine is not None:
            where = {"shard": sample.shard, "key": _key_of(sample), "offset": sample.offset, "ref": list(sample.ref)}
            quarantine.add(**where, reason=reason, detail=detail, lane=self._stage.lane.index)
        self.errors += 1
        share = isinstance(self._max_errors, float)
        if self.errors > (max(self._max_errors * done, _ALWAYS) if share else self._max_errors):
            raise EncodeError(
                f"{self.errors} of the {done} samples of {self._stage.lane} so far were skipped because of errors, "
                f"more than max_errors={self._max_errors!r} allows; the last: {detail}"
            )
        self.skipped(Skip(reason), given)

    def failed(self, sample: Sample, error: Exception) -> EncodeError:
        """What the encoder's own error becomes: it says of which sample."""
        return EncodeError(
            f"{self._encoder}.encode raised {type(error).__name__}: {error}; stage Encode, shard "
            f"{sample.shard}, key {_key_of(sample)!r}, byte offset {sample.offset}, ref {tuple(sample.ref)}"
        )

    def save_state(self) -> dict[str, Any]:
        """`errors`: how many samples were left out because of one; `avoided`: refs by reason, 12 bytes each."""
        avoided: dict[str, list[tuple[int, int]]] = {}
        for ref, reason in self.avoided.items():
            avoided.setdefault(reason, []).append(ref)
        return {
            "errors": self.errors,
            "avoided": {reason: np.array(refs, REF).tobytes() for reason, refs in avoided.items()},
        }


def _key_of(sample: Sample) -> str:
    try:
        return sample.key
    except ShardError:  # its header cannot be read either
        return "?"
