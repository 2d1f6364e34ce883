"""Copies the tensors of a batch to page-locked memory, through torch's own caching allocator.

The allocator reuses a block only once copies from it, as by `tensor.to("cuda", non_blocking=True)`, are done.
"""

from __future__ import annotations

from typing import Any

from savable_pipeline.core.containers import with_parts_changed


def pinned(batch: Any) -> Any:
    """The batch with its tensors in page-locked memory, so that copies to a GPU do not wait; itself without a GPU."""
    import torch

    return _pinned(batch, torch.Tensor) if torch.cuda.is_available() else batch


def _pinned(value: Any, tensor: type) -> Any:
    if isinstance(value, tensor):
        return value.pin_memory()  # type: ignore[attr-defined]
    return with_parts_changed(value, lambda part: _pinned(part, tensor))
