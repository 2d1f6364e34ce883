"""Errors and warnings about wrong uses of a loader.

Processes must not share a loader: each of N workers, or a fork and its parent, would get the same batches.

Some trainers lose the loader's state. They are detected by the module that calls the loader. A trainer that saves only
rank 0's state, or that fetches ahead, gets an error instead of the state. Its checkpoints would look complete, but lack
lanes or be a batch late. A trainer that saves no state causes only a warning, because a callback of the user may save
it.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import NoReturn
from weakref import WeakSet

from savable_pipeline.core.named_object import imported
from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.position import Position

log = logging.getLogger(__name__)


class IterationGuard:
    """Checks that the process that created a loader uses it, one thread at a time.

    `ranked`: whether rank and world size were passed as numbers. `thread` has the "id" of the thread that uses the
    loader now, if any. `checked`: whether the loader has checked that it may iterate in this process.
    """

    def __init__(self, *, ranked: bool) -> None:
        self._pid = os.getpid()
        self._ranked = ranked
        self.checked = False
        self.thread: dict[str, int] = {}
        _guards.add(self)

    def claim(self) -> None:
        """Reserve the loader for this thread.

        Raises `SavableError` if another thread has reserved it.
        """
        own_id = get_ident()
        if self.thread.setdefault("id", own_id) != own_id:
            raise SavableError(
                "two threads use one loader. Use one thread, or a lock. Only state_dict() may be called from any "
                "thread."
            )

    def release(self) -> None:
        """Let other threads use the loader, if this thread has reserved it."""
        if self.thread.get("id") == get_ident():
            self.thread.clear()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Reserve the loader within this context."""
        try:
            self.claim()
            yield
        finally:
            self.release()

    def check(self) -> None:
        """Raise `SavableError` if this process must not use the loader.

        It must be the process that created it, and no worker of torch's DataLoader without a rank of its own.
        """
        worker = _torch_worker()
        if os.getpid() == self._pid:
            if worker and not self._ranked:
                raise SavableError(
                    f"this loader was created in {worker}, each of which would yield every batch. {_ALTERNATIVES}, or "
                    "pass ranks=(get_worker_info().id, get_worker_info().num_workers)."
                )
            return
        if worker:
            raise SavableError(
                f"this loader was created outside of {worker}, each of which would yield every batch. {_ALTERNATIVES}."
            )
        raise SavableError(
            f"this loader was created in process {self._pid} but is used in its fork {os.getpid()}. Create it in "
            "the process that uses it, and call load_state_dict."
        )


_guards: WeakSet[IterationGuard] = WeakSet()


def _recheck_guards() -> None:
    for guard in _guards:
        guard.checked = False


os.register_at_fork(after_in_child=_recheck_guards)

_ALTERNATIVES = (
    "Iterate over the loader in the trainer's process, or use sp.StatefulDataset with torchdata's StatefulDataLoader"
)


def _torch_worker() -> str:
    """If this process is a worker of torch's DataLoader, return words that name it, else ""."""
    module = imported("torch.utils.data._utils.worker")
    info = module and module.get_worker_info()
    return f"worker {info.id} of the {info.num_workers} of torch's DataLoader" if info else ""


