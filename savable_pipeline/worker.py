"""A worker process: hosts lanes and makes the batches it is asked for, in the order it is asked.

    trainer ── (ticket, lane, state or None, probe) ──▶ worker
            ◀── (ticket, Delivery) or (ticket, Failure) ──     the first, ticket 0, says that the worker has started

A request says which lane runs next; if the worker does not hold that lane, the request brings its state. A large answer
lies in shared memory (`segments`), and the message only says where. A thread reads requests all the time, so that
neither side can wait for the other to read, and ends the process when the trainer is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

import torch

from savable_pipeline import errors, wire
from savable_pipeline.errors import SavableError
from savable_pipeline.host import Delivery, LaneHost, Pipeline
from savable_pipeline.segments import SegmentWriter

STARTED = 0  # the ticket of a worker's first word
_ORPHAN_CHECK_S = 2.0
_INLINE = 1 << 16  # answers of so many bytes go through the pipe itself


@dataclass(frozen=True, slots=True)
class Job:
    """What workers build their lanes with."""

    pipeline: Pipeline
    seed: int
    lanes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a worker's stages raised, as text: its own class may not exist or pickle in the trainer."""

    error: SavableError | None
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """With the library's own error that it is or is derived from, if it is one."""
        kinds = [kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__]
        return cls(kinds[0](str(error)) if kinds else None, traceback.format_exc())


def work(job: Job, connection: Connection, shared: dict[Any, Any] | None, trainer: int) -> None:
    """What a worker process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer hears Ctrl-C and closes us
    torch.set_num_threads(1)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests, trainer), daemon=True).start()
    host = LaneHost(job.pipeline, seed=job.seed, lanes=job.lanes, shared={} if shared is None else shared)
    answers = _Answers(connection)
    answers.send(STARTED, None)
    while True:
        ticket, lane, state, probe = requests.get()
        try:
            answers.send(ticket, host.deliver(lane, state, probe=probe))
        except Exception as error:
            answers.send(ticket, Failure.of(error))


class _Answers:
    """Sends answers to the trainer: small ones through the pipe, large ones through shared memory."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._segments = SegmentWriter()

    def send(self, ticket: int, answer: Delivery | Failure | None) -> None:
        """Send an answer; ends the process if the trainer is gone or has closed us."""
        pickled, buffers = wire.dumps(answer)
        if len(pickled) + sum(map(len, buffers)) <= _INLINE or not hasattr(os, "memfd_create"):
            self._post((ticket, (bytes(pickled), [bytearray(buffer) for buffer in buffers]), None))
            return
        segment, fd, dropped, places = self._segments.write([*buffers, pickled])
        self._post((ticket, None, (segment, fd is not None, dropped, places)))
        if fd is not None:
            with _gone_if_closed():
                send_handle(self._connection, fd, 0)
            os.close(fd)

    def _post(self, message: Any) -> None:
        raw = pickle.dumps(message, protocol=5)
        with _gone_if_closed():
            self._connection.send_bytes(raw)


@contextlib.contextmanager
def _gone_if_closed() -> Iterator[None]:
    try:
        yield
    except OSError:
        os._exit(0)


def _listen(connection: Connection, requests: queue.SimpleQueue[Any], trainer: int) -> None:
    """Pass requests on; end the process when the trainer says so or is gone."""
    parent = os.getppid()  # the trainer, a fork server, or who took us over if the trainer is gone already
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            os.kill(trainer, 0)  # sends nothing; an OSError if there is no such process
            if connection.poll(_ORPHAN_CHECK_S):
                request = connection.recv()
                if request is None:
                    break
                requests.put(request)
    os._exit(0)
