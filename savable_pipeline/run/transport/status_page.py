"""`StatusPage`: memory in which a worker records its current stage and sample, so that a crash can be reported.

    word 0 │ 1     │ 2     │ 3       │ 4      │ 5     │ …     from byte 4096 on: the Python stack, written when the
    depth  │ index │ epoch │ request │ length │ looks │ text     worker crashes or receives STACK_SIGNAL

`depth` is the number of stages before the one that runs; `index` and `epoch` are the ref of the sample being encoded;
`request` is its number; `text`, of `length` bytes, says what is wrong with batches already given;
`looks` counts how often the worker has looked for that because it was asked to. The page outlives the worker.
`faulthandler` writes the stack, even in a worker that is stuck in C code.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import tempfile

NOTHING = (1 << 64) - 1
_PAGE = 4096
_TEXT = 48  # the byte where the text begins
STACK_SIGNAL = signal.SIGUSR2  # makes a worker write its stack


def begin_request(words: memoryview, number: int) -> None:
    """In the worker: clear the words of its status at the start of a request."""
    words[0] = words[1] = words[2] = NOTHING
    words[3] = number


def read_status(words: memoryview) -> tuple[int | None, int | None, int, int]:
    """The stage, by its depth; the sample, by index and epoch; and the request. None: not recorded."""
    depth, index, epoch, number = words[:4].tolist()
    return None if depth == NOTHING else depth, None if index == NOTHING else index, epoch, number


class StatusPage:
    """The page, in an anonymous file: trainer and worker each map it through a descriptor of their own."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _PAGE)
        self.words = memoryview(self._page).cast("Q")
        self._read_to = _PAGE  # stacks in the file have been read up to this offset

    @classmethod
    def make(cls) -> StatusPage:
        """A new, empty page."""
        status = cls(anonymous_file("savable_pipeline status", _PAGE))
        begin_request(status.words, 0)
        return status

    def write_stacks(self) -> None:
        """In the worker: make `faulthandler` write the Python stack here at a crash, and at STACK_SIGNAL."""
        os.lseek(self.descriptor, _PAGE, os.SEEK_SET)
        faulthandler.enable(self.descriptor)
        faulthandler.register(STACK_SIGNAL, self.descriptor)

    def report(self, fault: str) -> None:
        """In the worker: record what is wrong with batches already given."""
        raw = fault.encode(errors="replace")[: _PAGE - _TEXT]
        self._page[_TEXT : _TEXT + len(raw)] = raw
        self.words[4] = len(raw)  # last: the text is whole

    def looked(self) -> None:
        """In the worker: record that it has looked, as requested, and reported its findings."""
        self.words[5] += 1

    @property
    def looks(self) -> int:
        """In the trainer: how often the worker has recorded that."""
        return int(self.words[5])

    def reported(self) -> str:
        """In the trainer, in any thread: what the worker recorded as wrong; "" if nothing."""
        try:
            length = self.words[4]
            return self._page[_TEXT : _TEXT + length].decode(errors="ignore") if length else ""
        except ValueError:  # the page was closed meanwhile
            return ""

    def holds_stack(self, outermost: str) -> bool:
        """Whether a new stack is written as far as the function `outermost`."""
        return f"in {outermost}\n".encode() in os.pread(self.descriptor, 1 << 16, self._read_to)

    def new_stack(self, outermost: str) -> str:
        """In the trainer: the stack, written since the last call, of the thread that runs the function `outermost`."""
        raw, self._read_to = os.pread(self.descriptor, 1 << 16, self._read_to), os.fstat(self.descriptor).st_size
        return _calls_within(outermost, raw.decode(errors="replace"))

    def close(self) -> None:
        """Unmap the page and close the descriptor; safe to call again."""
        if self.descriptor >= 0:
            self.words.release()
            self._page.close()
            descriptor, self.descriptor = self.descriptor, -1  # first, so that a Ctrl-C here cannot close it twice
            os.close(descriptor)


def _calls_within(outermost: str, stacks: str) -> str:
    """From the stacks of all threads, the calls inside the function `outermost`, the innermost first.

    Without such a thread, the first 2,000 characters of all stacks.
    """
    found: list[str] = []
    for line in stacks.splitlines():
        if line.startswith(("Current thread", "Thread")):
            found = []
        elif line.endswith(f"in {outermost}"):
            return "\n".join(["Stack, the innermost call first:", *found])
        else:
            found.append(line)
    return stacks[:2000]


def anonymous_file(name: str, size: int) -> int:
    """The descriptor of a file in memory that has no path, and is gone when its last descriptor is closed."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
