"""Links in a tar: GNU tar writes the second name of a file as one. To readers they are no parts, as to webdataset.

a.jpg │ a.txt │ b.jpg │ b.txt → a.txt │ c.jpg → a.jpg      readers: a: jpg, txt; b: jpg
                                                           `linked_samples`: a: jpg, txt; b: jpg, txt; c: jpg
"""

from __future__ import annotations

import bisect
import posixpath
from collections.abc import Iterable

from savable_pipeline.core.wording import counted
from savable_pipeline.data.shards.tar import Extent, Member, members, split_name
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.errors import ShardError

_SEVERAL = "twice in its sample"
_NOWHERE = "it leads to no file of the tar"


def links_warning(address: str, count: int, first: str) -> str:
    """What to say of so many links in a dataset; `first` is the place and name of one."""
    return (
        f"{address}: {counted(count, 'member is a link', 'members are links')} to other files of their tar, such as "
        f"{first}: these are no parts of samples, here as in webdataset and Energon; `savable convert {address} DST` "
        "writes shards with the bytes that they lead to"
    )


def links_told(address: str, index: TarIndex, numbers: Iterable[int]) -> str:
    """What to say of the links in these shards of an index, as far as it counts them; empty without any."""
    found = [(number, index.links[number]) for number in numbers if number in index.links] if index.links else []
    if not found:
        return ""
    number, first = found[0]
    return links_warning(
        address, sum(links.count for _, links in found), f"{first.first} in {index.shards.names[number]}"
    )


def linked_samples(path: str, fd: int) -> tuple[list[Extent], list[tuple[Member, str]]]:
    """The samples of an open tar with what links lead to as parts; and the links that are no part, with the reason.

    A sample of the index gets the linked parts of its key; keys that only links have become samples of their own.
    Raises `ShardError`.
    """
    every = list(members(path, fd))
    grouped = _Grouped(path)
    lost: list[tuple[Member, str]] = []
    targets = _Targets(every)
    for number, member in enumerate(every):
        parts = split_name(member.name) if member.regular or member.link else None
        if parts is None:
            continue
        if member.regular:
            lost += ((link, _SEVERAL) for link in grouped.add(member, *parts))
            continue
        target = targets.of(number)
        if target is None:
            lost.append((member, _NOWHERE))
        elif not grouped.add_linked(member, target, *parts):
            lost.append((member, _SEVERAL))
    return grouped.extents, lost


class _Targets:
    """The members of a tar by name, of which one may occur again."""

    def __init__(self, every: list[Member]) -> None:
        self._every = every
        self._numbers: dict[str, list[int]] = {}
        for number, member in enumerate(every):
            self._numbers.setdefault(_plain(member.name), []).append(number)

    def of(self, number: int) -> Member | None:
        """The file that a link leads to, over other links too; None for none."""
        passed = set[int]()
        while self._every[number].link and number not in passed:
            passed.add(number)
            there = self._numbers.get(_plain(self._every[number].link), [])
            place = bisect.bisect_left(there, number)  # what was unpacked before the link; else what comes after it
            there = there[:place][-1:] or [each for each in there[place:] if each != number][:1]
            if not there:
                return None
            number = there[0]
        return self._every[number] if self._every[number].regular else None


def _plain(name: str) -> str:
    """A name as others may spell it: `./a//b.txt` and `/a/b.txt` are `a/b.txt`."""
    return posixpath.normpath(name).lstrip("/")


class _Grouped:
    """Members as samples: files as the index has them, links where their key is."""

    def __init__(self, path: str) -> None:
        self.extents: list[Extent] = []
        self._path = path
        self._by_key: dict[str, Extent] = {}
        self._filed = set[int]()  # samples that have a file, by their identity
        self._linked: dict[tuple[int, str], Member] = {}
        self._last = ""  # key of the file before

    def add(self, member: Member, key: str, extension: str) -> list[Member]:
        """Add a file; returns the link whose place it takes."""
        extent = self._by_key.get(key)
        if extent is None or (key != self._last and id(extent) in self._filed):
            extent = self._begin(key)
        self._filed.add(id(extent))
        self._last = key
        replaced = self._linked.pop((id(extent), extension), None)
        if replaced is not None:
            extent.members[extent.extensions.index(extension)] = member
            return [replaced]
        if extension in extent.extensions:
            raise ShardError(
                f"{self._path}: sample {key!r} has the extension {extension!r} twice, the second time in the header at "
                f"byte {member.header}; rename one of the two members and write the shard again"
            )
        extent.members.append(member)
        extent.extensions.append(extension)
        return []

    def add_linked(self, link: Member, target: Member, key: str, extension: str) -> bool:
        """Add what a link leads to; gives whether its name is free."""
        extent = self._by_key.get(key) or self._begin(key)
        if extension in extent.extensions:
            return False
        self._linked[id(extent), extension] = link
        extent.members.append(target._replace(name=link.name))
        extent.extensions.append(extension)
        return True

    def _begin(self, key: str) -> Extent:
        extent = self._by_key[key] = Extent(key)
        self.extents.append(extent)
        return extent
