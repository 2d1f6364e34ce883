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
_KEEPS_ONE = "keeps the state of rank 0 only, and the other lanes would be missing at the resume"
_CURES = {  # by the calling module: whether one rank is refused too, what is wrong, and the cure
    "accelerate.checkpointing": (False, f"Accelerate {_KEEPS_ONE}", "savable_pipeline.trainers.accelerate.prepare"),
    "lightning.fabric.strategies": (False, f"Fabric {_KEEPS_ONE}", "savable_pipeline.trainers.fabric.prepare"),
    _LIGHTNING: (
        True,
        f"Lightning may have fetched a batch ahead, and {_KEEPS_ONE}",
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


def _known(module: str) -> str:
    """The name in the package `lightning` of a module of one of the older packages."""
    return module.replace("pytorch_lightning.", "lightning.pytorch.").replace("lightning_fabric.", "lightning.fabric.")


def _refusal(why: str, cure: str) -> SavableError:
    return SavableError(f"{why}: give it what {cure} makes, in the place of the loader")


def warn_unsaved(caller: str, run: Run) -> None:
    """Warn if the module `caller`, which begins to iterate over a fresh loader, is of a trainer that saves none.

    A loader for evaluation needs no state, and one that has been loaded is saved by somebody.
    """
    at = run.position
    if at.loaded or at.epoch or at.slot or run.settings.on_iter == "restart" or caller.startswith("savable_pipeline."):
        return
    if caller.startswith("transformers."):
        _warn(
            "Hugging Face's Trainer iterates over",
            "Give it to savable_pipeline.trainers.hf.SavableTrainer(train_loader=…), which saves it",
        )
    elif (state := imported("accelerate.state")) and state.is_initialized():
        _warn(
            "there is an Accelerator, whose save_state does not save loaders, and a loop that iterates over",
            "Iterate over what savable_pipeline.trainers.accelerate.prepare(accelerator, loader) returns",
        )


def _warn(what: str, cure: str) -> None:
    log.warning(
        "%s a bare SavableLoader, whose state is in no checkpoint: a resumed run would silently begin at slot 0 "
        "again. %s; if you save and load its state yourself, all is well",
        what,
        cure,
    )


def refuse_dataset() -> NoReturn:
    """Raise AttributeError: code that looks for a loader's dataset wants to skip batches of a resumed run."""
    raise AttributeError(
        "a SavableLoader has no dataset, and needs no skip_first_batches or the like: its saved state says where to "
        "continue. Leave the skipping out (Hugging Face Trainer: ignore_data_skip=True)"
    )


def refuse_items() -> NoReturn:
    """Raise TypeError: code that takes a loader's items by number takes it for a dataset."""
    raise TypeError(
        "a SavableLoader has no items by number: it takes the place of torch's DataLoader, so iterate over it itself; "
        "for torchdata's StatefulDataLoader there is sp.StatefulDataset"
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
