"""`SavedCount`: a number in a state, within the range of the arithmetic of orders and random numbers."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

SavedCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
EpochNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # as a ref holds it
