"""The words of a conversion: its options, its input as samples of parts, and the rejects."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, Protocol

import msgspec

from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.tools.convert.part_data import Parts

_SPLIT_NAME = re.compile(r"[A-Za-z0-9_]+")
_DECIMAL = re.compile(r"[0-9]*[.]?[0-9]+")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a conversion that decide its bytes. Raises `ValueError`."""

    shard_bytes: int = 256_000_000  # a shard is full before it grows longer than this
    shard_samples: int | None = None  # or before it holds more samples than this
    check_images: bool = True
    allow_outside: bool = False  # take files outside the source that links or JSONL fields lead to
    key_field: str | None = None  # of a record; None: its number is the key
    file_fields: tuple[str, ...] | None = None  # "field" or "field=part"; None: the usual names
    key_end: Literal["first", "last"] | None = None  # the dot of a file's name that ends the key; None: not decided
    classes: bool | tuple[str, ...] = False  # of a folder: a sample's top folder becomes its part `cls`; of these
    split: tuple[tuple[str, str], ...] = ()  # names and shares, as decimals that add up to 1
    only: tuple[str, ...] = ()  # the parts that are kept; none named: all
    unpacked_bytes: int = UNPACKED_BYTES  # that what is compressed may become in memory

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
    names = [name for name, _ in split]
    for name, share in split:
        if not _SPLIT_NAME.fullmatch(name) or names.count(name) > 1 or not _DECIMAL.fullmatch(share):
            raise ValueError(f"invalid split {name}={share}. Name each once with its share, such as train=0.98")
    total = sum(Fraction(share) for _, share in split)
    if total != 1:
        raise ValueError(f"the splits add up to {float(total):g}, not 1: {dict(split)}")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a sample: a whole file, or what is made of a record; at an `offset`, a row or a name that is one.

    The size of what is made of a record is the most that it can be.
    """

    extension: str
    path: str  # relative to the input's root
    size: int
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Files:
    """A sample before it is written: its key and its parts by extension; its number in the store.

    Where it is `of_files`, the parts without an offset are whole files.
    """

    key: str
    parts: tuple[Part, ...]
    record: int
    of_files: bool = False


class SampleReader(Protocol):
    """Reads the samples of a source, in any process: it is pickled into those that write shards."""

    def expect(self, samples: list[Files], /) -> None:
        """Announces that these samples are read next, in this order."""

    def elsewhere(self, samples: list[Files], /) -> SampleReader:
        """The reader of these samples for another machine, which sees what all of them see."""

    def read(self, sample: Files, /) -> Parts:
        """The parts of a sample by extension. Raises `SavableError` if the source is not as it was when planned."""


@dataclass(slots=True)
class Input:
    """The content of a source: its samples in the order to write, how they are read, and the rejects so far."""

    root: str
    reader: SampleReader
    samples: list[Files] = field(default_factory=list)
    rejected: list[Reject] = field(default_factory=list)
    hidden: int = 0  # hidden files and folders, skipped
    digest: str = ""  # of what does not show in the names and sizes of parts
    texts: frozenset[str] = frozenset()  # JSON fields that are a text in every sample
    warnings: list[str] = field(default_factory=list)
    nulls: dict[str, int] = field(default_factory=dict)  # by column: the rows that have nothing there
    classes: list[str] = field(default_factory=list)  # names of folders, by the numbers in the parts `cls`
    source_id: str = ""  # of a source behind a URL: see `source_id`


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a conversion: what is in the shards, and what was left out."""

    samples: int
    shards: int
    size: int
    rejected: list[Reject]
    hidden: int  # hidden files and folders, skipped
    warnings: list[str] = field(default_factory=list)  # about samples that are not as the others
    nulls: dict[str, int] = field(default_factory=dict)  # by column: the rows that have nothing there, and so no part
    already: bool = field(default=False, compare=False)  # all of it was there before, and nothing was written
