"""Detects trainers that use a bare loader wrongly, by the modules that call it.

Trainers that keep rank 0's state only, or that fetch ahead, are refused the state: their checkpoints would look
complete, and prove to lack lanes, or to be a batch late, only when they are needed. Trainers that save no state at all
cause a warning when they begin: with a user's callback that saves it, all is well.
"""

from __future__ import annotations

import inspect
import logging
from typing import NoReturn

from savable_pipeline.core.named_object import imported
from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.run import Run

log = logging.getLogger(__name__)

_LIGHTNING = "lightning.pytorch"
_KEEPS_ONE = "saves the state of rank 0 only"
_CURES = {  # by the calling module: whether one rank is refused too, what is wrong, and the cure
    "accelerate.checkpointing": (False, f"Accelerate {_KEEPS_ONE}", "savable_pipeline.trainers.accelerate.prepare"),
    "lightning.fabric.strategies": (False, f"Fabric {_KEEPS_ONE}", "savable_pipeline.trainers.fabric.prepare"),
    _LIGHTNING: (
        True,
        f"Lightning may have fetched a batch ahead and {_KEEPS_ONE}",
        "savable_pipeline.trainers.lightning.SavableDataModule",
    ),
}
_COMPOSER = (f"Composer {_KEEPS_ONE}", "savable_pipeline.trainers.composer.SavableData")


def refuse_trainer(caller: str, behind: str, world_size: int) -> None:
    """Raise `SavableError` if the module `caller` belongs to such a trainer, which cannot keep this many ranks.

    `behind` is the module that called into `caller`: Composer asks callbacks, which are the user's, and they ask us.
    """
    if world_size > 1 and (caller.startswith("composer.core.") or behind.startswith("composer.core.")):
        raise _refusal(*_COMPOSER)
    if not caller.startswith(("accelerate.", "lightning.", "pytorch_lightning.", "lightning_fabric.")):
        return
    for module, (always, why, cure) in _CURES.items():
        if _known(caller).startswith(module) and (always or world_size > 1):
            raise _refusal(why, cure)


def refuse_fetching_ahead(caller: str) -> None:
    """Raise `SavableError` if the module `caller` belongs to Lightning's Trainer, which fetches ahead.

    It also drops the saved state when it resumes from a checkpoint of an epoch's end.
    """
    if _known(caller).startswith(_LIGHTNING):
        _, why, cure = _CURES[_LIGHTNING]
        raise _refusal(why, cure)


def refuse_fit(caller: str) -> None:
    """Raise `SavableError` if the module `caller` is Lightning's, and iterates for `fit`: its first save would fail."""
    frame = inspect.currentframe() if _known(caller).startswith(_LIGHTNING) else None
    while frame is not None:
        module = _known(frame.f_globals.get("__name__", ""))
        if module.startswith(f"{_LIGHTNING}.loops.") and module.endswith("_loop"):  # else one for evaluation
            return refuse_fetching_ahead(caller) if module.endswith((".fit_loop", ".training_epoch_loop")) else None
        frame = frame.f_back
    return None


def _known(module: str) -> str:
    """The name in the package `lightning` of a module of one of the older packages."""
    return module.replace("pytorch_lightning.", "lightning.pytorch.").replace("lightning_fabric.", "lightning.fabric.")


def _refusal(why: str, cure: str) -> SavableError:
    return SavableError(f"{why}. Pass the result of {cure} instead of the loader.")


def warn_unsaved(caller: str, run: Run) -> None:
    """Warn if the module `caller`, which begins to iterate over a fresh loader, is of a trainer that saves none.

    Raise `SavableError` if it is Lightning's `fit`. A loader for evaluation needs no state, and one that has been
    loaded is saved by somebody.
    """
    refuse_fit(caller)
    at = run.position
    is_resumed = at.iterator == "loaded" or at.epoch or at.slot
    if is_resumed or run.settings.on_iter == "restart" or caller.startswith("savable_pipeline."):
        return
    if caller.startswith("transformers."):
        _warn("Hugging Face's Trainer", "Use savable_pipeline.trainers.hf.SavableTrainer(train_loader=...)")
    elif (state := imported("accelerate.state")) and state.is_initialized():
        _warn("an Accelerator", "Use savable_pipeline.trainers.accelerate.prepare(accelerator, loader)")


def _warn(what: str, cure: str) -> None:
    log.warning(
        "%s does not save the state of a SavableLoader, so a resumed run would restart at slot 0. %s, or save the "
        "state yourself.",
        *(what, cure),
    )


def refuse_dataset() -> NoReturn:
    """Raise AttributeError.

    Code that looks for a loader's dataset wants to skip batches of a resumed run.
    """
    raise AttributeError(
        "a SavableLoader has no dataset. Do not skip batches, because its state says where to resume (Hugging "
        "Face: ignore_data_skip=True)."
    )


def refuse_items() -> NoReturn:
    """Raise TypeError.

    Code that takes a loader's items by number takes it for a dataset.
    """
    raise TypeError(
        "a SavableLoader is no dataset. Iterate over it instead of a DataLoader, or use sp.StatefulDataset with "
        "torchdata."
    )


def refuse_samplers(*callers: str) -> None:
    """Raise TypeError if one of these modules, which ask for a length, is of torch's DataLoader."""
    if any(caller.startswith("torch.utils.data.") for caller in callers):
        refuse_items()


def caller(up: int = 0) -> str:
    """The module that called the function which calls this, or the one `up` frames above it; "" if there is none.

    Trainers ask each loader by the protocol that all loaders share, and offer no place to be asked what they keep of
    it. Without a look at who asks, a checkpoint without most lanes would be found out when it is needed: at the resume,
    perhaps days later. The look is one of a microsecond at each state, and decides nothing but whether to raise.
    """
    frame = inspect.currentframe()
    for _ in range(2 + up):
        frame = frame and frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
