"""`Note`: a page that a worker shares with the trainer, where it says what it works on, so that its death can be told.

    word 0 │ 1     │ 2     │ 3      │ …    from byte 4096 on: the Python stack, written when the worker crashes
    depth  │ index │ epoch │ ticket │       or when it is asked for by a signal

`depth` is that of the stage at work, `index` and `epoch` are of the sample that is encoded. The page outlives the
worker. The stack is written by `faulthandler`, which works in a worker that is stuck in C code, too.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import tempfile
from typing import NamedTuple

NOTHING = (1 << 64) - 1
_PAGE = 4096
_SIGNAL = signal.SIGUSR2


class Work(NamedTuple):
    """What a worker works on: a stage, by its depth, and a sample, by its index; None where it does not say."""

    depth: int | None
    sample: int | None
    epoch: int
    ticket: int


class Note:
    """The page, over a file without a name, of which each side has a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _PAGE)
        self.words = memoryview(self._page).cast("Q")
        self._told = _PAGE  # up to here the file's stacks have been read

    @classmethod
    def make(cls) -> Note:
        """A new page that says nothing."""
        note = cls(anonymous_file("savable_pipeline note", _PAGE))
        note.begin(0)
        return note

    def begin(self, ticket: int) -> None:
        """In the worker: a request is begun."""
        self.words[0] = self.words[1] = self.words[2] = NOTHING
        self.words[3] = ticket

    def write_stacks(self) -> None:
        """In the worker: write the Python stack here at a crash, and when `ask_stack`'s signal comes."""
        os.lseek(self.descriptor, _PAGE, os.SEEK_SET)
        faulthandler.enable(self.descriptor)
        faulthandler.register(_SIGNAL, self.descriptor)

    def work(self) -> Work:
        """In the trainer: what the worker said last."""
        depth, index, epoch, ticket = self.words[:4].tolist()
        return Work(None if depth == NOTHING else depth, None if index == NOTHING else index, epoch, ticket)

    def new_stack(self) -> str:
        """In the trainer: the stacks written since the last call, of the threads that the worker had."""
        size = os.fstat(self.descriptor).st_size
        raw = os.pread(self.descriptor, min(size - self._told, 1 << 16), self._told) if size > self._told else b""
        self._told = max(size, self._told)
        return _of_the_lane(raw.decode(errors="replace"))

    def close(self) -> None:
        """Unmap the page and close the descriptor; safe to call again."""
        if self.descriptor >= 0:
            self.words.release()
            self._page.close()
            descriptor, self.descriptor = self.descriptor, -1  # first: Ctrl-C may come before all this is done
            os.close(descriptor)


STACK_SIGNAL = _SIGNAL


def _of_the_lane(stacks: str) -> str:
    """Of the stacks of all threads, the innermost call first, the calls that the making of a batch led to."""
    found: list[str] = []
    for line in stacks.splitlines():
        if line.startswith(("Current thread", "Thread")):
            found = []
        elif line.endswith("in _answer"):
            return "\n".join(["Stack, the innermost call first:", *found])
        else:
            found.append(line)
    return stacks[:2000]


def anonymous_file(name: str, size: int) -> int:
    """The descriptor of a file in memory that has no place in the file system and goes with its last descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
