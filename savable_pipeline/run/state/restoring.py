"""`restoring`: the one place where whatever a damaged or forged state breaks becomes a `StateError`.

A checksum tells damage, not what was written on purpose or by a fault: then any line that reads a state may fail, in
the library, or in `restore_state` of a stage of the user's. What says itself what is wrong passes through unchanged,
and so does a fault of the environment: a disk, a server, memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from savable_pipeline.errors import EncodeError, SavableError, StateError


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Raises `StateError`, with the error that is its cause, where reading or restoring `what` fails in here.

    `SavableError`, OSError and MemoryError pass, but for an `EncodeError`: nothing is encoded when a state is restored,
    so it is about a number in the state.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SavableError | OSError | MemoryError) and not isinstance(error, EncodeError):
            raise
        raise StateError(
            f"{what} cannot be restored ({type(error).__name__}: {error}): it is damaged, or restore_state of a stage "
            "of your own does not take what its save_state gave; use another copy of the checkpoint"
        ) from error
