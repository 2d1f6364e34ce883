"""`ORDER` and `STATE`: the two numbers that a saved state has in common with the code that loads it, or is refused.

`ORDER` is of all that decides an order of data: the orders of readers, the draws of subsets, the turns of sources, the
policies of packs, the groups of batches, the random crops. `STATE` is of what a state holds, and of how it is written.
A change of either adds 1 to its number and, in `LAST_COMMITS`, the commit before it.

`SavedCount` is the type of a number in a state: within the range of the arithmetic of orders and random numbers.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, TypeAlias

import msgspec

from savable_pipeline.errors import StateError

SavedCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
EpochNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # as a ref holds it

ORDER = 4
STATE = 6
LAST_COMMITS: dict[tuple[Any, Any], str] = {  # that read states of other (ORDER, STATE); the first had no ORDER
    (None, None): "d039fef",
    (None, 1): "d039fef",
    (3, 2): "6862a8c",
    (4, 3): "163f8f3",
    (4, 4): "fc1e073",
    (4, 5): "dece9b5",
}


def check_numbers(name: str, order: Any, state: Any) -> None:
    """Raise `StateError` unless what is called `name` was saved with these two numbers; None where it has no such."""
    if type(order) is type(state) is int and (order, state) == (ORDER, STATE):
        return
    saved = [reprlib.repr(number).replace("None", "none") for number in (order, state)]
    commit = next(
        (f"commit {LAST_COMMITS[pair]}" for pair in LAST_COMMITS if pair == (order, state)), "its own release"
    )
    raise StateError(
        f"{name}: saved with ORDER {saved[0]} and STATE {saved[1]}, but this release reads ORDER {ORDER} and STATE "
        f"{STATE}. Load it with {commit}"
    )
