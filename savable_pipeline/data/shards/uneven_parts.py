"""Whether samples look merged or torn by dots in file names, where a key ends at the first dot.

img.v1.0001.jpg, img.v1.0002.jpg     →     one sample `img` of the parts v1.0001.jpg and v1.0002.jpg
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from savable_pipeline.core.wording import listed

_NEARLY_ALL = 0.9  # of the samples
_MANY_PARTS = 1000  # of one sample
_RARE = 0.01  # of the samples
_NUMBERED = re.compile(r"(0|[1-9][0-9]{0,2})\.")  # as in 0.jpg, 1.jpg, … of an interleaved document


def uneven_parts(samples: int, counts: Mapping[str, int], most_parts: int = 0) -> list[str]:
    """Warnings, one a line. `counts`: samples that have each part, `most_parts`: parts of the sample with most."""
    found = [
        f"{samples - count} of {samples} samples have no part {part}, which the others have"
        for part, count in sorted(counts.items())
        if _NEARLY_ALL * samples <= count < samples
    ]
    rare = [
        part
        for part, count in counts.items()
        if "." in part and not _NUMBERED.match(part) and count <= max(1, _RARE * samples) < samples
    ]
    if sum(counts[part] for part in rare) >= (1 - _NEARLY_ALL) * samples and rare:
        found.append(f"{len(rare)} parts are in hardly any sample: {listed(rare)}; {_DOTS}")
    if most_parts > _MANY_PARTS:
        found.append(f"one sample has {most_parts} parts; {_DOTS}")
    return found


_DOTS = "a key ends at the first dot of a file's name: rename files, or convert them with --key-end last"
