"""`StatusPage`: memory where a worker records its work, for crash reports.

    word 0 │ 1     │ 2     │ 3       │ 4      │ 5      │ …    from byte 4096 on: the Python stack, written when the
    depth  │ index │ epoch │ request │ length │ checks │ text     worker crashes or receives STACK_SIGNAL

`depth` is the number of stages before the running one. `index` and `epoch` identify the sample being encoded. `request`
is the number of the request in progress. `text`, of `length` bytes, names a shard that changed after batches were read
from it. `checks` counts how often the worker has looked for such shards on request. The page outlives the worker.
`faulthandler` writes the stack, even in a worker that is stuck in C code.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import tempfile

_NOTHING = (1 << 64) - 1
_PAGE = 4096
_DEPTH, _INDEX, _EPOCH, _REQUEST, _LENGTH, _CHECKS = range(6)  # positions of the words
_TEXT_START = 48  # the byte where the text starts
STACK_SIGNAL = signal.SIGUSR2  # makes a worker write its stack


def start_request(words: memoryview, number: int) -> None:
    """Clear the words of a worker's status at the start of a request."""
    words[_DEPTH] = words[_INDEX] = words[_EPOCH] = _NOTHING
    words[_REQUEST] = number


def read_status(words: memoryview) -> tuple[int | None, int | None, int, int]:
    """Return the fields of a `WorkerStatus`.

    They are the depth of the stage, the index of the sample, its epoch, and the number of the request. The depth and
    the index are None if they are not recorded.
    """
    depth, index, epoch, request = words[:_LENGTH].tolist()
    return None if depth == _NOTHING else depth, None if index == _NOTHING else index, epoch, request


class StatusPage:
    """Page in an anonymous file that trainer and worker map by their own descriptors.

    The worker calls `write_stacks`, `report` and `count_check`, the trainer the other methods.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _PAGE)
        self.words = memoryview(self._page).cast("Q")  # the page as 64-bit words, for those before the text
        self._read_to = _PAGE  # offset in the file up to which `new_stack` has read

    @classmethod
    def create(cls) -> StatusPage:
        """Create an empty page."""
        status = cls(anonymous_file("savable_pipeline status", _PAGE))
        start_request(status.words, 0)
        return status

    def write_stacks(self) -> None:
        """Have `faulthandler` write the stack here at a crash and at STACK_SIGNAL."""
        os.lseek(self.descriptor, _PAGE, os.SEEK_SET)
        faulthandler.enable(self.descriptor)
        faulthandler.register(STACK_SIGNAL, self.descriptor)

    def report(self, problem: str) -> None:
        """Record a message about a changed shard."""
        raw = problem.encode(errors="replace")[: _PAGE - _TEXT_START]
        self._page[_TEXT_START : _TEXT_START + len(raw)] = raw
        self.words[_LENGTH] = len(raw)  # written last, so that a reader sees the whole text

    def count_check(self) -> None:
        """Record that the worker has looked for changed shards on request."""
        self.words[_CHECKS] += 1

    @property
    def checks(self) -> int:
        """Number of checks that the worker has recorded."""
        return int(self.words[_CHECKS])

    def reported(self) -> str:
        """Return the message that the worker reported, or "". Any thread may call this."""
        try:
            length = self.words[_LENGTH]
            return self._page[_TEXT_START : _TEXT_START + length].decode(errors="ignore") if length else ""
        except ValueError:  # the page was closed in the meantime
            return ""

    def has_stack(self, outermost: str) -> bool:
        """Return whether a new stack is complete down to the function `outermost`.

        New means written since the last `new_stack`.
        """
        return f"in {outermost}\n".encode() in os.pread(self.descriptor, 1 << 16, self._read_to)

    def new_stack(self, outermost: str) -> str:
        """Return the stack of the thread that runs the function `outermost`.

        Only stacks that were written since the last call are searched.
        """
        raw, self._read_to = os.pread(self.descriptor, 1 << 16, self._read_to), os.fstat(self.descriptor).st_size
        return _calls_within(outermost, raw.decode(errors="replace"))

    def close(self) -> None:
        """Unmap the page and close the descriptor. Later calls do nothing."""
        if self.descriptor >= 0:
            self.words.release()
            self._page.close()
            descriptor, self.descriptor = self.descriptor, -1  # before `close`, so that a Ctrl-C cannot close it twice
            os.close(descriptor)


def _calls_within(outermost: str, stacks: str) -> str:
    """Return the calls inside the function `outermost`, the innermost first.

    `stacks` has the stacks of all threads, as `faulthandler` writes them. If no thread runs the function, the result is
    their first 2,000 characters.
    """
    calls: list[str] = []
    for line in stacks.splitlines():
        if line.startswith(("Current thread", "Thread")):
            calls = []
        elif line.endswith(f"in {outermost}"):
            return "\n".join(["Stack, the innermost call first:", *calls])
        else:
            calls.append(line)
    return stacks[:2000]


def anonymous_file(name: str, size: int) -> int:
    """Create a file in memory without a path, and return its descriptor.

    The file exists until its last descriptor is closed.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
