"""Settings and report of a conversion."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import msgspec

from savable_pipeline.data.shards.metadata import CONVERTED, META
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.sample_names import Reject

MANIFEST = CONVERTED
CLASSES = "classes.json"  # names of the classes by number
REJECTED = f"{META}/savable.rejected.jsonl"
HASHES = f"{META}/savable.hashes"  # hashes of the contents of all parts, uint64
WORK = f"{META}/savable.convert"  # folder of unfinished work
_SPLIT_NAME = re.compile(r"[A-Za-z0-9_]+")
_DECIMAL = re.compile(r"[0-9]*[.]?[0-9]+")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that decide the bytes of a conversion. Raises `ValueError`."""

    shard_bytes: int = 256_000_000  # most bytes of a shard
    shard_samples: int | None = None  # most samples of a shard; None: no limit
    check_images: bool = True
    allow_outside: bool = False  # read files outside the source that links or fields name
    key_field: str | None = None  # field of a record; None: its number is the key
    file_fields: tuple[str, ...] | None = None  # "field" or "field=part"; None: the usual names
    key_end: Literal["first", "last"] | None = None  # the dot of a file name that ends the key
    # for a folder: whether the part `cls` is the number of a sample's top folder
    classes: bool | tuple[str, ...] = False
    split: tuple[tuple[str, str], ...] = ()  # names and fractions, decimals that add up to 1
    only: tuple[str, ...] = ()  # parts to write; none: all
    unpacked_bytes: int = UNPACKED_BYTES  # most bytes of decompressed data in memory

    def __post_init__(self) -> None:
        if self.key_end not in ("first", "last", None):
            raise ValueError(f"key_end must be 'first' or 'last', not {self.key_end!r}")
        if self.shard_bytes < 1 or (self.shard_samples is not None and self.shard_samples < 1):
            raise ValueError(
                f"shard_bytes and shard_samples must be at least 1, not {self.shard_bytes} and {self.shard_samples}"
            )
        if self.split:
            _check_split(self.split)


def _check_split(split: tuple[tuple[str, str], ...]) -> None:
    """Raise ValueError for wrong names or fractions of splits."""
    names = [name for name, _ in split]
    for name, fraction in split:
        if not _SPLIT_NAME.fullmatch(name) or names.count(name) > 1 or not _DECIMAL.fullmatch(fraction):
            raise ValueError(f"invalid split {name}={fraction}. Name each once with its fraction, such as train=0.98")
    total = sum(Fraction(fraction) for _, fraction in split)
    if total != 1:
        raise ValueError(f"the splits add up to {float(total):g}, not 1. Change the fractions of {dict(split)}")


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a conversion."""

    samples: int
    shards: int
    size: int  # bytes of all shards
    rejected: list[Reject]
    hidden: int  # number of hidden files and folders, which are skipped
    warnings: list[str] = field(default_factory=list)
    nulls: dict[str, int] = field(default_factory=dict)  # number of rows without a value, by column
    already: bool = field(default=False, compare=False)  # whether nothing was written, because all of it existed
