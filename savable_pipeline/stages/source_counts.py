"""`SourceCounts`: what a stage keeps of each source, and what it leaves out, by reason and in a row.

counter of the stage           counts
skipped/REASON                 what it left out
source/TAG/skipped             the same, of the source with this tag
source/TAG/skipped/REASON      the same, but for what the user asked it to leave out
source/TAG/first               those among them that are of the source's first epoch
source/TAG/items               what it kept of the source; of a packer `tokens` and `skipped_tokens`, too

The loader sums the last three up over its lanes: it knows from them which source gives little, or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from savable_pipeline.data.dataset.ref import count_of_source, skip_counters, tag_of
from savable_pipeline.stages.element import Element
from savable_pipeline.stages.item_ref import ItemRef, first_sample


class SourceCounts:
    """Counts in `counts`, those of a stage. `rows`: what was left out in a row of each source, by its tag."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self.rows: dict[int, int] = {}
        self._only: tuple[Collection[int], str] = (), ""  # the tags of a single source, and its counter of items
        self._names: dict[int, tuple[str, str]] = {}  # of counters of items and of tokens, by tag

    def kept(self, elements: Sequence[Element], tags: Collection[int]) -> None:
        """Count items, of sources with these tags."""
        if len(tags) == 1 and tags is not self._only[0]:
            self._only = tags, self._named(next(iter(tags)))[0]
        if tags is self._only[0]:
            self._counts[self._only[1]] += len(elements)
        else:
            for tag, number in Counter([tag_of(element.ref[0]) for element in elements]).items():
                self._counts[self._named(tag)[0]] += number

    def end_rows(self, elements: Sequence[Element]) -> None:
        """Begin to count in a row again for the sources of these items."""
        for tag in {tag_of(element.ref[0]) for element in elements} if self.rows else ():
            self.rows.pop(tag, None)

    def kept_one(self, ref: ItemRef, tokens: int = 0) -> None:
        """Count an item, a part of one, or a pack, by its first sample."""
        tag = tag_of(ref[0] if type(ref[1]) is int else first_sample(ref)[0])
        items, of_tokens = self._named(tag)
        self._counts[items] += 1
        if tokens:
            self._counts[of_tokens] += tokens
        if self.rows:
            self.rows.pop(tag, None)

    def _named(self, tag: int) -> tuple[str, str]:
        names = self._names.get(tag)
        if names is None:
            names = self._names[tag] = f"source/{tag}/items", f"source/{tag}/tokens"
        return names

    def left_out(self, reason: str, ref: ItemRef, tokens: int = 0, *, asked: bool = False) -> tuple[Counter[str], int]:
        """Count a sample or an item, by its first sample. `asked`: the user said that it is meant.

        Returns what was counted, and how many of its source were left out in a row.
        """
        index, epoch = first_sample(ref)[:2]
        counted = Counter(skip_counters(reason, index))
        if not asked:
            counted[count_of_source(index, f"skipped/{reason}")] = 1
            for what, number in (("first", int(not epoch)), ("skipped_tokens", tokens)):
                if number:
                    counted[count_of_source(index, what)] = number
        self._counts.update(counted)
        row = self.rows[tag_of(index)] = self.rows.get(tag_of(index), 0) + 1
        return counted, row
