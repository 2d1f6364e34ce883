"""Drop-in replacement for Megatron-Energon, with exact resume.

    from savable_pipeline.energon import WorkerConfig, get_savable_loader, get_train_dataset

A `TaskEncoder` of Energon runs unchanged. `FromEnergon` makes it an `sp.TaskEncoder` for your own pipeline. This needs
the extra `energon`. Without it, the first use of a name raises ImportError.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.energon import WorkerConfig

    from savable_pipeline.trainers.energon.dataset import (
        AtShare,
        EnergonDataset,
        LimitDataset,
        RepeatDataset,
        begin_at_share,
        get_train_dataset,
        get_val_dataset,
        get_val_datasets,
    )
    from savable_pipeline.trainers.energon.encoder import FromEnergon
    from savable_pipeline.trainers.energon.loader import EnergonLoader, get_loader, get_savable_loader

__all__ = [
    "AtShare",
    "EnergonDataset",
    "EnergonLoader",
    "FromEnergon",
    "LimitDataset",
    "RepeatDataset",
    "WorkerConfig",
    "begin_at_share",
    "get_loader",
    "get_savable_loader",
    "get_train_dataset",
    "get_val_dataset",
    "get_val_datasets",
]

_MODULES = {
    "FromEnergon": "encoder",
    "EnergonLoader": "loader",
    "get_loader": "loader",
    "get_savable_loader": "loader",
    "WorkerConfig": "methods",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, or raise ImportError without Energon."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"savable_pipeline.trainers.energon.{_MODULES.get(name, 'dataset')}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("megatron"):
            raise
        raise ImportError(
            f"savable_pipeline.energon.{name} needs Megatron-Energon. Run pip install megatron-energon."
        ) from error
    return getattr(module, name)
