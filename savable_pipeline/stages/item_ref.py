"""`ItemRef`: nested tuples of integers that identify an item, pack or batch.

`Element` is such a ref with the sizes and the value that belong to it.

    item      (index, epoch, part)         its sample's index in the dataset and epoch; the part's number in a fan-out
    cut item  (ItemRef, start, stop)       the tokens from start to stop - 1 of an item
    pack      (number, ItemRef, …)         the number of the pack in its lane, then the refs of its items
    batch     (number, ItemRef, …)         the number of the batch in its lane, then the refs of its items or packs

Stages exchange elements. An element is a ref, the sizes of its items, and its value once it is built:

    ref    (7, 0, 0)      (3, (7, 0, 0), (9, 0, 0))     saved in a state
    sizes  ((700, 1),)    ((700, 1), (324, 0))          (length, images) of each item, if known
    value  an item        a pack, or UNBUILT             rebuilt from the ref when it is needed

Stages buffer and reorder elements without looking at the value. Samples that were not read yet are exchanged as an
array of refs (`RefArray`), because each state may have a buffer of 10,000 of them, and copies an array as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import msgspec

from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.cost import Size

ItemRef: TypeAlias = tuple[Any, ...]
"""The ref of an item, a pack or a batch: `stage.fetch(ref)` rebuilds it. See the table above."""
SizeT = TypeVar("SizeT")
UNBUILT: Any = msgspec.UNSET  # placeholder for a value that is not built


def as_ref(ref: Any) -> ItemRef:
    """Convert a ref to nested tuples, from the nested lists of a saved state.

    Args:
        ref: The ref, as lists or tuples.

    Raises:
        CheckpointMismatchError: `ref` is not numbers in nested lists or tuples.

    Example:
        >>> custom.as_ref([[3, 0, 0], 0, 16])  # tokens 0 to 15 of the item of sample 3
        ((3, 0, 0), 0, 16)
    """
    if not isinstance(ref, list | tuple) or not ref:
        raise CheckpointMismatchError(f"the state has {ref!r} instead of an item. Use another copy of the checkpoint.")
    return tuple(part if hasattr(part, "__index__") else as_ref(part) for part in ref)


def remaining_sizes(sizes: tuple[SizeT, ...] | None, ref: ItemRef, rest: ItemRef) -> tuple[SizeT, ...] | None:
    """Return the sizes of the items that remain in a pack, or None if unknown.

    `sizes` has the sizes of all items of the pack `ref`. `rest` is the ref of the pack without the lost items.
    """
    if rest == ref or sizes is None:
        return sizes
    if len(sizes) != len(ref) - 1:
        return None
    return tuple(size for item, size in zip(ref[1:], sizes, strict=True) if item in rest[1:])


def without(ref: ItemRef, is_gone: Callable[[int], bool]) -> ItemRef | None:
    """Return the ref of an item or pack without the samples that are gone.

    These are the samples for which `is_gone(index)` is True. The result is None if nothing remains. A ref in the form
    of a user's own stage is returned unchanged, or is None if one of its samples is gone.
    """
    inner = [part for part in ref if isinstance(part, tuple)]
    if not inner:
        return None if is_gone(ref[0]) else ref  # (index, epoch, part)
    parts = [without(part, is_gone) for part in inner]
    if parts == inner:
        return ref
    is_pack = not isinstance(ref[0], tuple) and len(inner) == len(ref) - 1
    present = [part for part in parts if part is not None]
    return (ref[0], *present) if is_pack and present else None


def batch_rows(ref: ItemRef) -> tuple[ItemRef, ItemRef]:
    """Return (number,) of a batch, and the refs of its rows.

    The first tuple is empty for the batch of a user's own stage that has no number.
    """
    number = ref[:1] if ref and type(ref[0]) is int else ()
    return number, ref[len(number) :]


def sample_refs(ref: ItemRef) -> Iterator[ItemRef]:
    """Yield (index, epoch, part) of each sample in an item, a pack or a batch."""
    inner = [part for part in ref if isinstance(part, tuple)]
    if not inner:
        yield ref
    for part in inner:
        yield from (part,) if {*map(type, part)} == {int} else sample_refs(part)  # no recursion for a sample's ref


def sample_indices(ref: ItemRef) -> Iterator[int]:
    """Yield the index of each sample in an item, a pack or a batch."""
    return (sample_ref[0] for sample_ref in sample_refs(ref))


class Element(msgspec.Struct, gc=False):
    """Ref, sizes and value of an item, a pack or a batch.

    `counted_bytes` is how many bytes of the memory budget the value takes. `measured` is (encoder, length) after
    `encoder.length(value)` was called, so that no later stage calls it again.
    """

    ref: ItemRef
    value: Any = UNBUILT
    sizes: tuple[Size, ...] | None = None
    counted_bytes: int = 0
    measured: tuple[Any, int] | None = None

    @property
    def is_built(self) -> bool:
        """Return whether the value is in memory."""
        return self.value is not UNBUILT