def warn_unloaded() -> None:
    """Warn if a job was restarted. The caller's loader has loaded no state."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if (count := os.environ.get(name, "0")) not in ("", "0"):
            log.warning(
                "%s=%s: this job was restarted, but the loader starts at the first batch. If a state was saved, "
                "call load_state_dict first.",
                *(name, count),
            )


_LIGHTNING = "lightning.pytorch"
_SAVES_RANK_0 = "saves the state of rank 0 only"
_FIXES = {  # by start of the calling module's name: whether a single rank is rejected too, problem, and solution
    "accelerate.checkpointing": (False, f"Accelerate {_SAVES_RANK_0}", "savable_pipeline.trainers.accelerate.prepare"),
    "lightning.fabric.strategies": (False, f"Fabric {_SAVES_RANK_0}", "savable_pipeline.trainers.fabric.setup_loader"),
    _LIGHTNING: (
        True,
        f"Lightning may have fetched a batch ahead and {_SAVES_RANK_0}",
        "savable_pipeline.trainers.lightning.SavableDataModule",
    ),
}
_COMPOSER = (f"Composer {_SAVES_RANK_0}", "savable_pipeline.trainers.composer.SavableData")


def reject_trainer(caller: str, outer_caller: str, world_size: int) -> None:
    """Raise `SavableError` if a trainer that loses states asks for the state.

    `caller` is the module that asks for the state, and `outer_caller` the module that called it: Composer calls a
    callback of the user, which asks for the state.
    """
    if world_size > 1 and (caller.startswith("composer.core.") or outer_caller.startswith("composer.core.")):
        raise _trainer_error(*_COMPOSER)
    if not caller.startswith(("accelerate.", "lightning.", "pytorch_lightning.", "lightning_fabric.")):
        return
    for module, (rejects_single_rank, why, fix) in _FIXES.items():
        if _modern_name(caller).startswith(module) and (rejects_single_rank or world_size > 1):
            raise _trainer_error(why, fix)


def reject_fetching_ahead(caller: str) -> None:
    """Raise `SavableError` if Lightning's Trainer, which fetches ahead, is calling.

    `caller` is the module that calls. That trainer also drops the saved state when it resumes from a checkpoint of an
    epoch's end.
    """
    if _modern_name(caller).startswith(_LIGHTNING):
        _, why, fix = _FIXES[_LIGHTNING]
        raise _trainer_error(why, fix)


def reject_fit(caller: str) -> None:
    """Raise `SavableError` if Lightning's `fit` iterates.

    Its first checkpoint would fail.
    """
    frame = inspect.currentframe() if _modern_name(caller).startswith(_LIGHTNING) else None
    while frame is not None:
        module = _modern_name(frame.f_globals.get("__name__", ""))
        if module.startswith(f"{_LIGHTNING}.loops.") and module.endswith("_loop"):  # other loops are for evaluation
            return reject_fetching_ahead(caller) if module.endswith((".fit_loop", ".training_epoch_loop")) else None
        frame = frame.f_back
    return None


def _modern_name(module: str) -> str:
    """Return the current name of a module of Lightning's older packages."""
    return module.replace("pytorch_lightning.", "lightning.pytorch.").replace("lightning_fabric.", "lightning.fabric.")


def _trainer_error(why: str, fix: str) -> SavableError:
    return SavableError(f"{why}. Pass the result of {fix} instead of the loader.")


def warn_unsaved(caller: str, position: Position, *, restarts_on_iter: bool) -> None:
    """Warn if a trainer that does not save the loader's state starts to iterate.

    `caller` is the module that calls `iter`. Raises `SavableError` for Lightning's `fit`. There is no warning for a
    loader with on_iter="restart", because evaluation needs no state, or one that has loaded a state, because something
    has saved it.
    """
    reject_fit(caller)
    is_resumed = position.iterator == "loaded" or position.epoch or position.slot
    if is_resumed or restarts_on_iter or caller.startswith("savable_pipeline."):
        return
    if caller.startswith("transformers."):
        _warn_unsaved_by("Hugging Face's Trainer", "Use savable_pipeline.trainers.hf.SavableTrainer(train_loader=...)")
    elif (state := imported("accelerate.state")) and state.is_initialized():
        _warn_unsaved_by("an Accelerator", "Use savable_pipeline.trainers.accelerate.prepare(accelerator, loader)")


def _warn_unsaved_by(trainer: str, fix: str) -> None:
    log.warning(
        "%s does not save the state of a SavableLoader, so a resumed run would restart at slot 0. %s, or save the "
        "state yourself.",
        *(trainer, fix),
    )


def reject_dataset() -> NoReturn:
    """Raise AttributeError for `loader.dataset`, of which trainers skip batches."""
    raise AttributeError(
        "a SavableLoader has no dataset. Do not skip batches, because its state says where to resume (Hugging "
        "Face: ignore_data_skip=True)."
    )


def reject_items() -> NoReturn:
    """Raise TypeError for a caller that uses the loader as a dataset.

    Such a caller is torch's DataLoader.
    """
    raise TypeError(
        "a SavableLoader is no dataset. Iterate over it instead of a DataLoader, or use sp.StatefulDataset with "
        "torchdata."
    )


def reject_samplers(*callers: str) -> None:
    """Raise TypeError if a sampler of torch asks for the loader's length.

    `callers` are the modules that ask.
    """
    if any(caller.startswith("torch.utils.data.") for caller in callers):
        reject_items()


def caller(up: int = 0) -> str:
    """Return the module that called the calling function, or "".

    `up` selects a frame that many calls higher. By it, trainers that lose states are detected, because no protocol says
    what they save. Otherwise a checkpoint that lacks most lanes would only be noticed when it is loaded, perhaps days
    later. This takes a microsecond for each state and only decides whether to raise.
    """
    frame = inspect.currentframe()
    for _ in range(2 + up):
        frame = frame and frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
