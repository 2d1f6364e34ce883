"""`ItemPacker`: the stage that packs groups of items, chosen by a user's function.

    round     a  b  c  d  e      `size` items
    select    [[d, a], [e, b]]   c is skipped
    pending   r3 r0 │ r4 r1      refs of packs that are not yielded yet, and their items as far as memory allows

A state has the refs of the items of chosen packs, so that a resumed run does not call the function again for them.
Called without an item that was lost in the meantime, it could choose other items twice or never. A change that the
function makes to an item is an error, because it would be lost when the item is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from savable_pipeline.core.containers import changed_part, part_versions
from savable_pipeline.core.rng import Rng
from savable_pipeline.core.state_numbers import SavedCount
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.chunked_stage import chunked, without_lost
from savable_pipeline.stages.encoder_calls import EncoderCalls
from savable_pipeline.stages.item_buffer import ItemBuffer, known_refs
from savable_pipeline.stages.item_ref import Element, as_ref
from savable_pipeline.stages.packing.pack_stage import EMPTY_PACK, PackStage
from savable_pipeline.stages.stage import ItemStage, State, parse_state
from savable_pipeline.stages.stage_settings import check_function, function_settings
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder

Select: TypeAlias = Callable[[list[Any], Rng], Sequence[Sequence[Any]]]


class _ItemPackerState(msgspec.Struct):
    unfinished: list[Any] = msgspec.field(name="held")
    groups: list[list[Any]]
    rounds: SavedCount
    count: SavedCount
    source: dict[str, Any]


class ItemPacker(PackStage):
    """Yields packs, each of a group of items that your function chooses.

    In each round the function gets `size` items, or fewer at the end of a finite source, and divides them into groups.
    A pack is `encoder.pack(items, rng)` of a group. The next round starts after all packs of a round are yielded.

    Args:
        source: A stage of items.
        size: The number of items of a round, which are all in memory when `select` is called.
        select: `select(items, rng)` returns packs in the order to yield them, as lists of objects of `items`. Items in
            no pack are counted as skipped, "not selected". It may draw random numbers like the encoder, and sort
            `items`, but not change an item. Most changes are detected, but not a write into an array. A state has the
            function's name, and the `settings()` of a callable object.
        encoder: Packs items. None: the encoder upstream.
        max_buffer_bytes: The most bytes of items of pending packs in a process. Other items are rebuilt.

    Raises:
        ValueError: A setting is wrong.
        EncodeError: `select` or the encoder raised, `select` returned other objects, or very many items are in no pack.

    Example:
        >>> class Captions(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.text()
        ...     def pack(self, items, rng):
        ...         return "|".join(items)
        >>> def last_two(items, rng):
        ...     return [sorted(items)[-2:]]
        >>> texts = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Captions())
        >>> packs = custom.ItemPacker(texts, size=4, select=last_two)
        >>> next(packs), packs.counts["skipped/not selected"]
        ('picture 2|picture 3', 2)
    """

    def __init__(
        self,
        source: ItemStage,
        *,
        size: int,
        select: Select,
        encoder: TaskEncoder | None = None,
        max_buffer_bytes: int = 1 << 30,
    ) -> None:
        if type(size) is not int or size < 1:
            raise ValueError(f"ItemPacker: size must be an int of at least 1, not {size!r}")
        check_function("ItemPacker", "select", select)
        self._check_source(source, ItemStage)
        super().__init__(source)
        self._calls = EncoderCalls("ItemPacker", source.info, encoder, "pack")
        self.size, self.select, self.max_buffer_bytes = size, source.lane.own(select), max_buffer_bytes
        # items of pending packs, or of a round without packs yet
        self._buffer = ItemBuffer(self, max_bytes=max_buffer_bytes)
        self._groups: list[int] = []  # number of items in each pending pack
        # numbers of rounds that were chosen, of packs that were yielded or skipped, and of consecutive items in no pack
        self._rounds, self._count, self._unpacked = 0, 0, 0

    def take(self, n: int) -> list[Element]:
        """Return the next pack in a list, which is empty only at the end."""
        while self._groups or self._choose():
            remaining = without_lost(self._buffer.copies(self._groups[0]))
            items, refs = [each.value for each in remaining], [each.ref for each in remaining]
            sizes = self._calls.sizes(remaining) if remaining else None
            packed = self._calls.combined(items, self._count, self.info) if items else EMPTY_PACK
            self._buffer.drop(self._groups.pop(0))
            self._count += bool(refs)  # a pack of lost items only is not counted
            if type(packed) is Skip:
                if refs:  # otherwise all items are lost, and counted already
                    self._count_skip(packed.reason, refs[0])
                self._count_unpacked(len(refs), f"the last pack was skipped as {packed.reason!r}")
            else:
                self._unpacked = 0
                self.counts.update(packs=1, items=len(refs), tokens=sum(length for length, _ in sizes or ()))
                return [Element((self._count - 1, *refs), packed, sizes)]
        return []

    def _choose(self) -> bool:
        """Take rounds of items until one has packs. Returns False at the end.

        After an error the next call rebuilds the items, so that the function never gets the same object twice.
        """
        while not self._groups:
            elements = self._buffer.copies(len(self._buffer))
            while len(self._buffer) < self.size:
                more = chunked(self.source).take(self.size - len(self._buffer))
                if not more:
                    break
                self._buffer.add([Element(element.ref) for element in more])
                chunked(self.source).make([each for each in more if not each.is_built])
                elements += more
            if not self._buffer:
                return False
            remaining = without_lost(elements)
            items = [each.value for each in remaining]
            select_positions = partial(_select_positions, self.select)
            groups = self._calls.selected(select_positions, items, self._rounds, self.info) if items else []
            self._rounds += 1
            self._groups = list(map(len, groups))
            chosen = [position for group in groups for position in group]
            self._buffer.drop(len(self._buffer))
            self._buffer.add([remaining[position] for position in chosen])
            for position in set(range(len(remaining))).difference(chosen):
                self._count_skip("not selected", remaining[position].ref)
            if not groups:
                self._count_unpacked(len(items), "`select` chose none of the last")
        return True

    def _count_unpacked(self, items: int, detail: str) -> None:
        """Count items that are in no pack. Raises `EncodeError`, with `detail`, for very many in a row."""
        self._unpacked += items
        if self._unpacked >= self.info.max_empty:
            raise EncodeError(f"ItemPacker: {self._unpacked:,} items in a row made no pack, {detail}. Change `select`.")

    def save_state(self) -> State:
        """Return the position.

        `groups` has the refs of each pending pack, and `held` those of an unfinished round.

        `rounds` and `count` are the numbers of rounds and packs so far.
        """
        refs = iter(self._buffer.refs())
        return {
            "groups": [[next(refs) for _ in range(items)] for items in self._groups],
            "held": list(refs),
            "rounds": self._rounds,
            "count": self._count,
            "source": self.source.save_state(),
        }

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`.

        Items of pending packs are rebuilt when they are needed.
        """
        saved = parse_state(self, state, _ItemPackerState)
        self.source.restore_state(saved.source)
        self._rounds, self._count = saved.rounds, saved.count
        self._buffer.restore([])
        remaining = [known_refs(self, list(map(as_ref, group))) for group in [*saved.groups, saved.unfinished]]
        self._buffer.add([Element(ref) for group in remaining for ref in group])
        self._groups = [len(group) for group in remaining[:-1] if group]

    def settings(self) -> dict[str, Any]:
        """Return `size`, the function, and the encoder if it is not the one upstream."""
        return {"size": self.size, **function_settings("select", self.select), **self._calls.settings()}


