"""`ThreadHost` starts workers as threads of this process.

    trainer ── a queue of requests ──▶ thread ── its own lanes, datasets and copies of the encoders
            ◀── a queue of answers ──            mutable parts of a batch are copied (`detached_copy`)

Threads copy no `bytes` and need the memory of one process. They are faster if encoders release the GIL. They share the
global generators of the process, so encoders must not use those. Signals and torch's number of threads stay as the
trainer has set them. A thread cannot be killed, so one that hangs is an error, and a crash in C code ends the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from savable_pipeline.core.global_rng import seeded_generators
from savable_pipeline.core.lane import PinnedShards, ThreadValues
from savable_pipeline.core.named_object import imported
from savable_pipeline.run.engine.connection import STARTED, Host, WorkerAnswer, WorkerEnd
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import Delivery, Failure, LaneJob, Request, WorkerStatus
from savable_pipeline.run.engine.worker_main import ShardCheck, answer_request
from savable_pipeline.run.transport import batch_pickle
from savable_pipeline.run.transport.status_page import read_status, start_request
from savable_pipeline.stages.mapped_function import MappedFunction
from savable_pipeline.stages.pipeline import encoders_of
from savable_pipeline.stages.stage import Stage

log = logging.getLogger(__name__)

_CHECK_S = 5.0  # timeout for threads to end, each after its current batch
_IMMUTABLE = {str, bytes, int, float, bool, complex, type(None)}


class ThreadConnection:
    """A worker thread."""

    viewed_batches = 0

    def __init__(self, number: int, job: LaneJob, pinned: PinnedShards, host: ThreadHost) -> None:
        self.name = f"thread {number}"
        self.is_hanging = False
        self._host = host
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()  # None asks the thread to end
        self._answers: deque[tuple[int, WorkerAnswer]] = deque()
        self._shard_errors: list[str] = []
        self._shard_check = ShardCheck(self._shard_errors.append)
        self._words = memoryview(bytearray(32)).cast("Q")  # depth, index, epoch and request, as in `StatusPage`
        start_request(self._words, 0)
        self._shard_check.runner = self._runner = LaneRunner(
            job, shared=ThreadValues(host.shared, host.lock), status=self._words, pinned=dict(pinned)
        )
        self.thread = threading.Thread(target=self._work, name=f"savable_pipeline {self.name}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        self._add_answer(STARTED, 1)  # any int reports the start; worker processes send their process ID
        try:
            # While the thread is idle, `next_request` looks for changed shards.
            while (request := self._shard_check.next_request(self._requests)) is not None:
                start_request(self._words, request.number)
                self._add_answer(request.number, _with_detached_batch(answer_request(self._runner, request)))
        except BaseException as error:  # for example SystemExit of an encoder, which would end a process
            self._host.events.put(WorkerEnd(self, f"ended by {type(error).__name__}"))

    def _add_answer(self, number: int, answer: WorkerAnswer) -> None:
        self._answers.append((number, answer))
        self._host.events.put(self)

    def send(self, request: Request) -> None:
        """Send a request."""
        self._requests.put(request)

    def receive(self) -> list[tuple[int, WorkerAnswer]]:
        """Return the answers that have arrived."""
        arrived = []
        while self._answers:
            arrived.append(self._answers.popleft())
        return arrived

    def check_shards(self) -> None:
        """Look for changed shards in the calling thread."""
        self._shard_check.check_shards()

    def has_checked(self) -> bool:
        """Return True, because `check_shards` checks at once."""
        return True

    def shard_error(self) -> str:
        """Return the message about a changed shard, or ""."""
        return self._shard_errors[0] if self._shard_errors else ""

    def working_on(self) -> WorkerStatus:
        """Return the thread's stage, sample and request."""
        return WorkerStatus(*read_status(self._words))

    def stack(self) -> str:
        """Return the thread's calls within `answer_request`, the innermost first.

        The result is "" if the thread has ended.
        """
        frame = sys._current_frames().get(self.thread.ident or 0)
        calls = [
            f'  File "{each.filename}", line {each.lineno} in {each.name}' for each in traceback.extract_stack(frame)
        ]
        names = [call.rpartition(" in ")[2] for call in calls]
        inner_calls = calls[names.index(answer_request.__name__) + 1 :] if answer_request.__name__ in names else []
        return "\n".join(["Stack, the innermost call first:", *reversed(inner_calls)]) if frame is not None else ""

    def kill(self) -> bool:
        """Return whether the thread has ended by itself, because it cannot be killed."""
        self.is_hanging = self.thread.is_alive()
        return not self.is_hanging

    def close(self) -> None:
        """Ask the thread to end after its current batch."""
        self._requests.put(None)


