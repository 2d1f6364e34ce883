"""Rules for names of files: which are parts of samples, as in a tar."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

import msgspec

from savable_pipeline.data.shards.part_types import MEDIA_PARTS, SUBTITLE_PARTS, TEXT_PARTS, part_type
from savable_pipeline.data.shards.paths import LANCE, LANCE_FIX, PACKED_TARS
from savable_pipeline.data.shards.tar import split_name

# the top folders (True), no classes (False), names, a file of names, or another folder with the same classes
Classes: TypeAlias = bool | Sequence[str] | str | os.PathLike[str]


_FOR_PEOPLE = ("readme", "license", "notice", "citation", "changelog")
TABLES = frozenset((".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq", ".parq", ".arrow", ".feather", ".ipc"))
OTHER = "iterate over it with its own library, and write its samples with sp.ShardWriter"
_OF_OTHER_LIBRARIES = ".h5 .hdf5 .lmdb .mdb .tfrecord .tfrecords .beton .rec .db .sqlite .zarr .orc .avro .bag .mcap"
CONTAINERS = {
    **dict.fromkeys((".zip", ".7z", ".rar"), "unpack it, and convert the folder"),
    **dict.fromkeys(_OF_OTHER_LIBRARIES.split(), OTHER),
    LANCE: LANCE_FIX,
    **dict.fromkeys((".xlsx", ".xls"), "save each sheet as CSV"),
    ".mds": "name the folder with its index.json",
}
"""Files of many samples that no format reads, and what to do with them."""
# suffixes of files about a folder of media
_NO_PARTS = frozenset((".py", ".sh", ".yaml", ".yml", ".md", ".log", ".mat"))
_MEDIA = frozenset(f".{name}" for name in MEDIA_PARTS)


class Reject(msgspec.Struct, frozen=True):
    """Skipped file or line, the key of its sample if any, and the reason."""

    file: str
    key: str
    reason: str
    detail: str = ""

    @classmethod
    def of(cls, file: str, key: str, fault: str) -> Reject:
        """Build a reject for a fault, `reason: detail`."""
        reason, _, detail = fault.partition(": ")
        return cls(file, printable(key), reason, printable(detail))


def name_fault(key: str, extension: str) -> str:
    """Return why readers of a tar would not find this part under this key, or ""."""
    name = f"{key}.{extension}"
    if printable(name) != name:
        return "name that a tar cannot carry: it is not UTF-8 or has control characters"
    if any(part in ("", ".", "..") for part in key.split("/")) or split_name(name) != (key, extension):
        return f"name that a tar cannot carry: readers would not read {name!r} under the key {key!r}"
    if not extension or extension.startswith("_"):
        return f"name that a tar cannot carry: webdataset does not read the extension {extension!r}"
    return ""


def parts_fault(key: str, parts: list[tuple[str, str, int, str]]) -> tuple[str, str]:
    """Return the first fault of a sample's parts and its file, or ("", "").

    A part is (extension, file, size in bytes, fault found before or "").
    """
    files: dict[str, str] = {}
    for extension, path, size, fault in parts:
        if (other := files.get(extension.lower())) is not None:
            fault = fault or f"two parts with one extension: {other} and {path}"
        files[extension.lower()] = path
        is_empty = not size and extension.lower() not in TEXT_PARTS and part_type(extension) not in SUBTITLE_PARTS
        if fault := fault or name_fault(key, extension) or ("empty file" if is_empty else ""):
            return fault, path
    return "", ""


def printable(name: str) -> str:
    """Return the name with control characters and bytes that are not UTF-8 escaped."""
    if name.isascii() and name.isprintable():
        return name
    escaped = "".join(c if c.isprintable() or c > "\x9f" else f"\\x{ord(c):02x}" for c in name)
    return escaped.encode("utf-8", "backslashreplace").decode()


def outside(root: str, path: str) -> bool:
    """Return whether `path` leads outside of the real path `root`, following links.

    Hugging Face's cache is CACHE/snapshots/COMMIT, with files that are links into CACHE/blobs.
    """
    real, (cache, snapshots, _) = os.path.realpath(path), root.partition("/snapshots/")
    allowed = [root, f"{cache}/blobs"] if snapshots else [root]
    return all(os.path.commonpath([folder, real]) != folder for folder in allowed)


def suffix_of(name: str) -> str:
    """Return the lower-case suffix of a name, from its last dot."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot > name.rfind("/") else ""


