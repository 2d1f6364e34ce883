"""The loop of a child process that waits for messages and stops when its parent process has ended.

A closed connection is no sure sign of that: other processes may have inherited the parent's end of it.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

_CHECK_S = 2.0  # interval at which the child checks that its parent still lives


def poll_while_parent_lives(poll: select.poll, parent: int) -> Iterator[list[tuple[int, int]]]:
    """The ready descriptors and their events, or an empty list every two seconds, until the process `parent` ends."""
    while os.getppid() == parent:
        yield poll.poll(_CHECK_S * 1000)
