"""What of a source is taken: some of its parts, some of its keys; and into which split each sample goes.

The split of a sample depends on its key and the shares alone: where data are added, a sample stays where it was.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

from xxhash import xxh3_64_intdigest

from savable_pipeline.core.wording import listed
from savable_pipeline.tools.convert.model import Files, Input, Reject

_NUMBERED = re.compile(r"[0-9]+[.]")  # of several files of one field: 0.jpg, 1.jpg
_ALL = 1 << 64


def keep_parts(found: Input, only: tuple[str, ...]) -> None:
    """Leave the parts named in `only`; `jpg` is 0.jpg, 1.jpg, … too. Samples without any are rejected.

    Raises ValueError for a part that no sample has.
    """
    wanted = {name.lower() for name in only}
    there = {part.extension.lower() for sample in found.samples for part in sample.parts}
    unknown = wanted - there - {_plain(name) for name in there}
    if unknown:
        raise ValueError(f"no sample has a part {listed(unknown)}; there are {listed(there)}")
    kept = []
    for sample in found.samples:
        parts = tuple(part for part in sample.parts if is_kept(part.extension, wanted))
        if parts:
            kept.append(replace(sample, parts=parts))
        else:
            found.rejected.append(Reject(sample.parts[0].path, sample.key, "no part that is kept"))
    found.samples = kept
    found.texts = found.texts if "json" in wanted else frozenset()


def is_kept(extension: str, only: Collection[str]) -> bool:
    """Whether a part of this name is one of `only`, in small letters; any is where it names none."""
    extension = extension.lower()
    return not only or extension in only or _plain(extension) in only


def _plain(extension: str) -> str:
    return _NUMBERED.sub("", extension, count=1)


def keep_keys(found: Input, keys: Iterable[str]) -> None:
    """Leave the samples with these keys. Raises ValueError for keys that no sample has, and for none."""
    wanted = set(keys)
    if not wanted:
        raise ValueError("no key is given: name the samples to keep, or give None to keep all")
    found.samples = [sample for sample in found.samples if sample.key in wanted]
    found.rejected = [reject for reject in found.rejected if not reject.key or reject.key in wanted]
    missing = wanted - {sample.key for sample in found.samples} - {reject.key for reject in found.rejected}
    if missing:
        raise ValueError(f"no sample has one of {len(missing)} of the keys: {listed(missing)}")


def split_samples(samples: list[Files], split: tuple[tuple[str, str], ...]) -> dict[str, list[Files]]:
    """The samples of each split, in their order; under "" all of them without a split."""
    if not split:
        return {"": samples}
    ends = [int(end * _ALL) for end in accumulate(Fraction(share) for _, share in split)]
    groups: dict[str, list[Files]] = {name: [] for name, _ in split}
    names = list(groups)
    for sample in samples:
        point = xxh3_64_intdigest(sample.key.encode("utf-8", "surrogateescape"))
        groups[names[next(i for i, end in enumerate(ends) if point < end)]].append(sample)
    return groups
