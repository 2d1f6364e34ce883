"""`ORDER` and `STATE`: versions of a state, which code that loads it must have.

`ORDER` versions everything that decides which data come when: orders of readers, draws of subsets, turns of the sources
of a blend, packing policies, grouping into batches, random crops. `STATE` versions the content and the format of a
state. A change of one of these adds 1 to its number, and adds the commit before the change to `LAST_COMMITS`.

`SavedCount` is the type of an integer in a state. Its range is that of the arithmetic for orders and random numbers.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, TypeAlias

import msgspec

from savable_pipeline.errors import StateError

SavedCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
EpochNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # the range of the epoch in a ref

ORDER = 6
STATE = 8
# The last commit that reads states of (ORDER, STATE). The first states had no ORDER.
LAST_COMMITS: dict[tuple[Any, Any], str] = {
    (None, None): "d039fef",
    (None, 1): "d039fef",
    (3, 2): "6862a8c",
    (4, 3): "163f8f3",
    (4, 4): "fc1e073",
    (4, 5): "dece9b5",
    (4, 6): "958633f",
    (5, 7): "c9fd8c8",
}


def check_numbers(name: str, order: Any, state: Any) -> None:
    """Raise `StateError` unless these numbers of a state are the current ones.

    `name` names the state in the message. `order` and `state` are the saved numbers, or None where the state has none.
    """
    if type(order) is type(state) is int and (order, state) == (ORDER, STATE):
        return
    saved_order, saved_state = [reprlib.repr(number).replace("None", "none") for number in (order, state)]
    commits = [commit for numbers, commit in LAST_COMMITS.items() if numbers == (order, state)]
    commit = f"commit {commits[0]}" if commits else "its own release"
    raise StateError(
        f"{name}: saved with ORDER {saved_order} and STATE {saved_state}, but this release reads ORDER {ORDER} and "
        f"STATE {STATE}. Load it with {commit}"
    )
