"""The format of a folder of files: those that share a path up to their first dot are a sample. No file is opened.

    a/cat.jpg  a/cat.txt  a/dog.seg.png      →      a/cat: jpg, txt      a/dog: seg.png

With `key_end="last"` they share it up to the last dot, and dots before it become "_", since readers of a tar end a key
at the first: a/dog.seg.png is a/dog_seg: png. The samples are sorted by key.

The folder is one shard, "."; its places in the index are the length of a `FolderTable`, and the table as MessagePack.
A folder's time changes when a file is added to it, removed or renamed: while none has, the table is right but for files
that were overwritten, which are an error when they are read.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from xxhash import xxh3_64

from savable_pipeline.core.wording import counted, listed
from savable_pipeline.data.shards.byte_source import ByteSource, FileVersion
from savable_pipeline.data.shards.index import BlobIndex, FileBlob, FileFormat, IndexedFiles, ShardIndex, ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.indexing import in_first_place, index_places
from savable_pipeline.data.shards.part_types import are_merged
from savable_pipeline.data.shards.paths import ALL, ShardKind, Shards, spelled_out
from savable_pipeline.data.shards.shard_list import ShardEntry, ShardNames
from savable_pipeline.data.shards.tar import is_metadata, split_name
from savable_pipeline.data.stores.sample_names import Reject, is_hidden, outside, parts_fault, printable
from savable_pipeline.errors import ShardError

LAST, OUTSIDE = "-last", "-outside"  # in the names of formats: where keys end, and whether links lead anywhere
_LOOKED_AT = 4096  # files; of more, the times of folders are believed
_QUIET_NS = 2_000_000_000  # the coarsest clock of a file system
_MANY = 8  # parts of a sample of which most are not found elsewhere by chance


class Merged(msgspec.Struct, frozen=True, array_like=True):
    """What dots in names seem to have merged: files, samples, a key, a part of it, the key that it should have."""

    files: int
    samples: int
    key: str
    part: str
    last: str


class FolderTable(msgspec.Struct, frozen=True, array_like=True):
    """The files of a folder, in the order of their samples."""

    names: memoryview  # as of `ShardNames`; with their ends, int64 (files,)
    ends: memoryview
    sizes: memoryview  # int64 (files,), in bytes
    times: memoryview  # int64 (files,): when each was written last, in ns
    firsts: memoryview  # int64 (samples + 1,): the first file of each sample, then the number of files
    rejected: list[Reject]
    hidden: int  # hidden files and folders
    merged: Merged | None
    folders: dict[str, FileVersion]
    began_ns: int  # when the first was listed

    @classmethod
    def of(cls, blob: FileBlob) -> FolderTable:
        """The table in these places. Raises ValueError."""
        return msgspec.msgpack.decode(blob[1:].data.cast("B")[: int(blob[0])], type=cls)

    def blob(self) -> bytes:
        """The table as places."""
        encoded = msgspec.msgpack.encode(self)
        return len(encoded).to_bytes(8, "little") + encoded + bytes(-len(encoded) % 8)

    @property
    def files(self) -> ShardNames:
        """The names of the files, relative to the folder."""
        return ShardNames(self.names, np.frombuffer(self.ends, "<i8"))

    def is_fresh(self, root: Path) -> bool:
        """Whether no folder has changed since two seconds before they were listed; of few files all are looked at."""
        if len(self.sizes) // 8 <= _LOOKED_AT:
            return False
        with contextlib.suppress(OSError):
            return all(
                FileVersion.of((root / name).stat()) == look and look.written_ns < self.began_ns - _QUIET_NS
                for name, look in self.folders.items()
            )
        return False


@dataclass(frozen=True, slots=True)
class FolderFormat(FileFormat):
    """The format of folders."""

    def scan(self, root: Path, name: str) -> ShardTable:
        """The table of a folder. Raises OSError."""
        table = _scanned(str(root), key_end_last=LAST in self.name, allow_outside=OUTSIDE in self.name)
        digest = xxh3_64(table.names)
        digest.update(table.sizes)
        size = int(np.frombuffer(table.sizes, "<i8").sum())
        entry = ShardEntry(ALL, size, len(table.firsts) // 8 - 1, digest.intdigest())
        return ShardTable(entry, table.blob())


def _read(file: ByteSource, name: str) -> ShardTable:
    raise NotImplementedError(f"{name}: a folder has no bytes")


def _is_as_indexed(file: ByteSource, index: ShardIndex, number: int) -> bool:
    return True  # each file is looked at when it is read


def _format(name: str, constant: str) -> FolderFormat:
    return FolderFormat(name, ShardKind((ALL,)), f"{__name__}:{constant}", _read, _is_as_indexed, no_rows=bytes(8))


FOLDER = _format("folder", "FOLDER")
FOLDER_LAST = _format(f"folder{LAST}", "FOLDER_LAST")
FOLDER_OUTSIDE = _format(f"folder{OUTSIDE}", "FOLDER_OUTSIDE")
FOLDER_OUTSIDE_LAST = _format(f"folder{OUTSIDE}{LAST}", "FOLDER_OUTSIDE_LAST")


def open_folder(files: Shards, form: FileFormat, *, tolerant: bool = False, looked_at: bool = False) -> IndexedFiles:
    """The index of one folder, made if it is not right; with `looked_at` anew.

    If it is `tolerant`, an index stays whose files were changed or lost since. Raises `ShardError`.
    """
    specs = spelled_out(files)
    if len(specs) != 1 or not Path(specs[0]).is_dir():
        raise ShardError(f"{listed(specs)}: raw files are read as one folder: name it, or blend several by sp.blend")
    root = Path(specs[0]).absolute()
    for path in index_places(root, form.index_name) if not looked_at else ():
        if (index := _fresh(root, path, form)) is not None:
            return IndexedFiles(form, index, path, None, root, tolerant=tolerant)

    def make(path: Path) -> IndexedFiles:
        try:
            table = form.scan(root, ALL)
        except OSError as error:
            raise ShardError(f"{error.filename}: {error.strerror}: the folder cannot be read; permit it") from error
        known = _known(path, form)
        if known is None or not _stays(known, table, tolerant and not looked_at):
            write_index(path, [table], form.name)
            known = BlobIndex(path, form.name)
        return IndexedFiles(form, known, path, None, root, tolerant=tolerant)

    return in_first_place(root, form.index_name, make)


def is_known(root: Path) -> bool:
    """Whether there is an index of this folder in which nothing was added, removed or renamed since."""
    forms = (FOLDER, FOLDER_LAST, FOLDER_OUTSIDE, FOLDER_OUTSIDE_LAST)
    return any(_fresh(root, path, form) for form in forms for path in index_places(root, form.index_name))


def _known(path: Path, form: FileFormat) -> BlobIndex | None:
    """The index that is there; None for a damaged one too."""
    with contextlib.suppress(OSError, ValueError, ShardError):
        index = BlobIndex(path, form.name)
        return index if index.is_whole(0) else None
    return None


def _fresh(root: Path, path: Path, form: FileFormat) -> BlobIndex | None:
    index = _known(path, form) if path.exists() else None
    return index if index is not None and FolderTable.of(index.blob(0)).is_fresh(root) else None


def _stays(index: BlobIndex, table: ShardTable, tolerant: bool) -> bool:
    """Whether an index stays that is there: it has this table, but for the time; or has files that are lost."""
    ours, theirs = FolderTable.of(np.frombuffer(table.rows, "<u8")), FolderTable.of(index.blob(0))
    if tolerant:
        here = dict(zip(ours.files, np.frombuffer(ours.sizes, "<i8").tolist(), strict=True))
        sizes = np.frombuffer(theirs.sizes, "<i8").tolist()
        if any(here.get(name) != size for name, size in zip(theirs.files, sizes, strict=True)):
            return True
    few = len(ours.sizes) // 8 <= _LOOKED_AT  # of more, the time says that their folders may be believed
    return few and msgspec.structs.replace(ours, began_ns=0) == msgspec.structs.replace(theirs, began_ns=0)


@dataclass(slots=True)
class _File:
    extension: str
    name: str
    size: int
    time_ns: int
    fault: str


class _Walk:
    """What is met on the way through a folder."""

    def __init__(self, root: str, *, allow_outside: bool) -> None:
        self.root, self.allow_outside = root, allow_outside
        self.real = os.path.realpath(root)
        self.hidden = 0
        self.folders: dict[str, FileVersion] = {}

    def files(self) -> Iterator[tuple[str, os.stat_result | None, str]]:
        """Name, status and fault of every file below the root, in no particular order."""
        folders = [""]
        while folders:
            folder = folders.pop()
            here = f"{self.real}/{folder}"
            self.folders[folder] = FileVersion.of(Path(here).stat())
            with os.scandir(here) as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    fault = self._link_fault(entry) if entry.is_symlink() else ""
                    if is_hidden(entry.name):
                        self.hidden += name != ".nv-meta"  # where the index lies
                    elif entry.is_dir() and not fault:
                        folders.append(f"{name}/")
                    elif entry.is_file() and not fault:
                        yield name, entry.stat(), ""
                    else:
                        yield name, None, fault or "not a regular file"

    def _link_fault(self, entry: os.DirEntry[str]) -> str:
        target = Path(entry.path).resolve()
        if not target.exists():
            return "missing file: the link leads nowhere"
        if not self.allow_outside and outside(self.real, str(target)):
            return "outside the source: a link leads there; --allow-outside takes it"
        if target in (here := Path(entry.path).parent.resolve(), *here.parents):
            return "link to a folder above it"
        return ""


def _scanned(root: str, *, key_end_last: bool, allow_outside: bool) -> FolderTable:
    began, walk = time.time_ns(), _Walk(root, allow_outside=allow_outside)
    rejected: list[Reject] = []
    samples = _samples(walk, rejected, key_end_last)
    merged = None if key_end_last else _merged({k: [file.extension for file in fs] for k, fs in samples.items()})
    kept: list[_File] = []
    firsts = [0]
    for key in sorted(samples):
        files = sorted(samples[key], key=lambda file: file.extension)
        fault, path = parts_fault(key, [(file.extension, file.name, file.size, file.fault) for file in files])
        if fault:
            rejected.append(Reject.of(printable(path), key, fault))
        else:
            kept += files
            firsts.append(len(kept))
    rejected.sort(key=lambda reject: (reject.file, reject.key))
    names = ShardNames.of(file.name for file in kept)
    columns = names.ends, [file.size for file in kept], [file.time_ns for file in kept], firsts
    arrays = (memoryview(np.asarray(each, "<i8").tobytes()) for each in columns)
    return FolderTable(names.text, *arrays, rejected, walk.hidden, merged, walk.folders, began)  # type: ignore[call-arg, arg-type]


def _samples(walk: _Walk, rejected: list[Reject], key_end_last: bool) -> dict[str, list[_File]]:
    """The files by key; what is no part of a sample becomes a reject."""
    samples: dict[str, list[_File]] = {}
    stems: dict[str, str] = {}  # names up to the last dot, by the key that they become
    for name, status, fault in walk.files():
        parts = split_name(without_dots(name) if key_end_last else name)
        if parts is None:
            unread = "readers take it for metadata" if is_metadata(name) else "no extension"
            rejected.append(Reject(printable(name), "", fault or unread))
            continue
        key, extension = parts
        if key_end_last and (stem := stems.setdefault(key, name.rpartition(".")[0])) != name.rpartition(".")[0]:
            fault = fault or f"two names with one key: {stem} and {name} would both be {key}"
        size, time_ns = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
        samples.setdefault(key, []).append(_File(extension, name, size, time_ns, fault))
    return samples


def _merged(samples: dict[str, list[str]]) -> Merged | None:
    """The samples, parts by key, that dots in the names of files seem to have merged: `are_merged`.

    Of many parts the same ones are looked for in the sample's own folder alone: in each, names may begin anew.
    """
    if not any("." in part for parts in samples.values() for part in parts):
        return None
    anywhere = Counter(part for parts in samples.values() for part in parts)
    inside: dict[str, Counter[str]] = {}
    for key, parts in samples.items():
        inside.setdefault(key.rpartition("/")[0], Counter()).update(parts)
    merged = {
        key: parts
        for key, parts in samples.items()
        if are_merged(parts, inside[key.rpartition("/")[0]] if len(parts) > _MANY else anywhere)
    }
    if not merged:
        return None
    key = max(sorted(merged), key=lambda key: len(merged[key]))
    part = min(merged[key])
    last = without_dots(f"{key}.{part}").rpartition(".")[0]
    return Merged(sum(map(len, merged.values())), len(merged), printable(key), printable(part), printable(last))


def merged_fault(root: str, found: Merged, option: str) -> str:
    """What is wrong with names that seem to merge samples; `option` is how where keys end is named here."""
    return (
        f"{root}: a key ends at the first dot of a file's name, so that {counted(found.files, 'file')} would make "
        f"{counted(found.samples, 'sample')}: {found.key}.{found.part} would be of the sample {found.key} the part "
        f"{found.part}. Give {option.format('last')} to end keys at the last dot, which makes it the sample "
        f"{found.last}; or {option.format('first')} if these are parts of one sample"
    )


def without_dots(name: str) -> str:
    """A file's name in which the last dot is the only one."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.rpartition(".")
    return f"{folder}{slash}{stem.replace('.', '_')}{dot}{extension}"
