"""`InVain`: of which sources a lane has had samples in vain so far, as its state has it.

    counters of a batch                  before                     after
    Encode/source/7/skipped/no txt  3    Encode/7: {}               Encode/7: {}                        has given
    Encode/source/9/skipped/no txt  5    Encode/9: {skipped/… : 4}  Encode/9: {"skipped/no txt": 9}     nothing yet
    Encode/source/9/items           1    Encode/9: {skipped/… : 9}  Encode/9: {}                        the first item

It is in the state, so that a source that has given something is known after a resume, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

InVain: TypeAlias = dict[str, dict[str, int]]  # by "STAGE/TAG" and WHAT; empty once it has kept something

FIRST = "first"
_SKIPPED, _MOST, _OTHERS = "skipped/", 30, "skipped/for other reasons"  # a reason may have a number in it


class OfSource(NamedTuple):
    """What a counter of a stage counts of the source with this tag."""

    stage: str
    tag: int
    what: str
    """"items", "tokens", "skipped_tokens", "first", or "skipped/REASON": see `SourceCounts`."""

    @classmethod
    def of(cls, name: str) -> OfSource | None:
        """Of the name of a counter, STAGE/source/TAG/WHAT; None for one that is of no source."""
        stage, _, of_source = name.partition("/source/")
        tag, _, what = of_source.partition("/")
        return cls(stage, int(tag), what) if what else None

    @property
    def key(self) -> str:
        """The key of the stage and the source in `InVain`."""
        return f"{self.stage}/{self.tag}"

    @property
    def reason(self) -> str:
        """Why something was left out; "" if this is no counter of that."""
        return self.what.removeprefix(_SKIPPED) if self.what.startswith(_SKIPPED) else ""


def with_counts(before: InVain, counts: Mapping[str, int | float]) -> InVain:
    """What was in vain after these counters of the lane's stages."""
    found = {name: of for name in counts if "/source/" in name and counts[name] > 0 and (of := OfSource.of(name))}
    after = dict(before) if found else before
    for name, of in found.items():
        if (of.reason or of.what == FIRST) and (of.key not in after or after[of.key]):
            before_it = after.get(of.key, {})
            what = of.what if of.what in before_it or len(before_it) < _MOST else _OTHERS
            after[of.key] = {**before_it, what: before_it.get(what, 0) + int(counts[name])}
    return after | {of.key: {} for of in found.values() if of.what == "items"}


def reasons_of(in_vain: Mapping[str, int]) -> Counter[str]:
    """Of a stage's source, the samples that were in vain, by reason."""
    return Counter({what.removeprefix(_SKIPPED): n for what, n in in_vain.items() if what.startswith(_SKIPPED)})
