"""Refuses to give a bare loader's state to trainers that keep rank 0's only, or that fetch ahead of it.

Their checkpoints would look whole, and be found to lack lanes, or to be a batch late, when they are needed.
"""

from __future__ import annotations

from types import FrameType

from savable_pipeline.errors import SavableError

_LIGHTNING = "lightning.pytorch"
_KEEPS_ONE = "keeps the state of rank 0 only, and the other lanes would be missing at the resume"
_CURES = {  # by the module that asks: whether one rank is refused too, what is wrong, and the cure
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
    """Raise `SavableError` if the module `caller` belongs to Lightning's Trainer, which fetches ahead of a `Whole`.

    It also drops what it saved, where it resumes from a checkpoint of an epoch's end.
    """
    if _known(caller).startswith(_LIGHTNING):
        _, why, cure = _CURES[_LIGHTNING]
        raise _refusal(why, cure)


def _known(module: str) -> str:
    """The name in the package `lightning` of a module that lies in one of the older packages."""
    return module.replace("pytorch_lightning.", "lightning.pytorch.").replace("lightning_fabric.", "lightning.fabric.")


def module_of(frame: FrameType | None) -> str:
    """The name of the module whose code runs in this frame."""
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _refusal(why: str, cure: str) -> SavableError:
    return SavableError(f"{why}: give it what {cure} makes, in the place of the loader")
