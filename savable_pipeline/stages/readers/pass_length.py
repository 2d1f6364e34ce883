"""`PassLength`: how many epochs, whole and in part, one pass of a reader has.

    epochs=2.5 of 100 samples    100 │ 100 │ 50      three epochs are begun, the last of which has 50 samples

The samples of the last one are the first of that epoch's order: with `shuffle` others in every pass.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import NamedTuple


class PassLength(NamedTuple):
    """`epochs` that are begun in a pass, and the number of samples of the `last` of them."""

    epochs: int
    last: int

    def samples(self, epoch: int, population: int) -> int:
        """The number of samples of an epoch, counted from the start of the pass, of a dataset of so many."""
        return self.last if epoch == self.epochs - 1 else population


def pass_length(reader: str, epochs: int | float | None, population: int) -> PassLength | None:
    """The length of a pass of so many epochs; None if it never ends.

    Raises ValueError, which names the `reader`, if it has no sample.
    """
    if epochs is None:
        return None
    exact = Fraction(str(epochs))
    whole = ceil(exact)
    last = int((exact - (whole - 1)) * population)
    if whole == 1 and not last:
        raise ValueError(f"{reader}: epochs={epochs} of {population} samples is less than one of them")
    return PassLength(whole, last)


def check_epochs(reader: str, epochs: int | float | None) -> int | float | None:
    """The number of epochs, a whole one as an int.

    Raises ValueError, which names the `reader`, unless it is above 0, or None.
    """
    if epochs is None:
        return None
    if not 0 < epochs < float("inf"):
        raise ValueError(f"{reader}: epochs must be above 0, not {epochs}; None repeats for ever")
    return int(epochs) if epochs == int(epochs) else float(epochs)
