"""Whether this process may be killed: a worker is started again where it was, a trainer's own process is not.

Reading behind the end of a memory-mapped file that was cut short kills the process (SIGBUS). So users' files are mapped
only in processes that are replaced, and read elsewhere.
"""

from __future__ import annotations

_replaced = False


def become_replaced() -> None:
    """From now on this process, and those forked from it, count as one that is started again when it is killed."""
    global _replaced
    _replaced = True


def is_replaced() -> bool:
    """Whether this process is started again when it is killed."""
    return _replaced
