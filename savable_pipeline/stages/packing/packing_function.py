"""`ByFunction`: the policy of `OnlinePacker` that a user writes: lengths in, groups of their indices out.

    held      3 5 2 4 1 …        items in the order in which they came, until they fill `open_packs` packs
    function  [3, 5, 2, 4, 1]  ─▶  [[1, 2], [0, 3], [4]]
    packs     5+2   3+4   1      given in that order

The packs of a round are laid out before the first of them is given, and are in the state with the refs of their items:
a resumed run does not ask the function again about packs already chosen. The first call is made twice, to find one that
draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypeAlias

from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.packing.packing_policies import OpenPack, Packing, Piece
from savable_pipeline.stages.setting_rules import function_name

PackingFunction: TypeAlias = Callable[[list[int]], Sequence[Sequence[int]]]


class ByFunction(Packing):
    """Holds pieces for `open_packs` packs, and lays them out as the function says."""

    holds = True

    def __init__(self, function: PackingFunction, *, max_length: int, open_packs: int) -> None:
        super().__init__(max_length=max_length, max_images=0, open_packs=open_packs)
        self._function = function
        self._length = 0  # sum over the held pieces
        self._asked = False

    def add(self, piece: Piece) -> None:
        """Hold a piece."""
        self.held.append(piece)
        self._length += piece.length

    def due(self) -> OpenPack | None:
        """The next pack, once the held pieces fill `open_packs` packs and are laid out; None before that."""
        if not self.packs and self._length >= self.open_packs * self.max_length:
            self._lay_out()
        return self.packs[0] if self.packs else None

    def last(self) -> OpenPack | None:
        """The next pack, once all held pieces are laid out; None when all are given."""
        if self.held and not self.packs:
            self._lay_out()
        return self.packs[0] if self.packs else None

    def _lay_out(self) -> None:
        """Make packs of all held pieces. Raises `EncodeError` for a wrong answer; then the pieces are still held."""
        groups = self._answer([piece.length for piece in self.held])
        packs = []
        for group in groups:
            pack = OpenPack(self.max_length, 0)
            for place in group:
                pack.add(self.held[place])
            packs.append(pack)
        self.packs, self.held, self._length = packs, [], 0
        self.rounds += 1

    def _answer(self, lengths: list[int]) -> list[list[int]]:
        name = f"OnlinePacker(policy={function_name(self._function)})"
        try:
            groups = self._groups(lengths)
            check_groups(groups, lengths, self.max_length)
            if not self._asked and self._groups(lengths) != groups:
                raise ValueError("called again it returned other groups; it must depend on the lengths alone")
        except Exception as error:
            raise EncodeError(f"{name}, for {len(lengths)} items: {type(error).__name__}: {error}") from error
        self._asked = True
        return groups

    def _groups(self, lengths: list[int]) -> list[list[int]]:
        return [[index(place) for place in group] for group in self._function(list(lengths))]


def check_groups(groups: Sequence[Sequence[int]], lengths: Sequence[int], max_length: int) -> None:
    """Raise ValueError unless each index is in one group, and no group is empty or longer than a pack."""
    seen: set[Any] = set()
    for number, group in enumerate(groups):
        if not group:
            raise ValueError(f"group {number} is empty")
        for place in group:
            if not 0 <= place < len(lengths):
                raise ValueError(f"group {number} has the index {place} of {len(lengths)} lengths")
            if place in seen:
                raise ValueError(f"group {number} has the index {place}, which is in a group already")
            seen.add(place)
        total = sum(lengths[place] for place in group)
        if total > max_length:
            raise ValueError(f"group {number} is {total} long, but max_length={max_length}: lengths of {list(group)}")
    if len(seen) < len(lengths):
        missing = next(place for place in range(len(lengths)) if place not in seen)
        raise ValueError(f"the index {missing} is in no group; each of the {len(lengths)} belongs to one")