def is_media_file(name: str) -> bool:
    """Return whether a name is that of an image, audio or video."""
    return suffix_of(name) in _MEDIA


def is_for_people(name: str) -> bool:
    """Return whether a top-level file is for people, such as a README or a license."""
    return "/" not in name and name.lower().startswith(_FOR_PEOPLE)


def stem_of(name: str) -> str:
    """Return the path of a file up to its first dot."""
    dot = name.find(".", name.rfind("/") + 1)
    return name if dot < 0 else name[:dot]


class FileNames:
    """Names of files, grouped by suffix once, so that finding some of them is fast.

    Attributes:
        all: All names, in the order of the listing.
        media: The names of images, audio and video.
        others: All other names.
        containers: The names of files of many samples that no format reads.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.all = [*names]
        self._by_suffix: dict[str, list[str]] = {}
        for name in self.all:
            self._by_suffix.setdefault(suffix_of(name), []).append(name)
        self.media, self.others = self._with_last(_MEDIA), self._with_last(self._by_suffix.keys() - _MEDIA)
        # A part of several has the suffix .tfrecord-00000-of-00010.
        self.containers = self._with_last({*CONTAINERS, *(s for s in self._by_suffix if s.startswith(".tfrecord-"))})

    def ending(self, suffixes: Collection[str]) -> list[str]:
        """Return the names that end with one of these suffixes, ignoring case."""
        found = self._with_last({*map(suffix_of, suffixes)})
        return [name for name in found if name.lower().endswith((*suffixes,))]

    def lone_containers(self) -> list[str]:
        """Return containers and compressed tars whose stem no part of a sample has."""
        found = [*self.containers, *self.ending(PACKED_TARS)]
        parts = {*map(stem_of, {*self.all}.difference(found, self._with_last(TABLES)))} if found else set()
        return [name for name in found if stem_of(name) not in parts]

    def container_fault(self) -> str:
        """Return what to do with a container that is no part of a sample, or ""."""
        name = min({*self.lone_containers()}.intersection(self.containers), default="")
        suffix = suffix_of(name)
        return f"{suffix} is not read here ({name}): {CONTAINERS[suffix.partition('-')[0]]}" if name else ""

    def unread_with_media(self) -> set[str]:
        """Return the names of `no_samples` that may have data.

        A table with the name of a folder does not count, because img2dataset writes one for each folder.
        """
        folders = {name.rpartition("/")[0] for name in self.media}
        names = (name for name in self.no_samples() if not is_for_people(name) and not name.endswith("_stats.json"))
        return {name for name in names if stem_of(name) not in folders}

    def _with_last(self, suffixes: Collection[str]) -> list[str]:
        """Return the names whose part from the last dot is one of these suffixes."""
        return [name for suffix, names in self._by_suffix.items() if suffix in suffixes for name in names]

    def lone(self, some: Iterable[str]) -> list[str]:
        """Return those of `some` names that share their stem with no other file.

        Other tables do not count, so that metadata.csv is returned although there is a metadata.jsonl. Files for
        people, such as a README, are not returned.
        """
        counts = ((name, self._stems_without_tables[stem_of(name)]) for name in some if not is_for_people(name))
        # A count includes the file itself, unless it is a table: the file is alone at 1, a table at 0.
        return [name for name, count in counts if count == (suffix_of(name) not in TABLES)]

    def no_samples(self) -> set[str]:
        """Return the names in a folder of raw files that are not parts of samples.

        These are files for people. With media, they are also containers, tables and `_NO_PARTS` that share their stem
        with no other kind of file, and img2dataset's statistics.
        """
        found = {*filter(is_for_people, self.all)}
        if self.media:
            found.update(self.lone([*self._with_last(TABLES | _NO_PARTS), *self.ending(("_stats.json",))]))
            found.update(self.lone_containers())
        return found

    @cached_property
    def _stems_without_tables(self) -> Counter[str]:
        return Counter(map(stem_of, self._with_last(self._by_suffix.keys() - TABLES)))