def _select_positions(select: Select, items: list[Any], rng: Rng) -> list[list[int]]:
    """Call `select`, and return its groups as positions of items. Raises ValueError for an invalid result."""
    versions_before = list(map(part_versions, items))
    groups = _as_lists(select(list(items), rng))
    for item, versions in zip(items, versions_before, strict=True):
        if (name := changed_part(item, versions)) is not None:
            raise ValueError(
                f"it changed {name!r} of a {type(item).__name__}, which is lost when the item is rebuilt. Change "
                "items in encode or pack."
            )
    free: dict[int, list[int]] = {}
    for position in reversed(range(len(items))):  # an object that occurs several times has several positions
        free.setdefault(id(items[position]), []).append(position)
    return [_take_positions(group, number, free) for number, group in enumerate(groups)]


def _as_lists(selected: Any) -> list[list[Any]]:
    """Return the result of `select` as a list of lists. Raises ValueError if it is not one."""
    if not isinstance(selected, Iterable) or isinstance(selected, dict | str):
        raise ValueError(f"it returned {type(selected).__name__}. Return a list of packs, each a list of items.")
    groups = list(selected)
    for group in groups:
        if not isinstance(group, list | tuple):
            raise ValueError(f"a pack is a {type(group).__name__}. Return a list of lists of items.")
    return [list(group) for group in groups]


def _take_positions(group: list[Any], number: int, free: dict[int, list[int]]) -> list[int]:
    """Return the positions of a group's items, and remove them from `free`: unused positions by `id(item)`."""
    positions: list[int] = []
    for item in group:
        if id(item) not in free:
            raise ValueError(
                f"group {number} has a {type(item).__name__} that is none of the items. Return the same objects, no "
                "copies or indices."
            )
        if not free[id(item)]:
            raise ValueError(f"group {number} repeats an item. Use each at most once.")
        positions.append(free[id(item)].pop())
    if not positions:
        raise ValueError(f"group {number} is empty. Return no empty groups.")
    return positions