class ThreadHost(Host):
    """Starts threads as workers.

    Threads share values such as open datasets. If one hangs, those that are started later do not share its values.
    """

    def __init__(self, job: LaneJob) -> None:
        self._job = replace(job, pipeline=lambda lane: _check_seeds_nothing(job.pipeline(lane)))
        self.events: queue.SimpleQueue[ThreadConnection | WorkerEnd] = queue.SimpleQueue()
        self._workers: list[ThreadConnection] = []
        self._started_count = 0
        self._reset_shared()
        torch = imported("torch")
        if torch is not None and torch.get_num_threads() != 1:
            log.warning(
                "torch has %d threads here and one in worker processes, so float sums may differ. Call "
                "torch.set_num_threads(1).",
                torch.get_num_threads(),
            )

    def _reset_shared(self) -> None:
        # Values that the threads share, such as open datasets. Running threads keep the earlier dict and lock.
        self.shared: dict[Any, Any] = {}
        self.lock = threading.RLock()

    def start_worker(self, pinned: PinnedShards) -> ThreadConnection:
        """Start a thread."""
        self._started_count += 1
        self._workers.append(ThreadConnection(self._started_count, self._job, pinned, self))
        return self._workers[-1]

    def wait(self, seconds: float) -> tuple[list[ThreadConnection], list[WorkerEnd]]:
        """Wait until a thread has an answer or ends by itself.

        Return those with answers, and the ends.
        """
        events = []
        with contextlib.suppress(queue.Empty):
            events.append(self.events.get(seconds > 0, seconds or None))
            while True:
                events.append(self.events.get_nowait())
        ended = [each for each in events if isinstance(each, WorkerEnd)]
        return [worker for worker in self._workers if worker in events], ended

    def end_workers(self) -> None:
        """End all threads, and then look for changed shards.

        This waits up to 5 s for their current batches.
        """
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        deadline = time.monotonic() + _CHECK_S
        for worker in workers:
            worker.thread.join(0.0 if worker.is_hanging else max(0.0, deadline - time.monotonic()))
        for worker in workers:
            worker.check_shards()
        busy = [worker.name for worker in workers if worker.thread.is_alive()]
        if busy:
            log.warning("%s did not end within %g s. They end after their current batch.", ", ".join(busy), _CHECK_S)
            self._reset_shared()

    close = end_workers


def _check_seeds_nothing(last: Stage) -> Stage:
    """Return the last stage of a lane. Raises ValueError if an encoder seeds the global generators."""
    for encoder in encoders_of(last):
        if encoder.global_rng is not None and (seeded := seeded_generators(encoder.global_rng)):
            name, fix = type(encoder).__name__, "set global_rng = False in the class"
            if isinstance(encoder, MappedFunction):
                name, fix = f"{encoder.stage}(…)", f"write {encoder.stage}(…, global_rng=False)"
            raise ValueError(
                f"worker threads cannot seed the global generators ({', '.join(seeded)}) of {name}. Use only `rng` "
                f"and {fix}, or use start_method='fork'."
            )
    return last


def _with_detached_batch(answer: Delivery | Failure) -> Delivery | Failure:
    """Return the answer with a copy of its batch that shares no mutable object with the stages."""
    if isinstance(answer, Failure):
        return answer
    try:
        return msgspec.structs.replace(answer, batch=detached_copy(answer.batch, {}))
    except Exception:
        return Failure(None, traceback.format_exc())


def detached_copy(value: Any, known: dict[int, Any]) -> Any:
    """Copy a value and its mutable parts, such as lists, dicts and arrays.

    `bytes` and other immutable values are not copied. `known` has the copies made so far, by the `id` of the original,
    so that a part that occurs twice is copied once.
    """
    kind = type(value)
    if kind in _IMMUTABLE or isinstance(value, np.generic):
        return value
    if id(value) in known:
        return known[id(value)]
    copied: Any
    if kind is list or kind is tuple:
        copied = kind([detached_copy(each, known) for each in value])
    elif kind is dict:
        copied = {name: detached_copy(each, known) for name, each in value.items()}
    else:
        pieces, buffers = batch_pickle.dumps(value)
        copies = [np.frombuffer(buffer, np.uint8).copy().data for buffer in buffers]  # releases the GIL
        copied = batch_pickle.loads(b"".join(pieces), copies)
    known[id(value)] = copied
    return copied
