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
""""batch": build a lane's next batch. "peek": only find out whether there is one. "skip": skip it. "again": rebuild an
earlier batch, with a `lane_runner.RebuildRequest` in place of the lane's state.
"""


@dataclass(frozen=True, slots=True)
class LaneJob:
    """Pipeline and settings with which workers build their lanes."""

    pipeline: PipelineFunction
    seed: int
    lanes: int
    pad: bool = False  # whether an exhausted lane yields batches of padding rows
    refs: bool = False  # whether a delivery has the ref (the sample IDs) of its batch


class Request(msgspec.Struct, frozen=True):
    """Request to a worker for a batch of a lane.

    `number` counts the requests of the connection from 1, and the answer repeats it. `state`, unless it is None, is the
    position from which the worker restores the lane first. `forget` has lanes that the worker may drop. `avoid` has
    index and epoch of samples that the lane must skip. `version` identifies the run's facts with which the lane is
    restored, and `facts` has them unless the worker knows them already.
    """

    number: int
    lane: int
    state: bytes | None
    kind: RequestKind
    forget: tuple[int, ...] = ()
    avoid: tuple[tuple[int, int], ...] = ()
    version: int = NO_FACTS.version
    facts: RunFacts | None = None


class WorkerStatus(NamedTuple):
    """Current work of a worker: a stage, a sample and the number of a request.

    `depth` is the number of stages before the stage. `sample` is the index of the sample. None means unknown.
    """

    depth: int | None
    sample: int | None
    epoch: int
    request: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of a worker as text, to be raised in the trainer.

    It is sent as text, because its class may not exist in the trainer, or may not pickle. `error` has the library's
    class and message of the error, or is None for an error of another class. `text` is the traceback. `pickled` is the
    encoder's error that caused it, or else the error itself, if that can be pickled.
    """

    error: SavableError | None
    text: str
    pickled: bytes | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe `error` and its traceback."""
        library_classes = [each for each in type(error).__mro__ if each.__module__ == errors.__name__]
        library_error: SavableError | None = library_classes[0](str(error)) if library_classes else None
        if isinstance(library_error, ShardError) and isinstance(error, ShardError):
            library_error.reason = error.reason
        cause = error.__cause__ if isinstance(error, EncodeError) else None
        original = cause or error
        text = "".join(traceback.format_exception(from_user_code(original)))
        return cls(library_error, text, _pickled(original) if cause or type(library_error) is not type(error) else None)

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
    """Pickle an error, or return None if that fails or it is a StopIteration, which would end the trainer's loop."""
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
    """Return the number of rows of a batch by its ref.

    The ref is (number of the batch, ref of each row). A batch of a user's own stage may have no number. `stage` is the
    class that yielded the batch. Raises `SavableError` for a ref in another form.
    """
    has_number = len(ref) > 0 and type(ref[0]) is int
    row_refs = ref[1:] if has_number else ref
    if row_refs and not type(row_refs[0]) is type(row_refs[-1]) is tuple:
        raise SavableError(
            f"acknowledge=True needs the rows of a batch. Set the ref of {stage} to (number of the batch, ref of each "
            f"row), not {ref!r}."
        )
    return len(row_refs)


class Delivery(msgspec.Struct, frozen=True):
    """Answer to a request: the batch, the state of its lane after it, and numbers.

    It carries all that is known about the batch. `samples`, a part of it, only has the refs of the batch's items, for
    counts, `trace` and the ledger.

    - `more`: whether another batch follows. `exhausted`: whether the lane had no batch left for this request.
    - `seconds`: the time to build the batch. `rebuild_s`: the estimated time to rebuild the lane's buffered items if
      the lane moved to another worker.
    - `counts`: the event counters of the stages since the last delivery, by `STAGE/NAME`. `timed`: whether they
      include the time of each stage. `watched`: the samples, if they were timed too.
    - `ref`: the batch's ref if `LaneJob.refs` is set, from a worker in MessagePack. `rows`: the number of rows in it.
    - `remaining`: the row numbers that a rebuilt batch still has, without padding.
    - `pass_on`: the function by which a rank passes the answer on to ranks that share its batches (peers/peer.py).
    """

    batch: Any
    state: bytes
    more: bool
    exhausted: bool = False
    seconds: float = 0.0
    rebuild_s: float = 0.0
    counts: dict[str, int | float] = {}
    samples: BatchSamples = BatchSamples()
    timed: bool = False
    watched: WatchedSamples | None = None
    ref: ItemRef | msgspec.Raw = ()
    rows: int = 0
    remaining: tuple[int, ...] = ()
    pass_on: Any = None

    @property
    def with_encoded_ref(self) -> Delivery:
        """This delivery with its ref as bytes, because nested tuples pickle slowly."""
        return self if not self.ref else replace(self, ref=msgspec.Raw(msgspec.msgpack.encode(self.ref)))
