"""Drop-in replacement for Megatron-Energon, with exact resume.

    from savable_pipeline.energon import WorkerConfig, get_savable_loader, get_train_dataset

A `TaskEncoder` of Energon runs unchanged. `FromEnergon` makes it an `sp.TaskEncoder` for your own pipeline. This needs
the extra `energon`. Without it, the first use of a name raises ImportError.
"""

from __future__ import annotations

from typing import Any

from savable_pipeline.public_names import public_names

__all__, _import_name = public_names(__name__)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, or raise ImportError without Energon."""
    try:
        return _import_name(name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("megatron"):
            raise
        fix = "Run pip install megatron-energon."
        raise ImportError(f"savable_pipeline.energon.{name} needs Megatron-Energon. {fix}") from error
