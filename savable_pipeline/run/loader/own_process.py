"""Where a loader may be iterated: in the process that made it; in a worker of torch's DataLoader if it knows its share.

Otherwise each of N workers, or a forked process and its parent, would yield the same batches.
"""

from __future__ import annotations

import os
import sys
from weakref import WeakSet

from savable_pipeline.errors import SavableError


class OwnProcess:
    """The process in which this was made. `ranked`: whether rank and world size were given as numbers there.

    `checked` records that the loader may iterate here, so that nothing is checked at each batch; it is False
    again in a forked process.
    """

    def __init__(self, *, ranked: bool) -> None:
        self._pid = os.getpid()
        self._ranked = ranked
        self.checked = False
        _known.add(self)

    def check(self) -> None:
        """Raise `SavableError` in another process, and in a worker that does not know its share."""
        worker = _torch_worker()
        if os.getpid() == self._pid:
            if worker and not self._ranked:
                raise SavableError(
                    f"this loader was made in {worker}, each of which would yield every batch: {_INSTEAD}, or give "
                    "each worker its share: rank=get_worker_info().id, world_size=get_worker_info().num_workers"
                )
            return
        if worker:
            raise SavableError(
                f"this loader was made in another process than {worker}, each of which would yield every batch: "
                f"{_INSTEAD}"
            )
        raise SavableError(
            f"this loader was made in process {self._pid} and is iterated in process {os.getpid()}, forked from it: "
            "both would yield the same batches, and a state of the one does not cover the other's. Make the loader in "
            "the process that iterates over it; load_state_dict takes it to where another one was"
        )


_known: WeakSet[OwnProcess] = WeakSet()


def _check_again() -> None:
    for each in _known:
        each.checked = False


os.register_at_fork(after_in_child=_check_again)

_INSTEAD = (
    "iterate over the loader itself in the trainer's process (it has workers of its own, num_workers=), or give "
    "torchdata's StatefulDataLoader a sp.StatefulDataset"
)


def _torch_worker() -> str:
    """Which worker of torch's DataLoader this process is; "" for any other process."""
    module = sys.modules.get("torch.utils.data._utils.worker")
    info = module and module.get_worker_info()
    return f"worker {info.id} of the {info.num_workers} of torch's DataLoader" if info else ""
