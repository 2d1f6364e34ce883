"""A worker process: hosts lanes and makes the batches it is asked for, in the order it is asked.

    trainer ── Request ──▶ worker
            ◀── (ticket, Delivery) or (ticket, Failure) ──     the first, ticket 0, is its process id: it has started

A request says which lane runs next; if the worker does not hold that lane as it stands, the request brings its state.
A large answer lies in shared memory (`segments`), and the message only says where. A thread reads requests all the
time, and ends the process when the trainer is gone.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from savable_pipeline import batch_memory, errors, wire
from savable_pipeline.channel import Channel
from savable_pipeline.errors import SavableError
from savable_pipeline.host import Delivery, LaneHost, Pipeline, Want
from savable_pipeline.note import Note
from savable_pipeline.segments import SegmentWriter

STARTED = 0  # the ticket of a worker's first word
ORPHAN_CHECK_S = 2.0
_INLINE = 1 << 16  # answers of so many bytes go through the socket itself


@dataclass(frozen=True, slots=True)
class Job:
    """What workers build their lanes with."""

    pipeline: Pipeline
    seed: int
    lanes: int
    pad: bool = False


class Request(msgspec.Struct, frozen=True):
    """What a worker is to do with a lane, put to `state` before if that is given.

    `forget`: lanes that it need not hold any longer. `avoid`: samples that the lane leaves out, by index and epoch.
    """

    ticket: int
    lane: int
    state: bytes | None
    want: Want
    forget: tuple[int, ...] = ()
    avoid: tuple[tuple[int, int], ...] = ()


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


def work(job: Job, end: socket.socket, parent: int, shared: dict[Any, Any] | None = None) -> NoReturn:
    """What a worker process runs, until its `parent` ends or the trainer closes the other end."""
    be_quiet()
    channel = Channel(end, waits=True)
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    try:
        note = _first_message(channel, requests)
        threading.Thread(target=_listen, args=(channel, requests, parent), daemon=True).start()
        answers = _Answers(channel)
        batch_memory.use(answers.segments)
        answers.send(STARTED, os.getpid())
        host = LaneHost(
            job.pipeline,
            seed=job.seed,
            lanes=job.lanes,
            pad=job.pad,
            shared={} if shared is None else shared,
            note=note.words,
        )
        while True:
            request = requests.get()
            note.begin(request.ticket)
            answers.segments.begin()
            answers.send(request.ticket, _answer(host, request))
    except (EOFError, OSError):
        os._exit(0)  # the trainer is gone


def _answer(host: LaneHost, request: Request) -> Delivery | Failure:
    be_one_thread()
    try:
        for lane in request.forget:
            host.forget(lane)
        return host.deliver(request.lane, request.state, request.want, request.avoid)
    except Exception as error:
        return Failure.of(error)


def be_quiet() -> None:
    """Leave it to the trainer, which hears the same signals, to end us: it may want to save before it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # not ignored, which programs that we run would inherit
        signal.signal(number, lambda *_: None)


def be_one_thread() -> None:
    """Have torch, if anyone has imported it, use one thread: many in each worker are slower, and a sum may differ."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads") and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _first_message(channel: Channel, requests: queue.SimpleQueue[Request]) -> Note:
    """The note page, which the trainer sends first, maybe with requests right behind it."""
    messages: list[tuple[bytes, list[int]]] = []
    while not messages:
        messages = channel.receive()
    note = Note(messages[0][1][0])
    note.write_stacks()
    for message, _ in messages[1:]:
        requests.put(pickle.loads(message))
    return note


def _listen(channel: Channel, requests: queue.SimpleQueue[Request], parent: int) -> None:
    """Pass requests on; end the process when the trainer, or who started us, is gone."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    try:
        while os.getppid() == parent:
            if poll.poll(ORPHAN_CHECK_S * 1000):
                for message, _ in channel.receive():
                    requests.put(pickle.loads(message))
    finally:
        os._exit(0)


class _Answers:
    """Sends answers to the trainer: small ones through the socket, large ones through shared memory."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.segments = SegmentWriter()

    def send(self, ticket: int, answer: Delivery | Failure | int) -> None:
        """Send an answer, or else why it cannot be sent. Raises OSError if the trainer is gone or has closed us."""
        try:
            body, fd = self._written(answer)
        except Exception as error:
            body, fd = self._written(Failure.of(error))
        self._channel.send(pickle.dumps((ticket, *body), protocol=5), [] if fd is None else [fd])
        if fd is not None:
            os.close(fd)

    def _written(self, answer: Delivery | Failure | int) -> tuple[tuple[Any, Any], int | None]:
        """The answer itself, or where it lies and the descriptor of a segment that the trainer does not have."""
        pieces, buffers = wire.dumps(answer)
        if sum(map(len, pieces)) + sum(map(len, buffers)) <= _INLINE or not hasattr(os, "memfd_create"):
            return ((b"".join(pieces), [bytearray(buffer) for buffer in buffers]), None), None
        segment, fd, dropped, places = self.segments.write(buffers, pieces)
        return (None, (segment, fd is not None, dropped, places)), fd
