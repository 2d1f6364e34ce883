"""The descriptors that a process keeps open for its datasets: limited together, and closed when none is left.

Half of what the system permits a process (`ulimit -n`) is for all its datasets; the other half is for its encoders and
workers and for other uses. A process that has run out of descriptors has a fault of its environment, never of
its data: no policy skips a sample because of it.
"""

from __future__ import annotations

import errno
import resource
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from savable_pipeline.errors import SavableError

T = TypeVar("T")


class Keeper(Protocol):
    """Keeps descriptors open, and can open each again."""

    def __len__(self) -> int: ...
    def close_oldest(self) -> None:
        """Close the descriptor that has been open for longest; there is at least one."""


_keepers: list[weakref.ref[Keeper]] = []


def register(keeper: Keeper) -> None:
    """Count the descriptors of `keeper`, as long as it exists, among those of the process."""
    _keepers[:] = [known for known in _keepers if known() is not None]
    _keepers.append(weakref.ref(keeper))


def most_kept() -> int:
    """How many descriptors all datasets of this process may keep open together."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(1, soft // 2)


def keep_below(limit: int) -> None:
    """Close descriptors, of the keeper that has the most, until all together keep at most `limit`."""
    keepers = [keeper for known in _keepers if (keeper := known()) is not None]
    excess = sum(map(len, keepers)) - limit
    for _ in range(excess):
        max(keepers, key=len).close_oldest()


def is_out_of_handles(error: BaseException) -> bool:
    """Whether an error says that this process, or the system, has no descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def with_handles(act: Callable[[], T]) -> T:
    """Return what `act` returns; if it runs out of descriptors, close those of datasets and try again.

    Raises `SavableError` if there is none to close, and what `act` raises.
    """
    while True:
        try:
            return act()
        except OSError as error:
            if not is_out_of_handles(error):
                raise
            kept = any(known() for known in _keepers)  # those that keep none are false
            if not kept:
                raise _none_left(error) from error
        keep_below(0)


def _none_left(error: OSError) -> SavableError:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SavableError(
        f"{error.filename or 'a file'}: {error.strerror}: this process may have {soft} files open, and they are in use "
        "elsewhere; see that the pipeline closes its own files, or raise the limit (ulimit -n)"
    )
