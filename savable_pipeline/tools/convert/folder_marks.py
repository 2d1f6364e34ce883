"""The marks of a folder, by which its kind is told: the index of another format, the ends of names, files alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from savable_pipeline.data.stores.sample_names import is_hidden, is_tar
from savable_pipeline.data.stores.source import kind_in
from savable_pipeline.tools.convert.plan import CLASSES

_COMPANIONS = (".json", ".jsonl", ".parquet", ".idx", ".csv", ".txt", ".log", ".sqlite")  # of tars, by tools
_BESIDE_TABLES = (
    ".json",
    ".jsonl",
    ".idx",
    ".csv",
    ".txt",
    ".log",
    ".sqlite",
    ".md",
    ".py",
    ".yaml",
    ".yml",
    ".lock",
    ".crc",
)
_OF_PEOPLE = ("readme", "license", "notice", "citation", "changelog")


@dataclass(slots=True)
class FolderMarks:
    """What lies in a folder; names are relative to it, hidden files left out."""

    index: str = ""  # "mds", "litdata", or another format that its index.json names
    saved_to_disk: bool = False  # by HF datasets
    hub: bool = False  # a clone of the HF hub
    below: list[str] = field(default_factory=list)  # folders in it with an index
    names: list[str] = field(default_factory=list)
    suffixes: Counter[str] = field(default_factory=Counter)
    others: list[str] = field(default_factory=list)  # what no tool leaves beside tars
    lone: list[str] = field(default_factory=list)  # files that share their key with no other
    token_files: list[str] = field(default_factory=list)  # x.idx beside x.bin, and nothing else of that name

    def count(self, suffix: str) -> int:
        """The number of files with this end."""
        return self.suffixes[suffix]

    def beside_tables(self, suffixes: tuple[str, ...]) -> list[str]:
        """The files that neither have one of these ends nor are left by a tool, or for people, beside those that do."""
        known, begins = (*suffixes, *_BESIDE_TABLES), (*_OF_PEOPLE, "_")
        bases = {name: name.rpartition("/")[2].lower() for name in self.names}
        return [name for name, base in bases.items() if not base.endswith(known) and not base.startswith(begins)]

    def are_companions(self, suffix: str) -> bool:
        """Whether files with this end are tables beside tars of the same names."""
        tars = {name.partition(".")[0] for name in self.names if is_tar(name)}
        return all(name.partition(".")[0] in tars for name in self.names if name.lower().endswith(suffix))


def look_into(folder: Path) -> FolderMarks:
    """The marks of a folder. Raises OSError."""
    marks = FolderMarks(index=kind_in(folder))
    if marks.index:
        return marks
    saved = (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    marks.saved_to_disk = saved or (folder / "dataset_dict.json").is_file()
    marks.hub = any((folder / name).exists() for name in (".gitattributes", ".cache/huggingface", ".huggingface"))
    add_names(marks, _files_below(folder))
    indexes = [name for name in marks.names if name.endswith("/index.json") and kind_in((folder / name).parent)]
    marks.below = [name.removesuffix("/index.json") for name in indexes]
    return marks


def add_names(marks: FolderMarks, names: Iterable[str]) -> None:
    """Add the files with these names to the marks of a folder, or of what lies below a URL."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        marks.names.append(name)
        marks.suffixes[os.path.splitext(name)[1].lower()] += 1  # noqa: PTH122  # a Path per name is slow
        here, _, base = name.rpartition("/")
        groups.setdefault(f"{here}/{base.partition('.')[0]}", []).append(name)
    marks.lone = [names[0] for names in groups.values() if len(names) == 1]
    marks.others = [name for names in groups.values() for name in names if not _beside_tars(name, names)]
    marks.token_files = [
        names[1] for names in groups.values() if [name.rpartition(".")[2] for name in names] == ["bin", "idx"]
    ]


def _beside_tars(name: str, group: list[str]) -> bool:
    """Whether a file is a tar, or lies beside tars without being a sample: with a tar's name, or for people."""
    base = name.rpartition("/")[2].lower()
    if ".tar" in base or is_tar(base) or base.startswith(_OF_PEOPLE) or base == CLASSES:
        return True
    return base.endswith(_COMPANIONS) and (any(".tar" in other for other in group) or "stats" in base)


def _files_below(folder: Path) -> Iterator[str]:
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        prefix = os.path.relpath(here, folder)
        for name in files:
            if not is_hidden(name):
                yield name if prefix == "." else f"{prefix}/{name}"
