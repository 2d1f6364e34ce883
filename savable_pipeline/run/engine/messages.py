"""The messages between the trainer and its workers."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from savable_pipeline import errors
from savable_pipeline.core.on_error import from_user_code
from savable_pipeline.core.run_facts import NO_FACTS, RunFacts
from savable_pipeline.errors import EncodeError, SavableError, ShardError, WorkerError
from savable_pipeline.run.engine.stage_timing import WatchedSamples
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.item_ref import ItemRef
from savable_pipeline.stages.pipeline import PipelineFunction

RequestKind: TypeAlias = Literal["batch", "peek", "skip", "again"]
""""batch": make a lane's next batch. "peek": only find out whether there is one. "skip": pass over it. "again": make an
earlier batch again; the state is that of a `lane_runner.RebuildRequest`.
"""


@dataclass(frozen=True, slots=True)
class LaneJob:
    """Pipeline and settings with which workers build their lanes."""

    pipeline: PipelineFunction
    seed: int
    lanes: int
    pad: bool = False
    refs: bool = False  # whether a batch comes with its ref


class Request(msgspec.Struct, frozen=True):
    """Request to a worker. The lane is restored first unless `state` is None.

    `number` is 1, 2, … on its connection, also in the answer. `forget` has lanes that the worker may drop. `avoid` has
    index and epoch of samples that the lane must drop. `version` identifies the facts with which the lane is restored,
    and `facts` has them if the worker has others.
    """

    number: int
    lane: int
    state: bytes | None
    want: RequestKind
    forget: tuple[int, ...] = ()
    avoid: tuple[tuple[int, int], ...] = ()
    version: int = NO_FACTS.version
    facts: RunFacts | None = None


class WorkerStatus(NamedTuple):
    """A worker's current stage, sample and request.

    The stage is identified by its depth, the sample by index and epoch. None means unknown.
    """

    depth: int | None
    sample: int | None
    epoch: int
    request: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of a worker as text.

    Its class may not exist in the trainer, or may not pickle. `pickled` is the error itself, or the encoder's error
    that caused it, if it can be pickled.
    """

    error: SavableError | None
    text: str
    pickled: bytes | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe `error` and its traceback."""
        kinds = [kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__]
        own: SavableError | None = kinds[0](str(error)) if kinds else None
        if isinstance(own, ShardError) and isinstance(error, ShardError):
            own.reason = error.reason
        cause = error.__cause__ if isinstance(error, EncodeError) else None
        described = cause or error
        text = "".join(traceback.format_exception(from_user_code(described)))
        return cls(own, text, _pickled(described) if cause or type(own) is not type(error) else None)

    def raised(self) -> Exception:
        """Return the error to raise in the trainer.

        Its class and cause are the same as without workers.
        """
        where = f"in a worker:\n{self.text}"
        raised = None if self.pickled is None else _unpickled(self.pickled)
        if raised is None:
            raised = WorkerError(where)
        else:
            raised.add_note(where)
        if self.error is None or (type(self.error) is not EncodeError and isinstance(raised, type(self.error))):
            return raised
        self.error.__cause__ = raised
        return self.error


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an error, or return None if that fails or the error would end a loop."""
    with contextlib.suppress(Exception):
        raw = pickle.dumps(error)
        if type(pickle.loads(raw)) is type(error) and not isinstance(error, StopIteration):
            return raw
    return None


def _unpickled(raw: bytes) -> Exception | None:
    with contextlib.suppress(Exception):
        error = pickle.loads(raw)
        return error if isinstance(error, Exception) else None
    return None


def row_count(ref: ItemRef, stage: str) -> int:
    """Return the number of rows of a batch with this ref.

    Raises `SavableError` if the ref does not show it.
    """
    first = len(ref) > 0 and type(ref[0]) is int  # the batch's own number
    rows = len(ref) - first
    if rows and not type(ref[first]) is type(ref[-1]) is tuple:
        raise SavableError(
            f"acknowledge=True needs the rows of a batch. Set the ref of {stage} to (number of the batch, ref of each "
            f"row), not {ref!r}."
        )
    return rows


class Delivery(msgspec.Struct, frozen=True):
    """A batch, with the state of its lane after it.

    `dry` means that the lane had no further batch, and `more` whether another follows. `seconds` is the time to build
    the batch, and `rebuild_s` an estimate of the time to rebuild the lane's buffered items if the lane moved to another
    worker. `counts` has the event counters of its stages, by `STAGE/NAME`. `timed` says whether the counts have the
    time of each stage. `watched` has the samples if they were recorded. `ref` is the batch's ref, from a worker in
    MessagePack, if the job asks for it. `rows` is the number of rows in the ref. `remaining` has the numbers of the
    rows that a rebuilt batch still has, and none for padding. `written` is the batch as the worker wrote it, for peers.
    """

    batch: Any
    state: bytes
    more: bool
    dry: bool = False
    seconds: float = 0.0
    rebuild_s: float = 0.0
    counts: dict[str, int | float] = {}
    samples: BatchSamples = BatchSamples()
    timed: bool = False
    watched: WatchedSamples | None = None
    ref: ItemRef | msgspec.Raw = ()
    rows: int = 0
    remaining: tuple[int, ...] = ()
    written: Any = None

    @property
    def sent(self) -> Delivery:
        """Convert the ref to bytes, because nested tuples pickle slowly."""
        return self if not self.ref else replace(self, ref=msgspec.Raw(msgspec.msgpack.encode(self.ref)))
