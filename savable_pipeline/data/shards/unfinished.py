"""Whether somebody began to write shards into a folder and was stopped: those that are there are not all.

.nv-meta/savable.convert.json                      of a conversion: whether it is done
.nv-meta/savable.writer/00003-of-00016-open        there as long as a writer has not ended
.nv-meta/savable.writer/00003-of-00016-settings.json   of each part that was ever begun
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec

from savable_pipeline.core.wording import counted
from savable_pipeline.data.shards.energon_metadata import META
from savable_pipeline.data.shards.index_making import WRITTEN

CONVERTED = f"{META}/savable.convert.json"
OPEN = "open"  # ends the name of a writer's mark
_PART = re.compile(r"(\d{5})-of-(\d{5})-settings\.json")
_NAMED = 10  # parts


class _Conversion(msgspec.Struct):
    done: bool
    source: str = ""


def unfinished(folder: Path) -> str:
    """Why samples may be missing from a folder of shards, and what to do; "" if all who wrote there have ended."""
    return _of_conversion(folder) or _of_writers(folder)


def _of_conversion(folder: Path) -> str:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        found = msgspec.json.decode((folder / CONVERTED).read_bytes(), type=_Conversion)
        if not found.done:
            return (
                f"{folder}: samples are missing: the conversion of {found.source or 'its source'} was stopped, or is "
                "still writing; the same command again completes it"
            )
    return ""


def _of_writers(folder: Path) -> str:
    try:
        names = {path.name for path in (folder / WRITTEN).iterdir()}
    except OSError:
        return ""
    parts = [match for name in names if (match := _PART.fullmatch(name))]
    ended = {int(match[1]) for match in parts if f"{match[1]}-of-{match[2]}-{OPEN}" not in names}
    count = max((int(match[2]) for match in parts), default=0)
    missing = [str(part) for part in range(count) if part not in ended]
    if OPEN not in names and not missing:
        return ""
    more = f" and {counted(len(missing) - _NAMED, 'more', 'more')}" if len(missing) > _NAMED else ""
    which = f": parts {', '.join(missing[:_NAMED])}{more} of {count}" if missing else ""
    return (
        f"{folder}: samples may be missing: an sp.ShardWriter was stopped, never begun, or is still writing{which}; "
        "run the program again that writes there"
    )
