"""Whether samples look merged or torn by dots in file names, where a key ends at the first dot.

img.v1.0001.jpg, img.v1.0002.jpg     →     one sample `img` of the parts v1.0001.jpg and v1.0002.jpg
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from savable_pipeline.core.wording import counted, listed

_NEARLY_ALL = 0.9  # of the samples
_MANY_PARTS = 1000  # of one sample
_RARE = 0.01  # of the samples
_NUMBERED = re.compile(r"(0|[1-9][0-9]{0,2})\.")  # as in 0.jpg, 1.jpg, … of an interleaved document


_ALIKE = {"jpeg": "jpg", "tiff": "tif"}  # two extensions of one kind of file


def are_merged(parts: Collection[str], counts: Mapping[str, int]) -> bool:
    """Whether dots in the names of files seem to have made these the parts of one sample.

    Each has a dot, and most are in no other sample: not `seg.png` beside `jpg`, or in many samples. `counts`: samples
    that have each part.
    """
    return all("." in part for part in parts) and 2 * sum(counts[part] == 1 for part in parts) > len(parts)


def lacking_parts(samples: int, counts: Mapping[str, int]) -> list[str]:
    """Warnings of samples that lack a part, one a line. `counts`: samples that have each part.

    `JPG`, `jpeg` and `jpg` are one part.
    """
    alike = Counter[str]()
    for part, count in counts.items():
        name, dot, kind = part.lower().rpartition(".")
        alike[f"{name}{dot}{_ALIKE.get(kind, kind)}"] += count
    return [
        f"{samples - count} of {samples} samples have no part {part}, which the others have"
        for part, count in sorted(alike.items())
        if _NEARLY_ALL * samples <= count < samples
    ]


def dotted_parts(
    samples: int, counts: Mapping[str, int], most_parts: int = 0, part_sets: Iterable[Collection[str]] = ()
) -> list[str]:
    """Warnings of dots in names, one a line. `counts` as for `lacking_parts`, `most_parts`: of the sample with most,
    `part_sets`: the parts of samples that have no part without a dot."""
    found = []
    rare = [
        part
        for part, count in counts.items()
        if "." in part and not _NUMBERED.match(part) and count <= max(1, _RARE * samples) < samples
    ]
    merged = [sorted(parts) for parts in part_sets if are_merged(parts, counts)]
    if merged:
        found.append(
            f"{counted(len(merged), 'sample has', 'samples have')} only parts with a dot, most of them in no other "
            f"sample, such as {merged[0][0]}; {_DOTS}"
        )
    elif sum(counts[part] for part in rare) >= (1 - _NEARLY_ALL) * samples and rare:
        found.append(f"{len(rare)} parts are in hardly any sample: {listed(rare)}; {_DOTS}")
    if most_parts > _MANY_PARTS:
        found.append(f"one sample has {most_parts} parts; {_DOTS}")
    return found


_DOTS = "a key ends at the first dot of a file's name: rename files, or convert them with --key-end last"
