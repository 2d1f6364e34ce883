"""`Element`: what flows from stage to stage: a ref, the sizes of what it names, and its value once that is made.

ref    (7, 0, 0)      (3, (7, 0, 0), (9, 0, 0))     what a state keeps of it: see item_ref.py
sizes  ((700, 1),)    ((700, 1), (324, 0))          (length, images) of each item, where they are known
value  an item        a pack, or UNMADE             made again from the ref when it is needed

Stages hold and reorder elements without looking at the value. Samples, which nobody has read yet, flow in an array of
refs alone (`RefArray`): a buffer of 10,000 is in each state, and copied as bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from savable_pipeline.stages.cost import Size
from savable_pipeline.stages.item_ref import ItemRef

UNMADE: Any = msgspec.UNSET  # in place of a value


class Element(msgspec.Struct, gc=False):
    """An element on its way through a lane. `held_bytes`: of its value, as counted in the memory budget."""

    ref: ItemRef
    value: Any = UNMADE
    sizes: tuple[Size, ...] | None = None
    held_bytes: int = 0

    @property
    def is_made(self) -> bool:
        """Whether its value is in memory."""
        return self.value is not UNMADE
