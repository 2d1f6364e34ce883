"""`restoring`: the one place where the errors of a damaged or forged state become a `StateError`.

A checksum detects damage, but not a state written wrongly, by intent or by a fault: then any line that reads it may
fail, in the library or in `restore_state` of a user's stage. Errors that already say what is wrong pass through
unchanged, and so do faults of the environment: a disk, a server, memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from savable_pipeline.errors import EncodeError, SavableError, StateError


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Raise `StateError`, with the original error as its cause, where reading or restoring `what` fails in here.

    `SavableError`, OSError and MemoryError pass, except an `EncodeError`: nothing is encoded when a state is restored,
    so its cause is a number in the state.
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
