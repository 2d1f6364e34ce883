"""Where a loader may be iterated: in the process that made it, or a worker of torch's DataLoader that knows its share.

Otherwise each of N workers, or a forked process and its parent, would yield the same batches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from weakref import WeakSet

from savable_pipeline.core.named_object import imported
from savable_pipeline.errors import SavableError

log = logging.getLogger(__name__)


class OwnProcess:
    """The process in which this was made.

    `ranked`: whether rank and world size were given as numbers there.

    One thread at a time moves the loader: `thread` holds its "id" meanwhile.

    `checked` is for a loader to note that it may iterate here, so that nothing is asked at each batch; it is False
    again in a forked process.
    """

    def __init__(self, *, ranked: bool) -> None:
        self._pid = os.getpid()
        self._ranked = ranked
        self.checked = False
        self.thread: dict[str, int] = {}
        _known.add(self)

    def claim(self) -> None:
        """Note this thread as the one that moves the loader.

        Raises `SavableError` if another one does.
        """
        this = get_ident()
        if self.thread.setdefault("id", this) != this:
            raise SavableError(
                "two threads use one loader. Use one thread, or a lock. Only state_dict() may be called from any "
                "thread."
            )

    def release(self) -> None:
        """Let other threads move the loader, if this one may."""
        if self.thread.get("id") == get_ident():
            self.thread.clear()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Claim the loader, and release it at the end."""
        try:
            self.claim()
            yield
        finally:
            self.release()

    def check(self) -> None:
        """Raise `SavableError` in another process, and in a worker that does not know its share."""
        worker = _torch_worker()
        if os.getpid() == self._pid:
            if worker and not self._ranked:
                raise SavableError(
                    f"this loader was created in {worker}, each of which would yield every batch. {_INSTEAD}, or "
                    "pass ranks=(get_worker_info().id, get_worker_info().num_workers)."
                )
            return
        if worker:
            raise SavableError(
                f"this loader was created outside of {worker}, each of which would yield every batch. {_INSTEAD}."
            )
        raise SavableError(
            f"this loader was created in process {self._pid} but is used in its fork {os.getpid()}. Create it in "
            "the process that uses it, and call load_state_dict."
        )


_known: WeakSet[OwnProcess] = WeakSet()


def _check_again() -> None:
    for each in _known:
        each.checked = False


os.register_at_fork(after_in_child=_check_again)

_INSTEAD = (
    "Iterate over the loader in the trainer's process, or use sp.StatefulDataset with torchdata's StatefulDataLoader"
)


def _torch_worker() -> str:
    """Which worker of torch's DataLoader this process is; "" for any other process."""
    module = imported("torch.utils.data._utils.worker")
    info = module and module.get_worker_info()
    return f"worker {info.id} of the {info.num_workers} of torch's DataLoader" if info else ""


def warn_unloaded() -> None:
    """Warn if a job that was restarted begins a loader at its first batch.

    Its state was not loaded.
    """
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if (count := os.environ.get(name, "0")) not in ("", "0"):
            log.warning(
                "%s=%s: this job was restarted, but the loader starts at the first batch. If a state was saved, "
                "call load_state_dict first.",
                name,
                count,
            )
