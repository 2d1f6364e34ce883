"""Samples of a folder of files: files whose paths are equal up to the first dot.

Each file is a part of its sample.

    a/cat.jpg  a/cat.txt  a/dog.seg.png      →      a/cat: jpg, txt      a/dog: seg.png

With `key_end="last"` the key ends at the last dot: a/dog.seg.png is a/dog.seg: png. The samples are sorted by key.
Classes are the top folders, numbered in the order of their names, as in torchvision's ImageFolder:

    cat/0.jpg   dog/1.jpg   dog/small/2.jpg      →      with classes cls 0, 1, 1: of ["cat", "dog"]

The folder is one shard, ".". Its blob in the index is the length of a `FolderTable`, and the table as MessagePack.
Indexing opens no file. A folder's time changes when a file is added, removed or renamed. If no folder's time changed,
the table is valid except for overwritten files, which raise an error when they are read.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from savable_pipeline.core.files import lacks_handles, read_regular, with_handles
from savable_pipeline.core.wording import counted, listed
from savable_pipeline.data.shards.byte_source import ByteSource, FileVersion
from savable_pipeline.data.shards.index import BlobIndex, FileBlob, Format, IndexedFiles, ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.indexing import at_first_writable, index_paths
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, IMAGE_PARTS, VIDEO_PARTS, are_merged, find_part
from savable_pipeline.data.shards.paths import ALL, PACKED_TARS, TARS_END, Shards, expand_specs, is_hidden
from savable_pipeline.data.shards.shard_list import Rows, ShardEntry, ShardList, ShardNames
from savable_pipeline.data.shards.tar import is_metadata, split_name
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.sample_names import Classes, FileNames, Reject, outside, parts_fault, printable
from savable_pipeline.data.stores.shard_files import unreadable_error
from savable_pipeline.errors import ShardError

log = logging.getLogger(__name__)

CLASS = "cls"
SPLITS = frozenset(("train", "training", "val", "valid", "validation", "dev", "test", "eval"))
_MEDIA_KINDS = {name: kind for kind, names in enumerate((IMAGE_PARTS, AUDIO_PARTS, VIDEO_PARTS)) for name in names}
_LONGEST_LIST = 1 << 24  # most bytes of a file of class names
# O_NONBLOCK, so that opening a pipe in place of a file does not wait
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_FIRST, _LAST = "\0first", "\0last"  # placeholders in messages for the setting of `key_end`
_FEW_FILES = 4096  # with more files than this, unchanged times of folders replace listing them
_QUIET_NS = 2_000_000_000  # the coarsest timestamp granularity of a file system
_TARS, _IS_TAR = (TARS_END, ".tar.idx", *PACKED_TARS), "already a shard: a tar or its index is no part of a sample"
_MANY_PARTS = 8  # a sample with more parts is only compared with samples of its own folder


class FolderTable(msgspec.Struct, frozen=True, array_like=True):
    """Files of a folder, in the order of their samples."""

    names: memoryview  # as in `ShardNames`: the names and their ends, int64 (files,)
    ends: memoryview
    sizes: memoryview  # int64 (files,), in bytes
    times: memoryview  # int64 (files,): last write of each, in ns
    firsts: memoryview  # int64 (samples + 1,): first file of each sample, then the number of files
    rejected: list[Reject]
    hidden: int  # number of hidden files and folders
    doubt: str  # why names may be misread, or ""; `_FIRST` and `_LAST` are placeholders for the setting of `key_end`
    folders: dict[str, FileVersion]
    started_ns: int  # when the listing started, in ns since 1970

    @classmethod
    def of(cls, blob: FileBlob) -> FolderTable:
        """Decode a table from an index blob. Raises ValueError."""
        return msgspec.msgpack.decode(blob[1:].data.cast("B")[: int(blob[0])], type=cls)

    def blob(self) -> bytes:
        """Encode the table as an index blob."""
        encoded = msgspec.msgpack.encode(self)
        return len(encoded).to_bytes(8, "little") + encoded + bytes(-len(encoded) % 8)

    @property
    def files(self) -> ShardNames:
        """Return the names of the files, relative to the folder."""
        return ShardNames(self.names, np.frombuffer(self.ends, "<i8"))

    def fault(self, root: str, option: str) -> str:
        """Return a warning that names may be misread, or "".

        `option` shows how `key_end` is set, with {} for its value.
        """
        doubt = self.doubt.replace(_FIRST, option.format("first")).replace(_LAST, option.format("last"))
        return f"{root}: {doubt}" if doubt else ""

    def is_fresh(self, root: Path) -> bool:
        """Return whether no folder has changed since two seconds before the listing.

        It is False for few files, which are always listed.
        """
        if len(self.sizes) // 8 <= _FEW_FILES:
            return False
        with contextlib.suppress(OSError):
            return all(
                FileVersion.of((root / name).stat()) == version and version.written_ns < self.started_ns - _QUIET_NS
                for name, version in self.folders.items()
            )
        return False


@dataclass(frozen=True, slots=True, eq=False)
class FolderFormat(Format):
    """Format of a folder that is one shard, with the settings that change its index."""

    key_end_last: bool = False
    allow_outside: bool = False

    def files(self, names: Sequence[str], heads: Mapping[str, bytes]) -> list[str]:
        """Return the name of the folder as a shard."""
        return [ALL]

    def for_settings(self, settings: dict[str, Any]) -> FolderFormat:
        """See `Format.for_settings`."""
        last, outside = settings.get("key_end") == "last", settings.pop("allow_outside", False)
        variant = ".".join(["key_end_last"] * last + ["allow_outside"] * outside)
        return replace(self, variant=variant, key_end_last=last, allow_outside=outside)

    def scan(self, root: Path, name: str) -> ShardTable:
        """Return the table of the folder. Raises OSError."""
        table = _scan(str(root), key_end_last=self.key_end_last, allow_outside=self.allow_outside)
        digest = xxh3_64(table.names)
        digest.update(table.sizes)
        size = int(np.frombuffer(table.sizes, "<i8").sum())
        entry = ShardEntry(ALL, size, len(table.firsts) // 8 - 1, digest.intdigest())
        return ShardTable(entry, table.blob())


def _read(file: ByteSource, name: str) -> ShardTable:
    raise NotImplementedError(f"{name}: a folder has no bytes")


def open_folder(files: Shards, form: Format, *, tolerant: bool = False, relists: bool = False) -> IndexedFiles:
    """Open the index of one folder, and build it if it is missing or outdated.

    With `relists`, the folder is listed again. A `tolerant` call keeps an index whose files were changed or lost.
    Raises `ShardError`.
    """
    specs = expand_specs(files)
    if len(specs) != 1 or not Path(specs[0]).is_dir():
        raise ShardError(f"{listed(specs)}: raw files are read as one folder. Name it, or mix several by sp.blend")
    root = Path(specs[0]).absolute()
    for path in index_paths(root, form.index_name, near=False) if not relists else ():
        if (index := _fresh(root, path, form)) is not None:
            return IndexedFiles(form, index, path, None, root, tolerant=tolerant)

    def build(path: Path) -> IndexedFiles:
        try:
            table = form.scan(root, ALL)
        except OSError as error:
            raise ShardError(f"{error.filename}: {error.strerror}: the folder cannot be read. Permit it") from error
        known = _existing_index(path, form)
        if known is None or not _remains_valid(known, table, tolerant and not relists):
            write_index(path, [table], form)
            known = BlobIndex(path, form.index_kind)
        return IndexedFiles(form, known, path, None, root, tolerant=tolerant)

    return at_first_writable(root, form.index_name, build, near=False)


def is_known(root: Path) -> bool:
    """Return whether a folder has an index and has not changed since it was indexed."""
    return any(_fresh(root, path, form) for form in _FORMS for path in index_paths(root, form.index_name, near=False))


def _existing_index(path: Path, form: Format) -> BlobIndex | None:
    """Return the existing index, or None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, ShardError):
        index = BlobIndex(path, form.index_kind)
        if index.is_whole(0):
            FolderTable.of(index.blob(0))  # raises for an index of another release
            return index
    return None


def _fresh(root: Path, path: Path, form: Format) -> BlobIndex | None:
    """Return the index at `path` if the folder has not changed since it was built, or None."""
    index = _existing_index(path, form) if path.exists() else None
    return index if index is not None and FolderTable.of(index.blob(0)).is_fresh(root) else None


def _remains_valid(index: BlobIndex, table: ShardTable, tolerant: bool) -> bool:
    """Return whether an existing index remains valid: it equals the table, or with `tolerant` has lost files."""
    new, old = FolderTable.of(np.frombuffer(table.rows, "<u8")), FolderTable.of(index.blob(0))
    if tolerant and old.folders[""].inode == new.folders[""].inode:  # not another folder of the same path
        sizes_now = dict(zip(new.files, np.frombuffer(new.sizes, "<i8").tolist(), strict=True))
        sizes = np.frombuffer(old.sizes, "<i8").tolist()
        if any(sizes_now.get(name) != size for name, size in zip(old.files, sizes, strict=True)):
            return True
    # with more files, the newer time of the table lets later opens trust the folders' times
    few = len(new.sizes) // 8 <= _FEW_FILES
    return few and msgspec.structs.replace(new, started_ns=0) == msgspec.structs.replace(old, started_ns=0)


@dataclass(slots=True)
class _File:
    """One file of the folder."""

    extension: str
    name: str
    size: int
    time_ns: int
    fault: str


class _Walk:
    """Listing of a folder and its subfolders."""

    def __init__(self, root: str, *, allow_outside: bool) -> None:
        self.root, self.allow_outside = root, allow_outside
        self.real_root = os.path.realpath(root)
        self.hidden = 0  # number of hidden files and folders
        self.folders: dict[str, FileVersion] = {}  # status of each folder when it was listed

    def files(self) -> Iterator[tuple[str, os.stat_result | None, str]]:
        """Yield name, status and fault of every file below the root, in arbitrary order."""
        folders = [""]
        while folders:
            folder = folders.pop()
            path = f"{self.real_root}/{folder}"
            self.folders[folder] = FileVersion.of(Path(path).stat())
            with os.scandir(path) as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    fault = self._link_fault(entry) if entry.is_symlink() else ""
                    if is_hidden(entry.name):
                        self.hidden += name != ".nv-meta"  # the index is in .nv-meta
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
        if not self.allow_outside and outside(self.real_root, str(target)):
            return "outside the source: a link leads there; --allow-outside takes it"
        if target in (parent := Path(entry.path).parent.resolve(), *parent.parents):
            return "link to a folder above it"
        return ""


def _scan(root: str, *, key_end_last: bool, allow_outside: bool) -> FolderTable:
    started_ns, walk = time.time_ns(), _Walk(root, allow_outside=allow_outside)
    found = [*walk.files()]
    others = FileNames(name for name, _, _ in found).no_samples()
    rejected: list[Reject] = []
    walk.hidden += len(others)
    with_samples = [(name, status, fault) for name, status, fault in found if name not in others]
    samples = _samples(with_samples, rejected, key_end_last)
    extensions = {key: [file.extension for file in files] for key, files in samples.items()}
    doubt = ("" if key_end_last else _doubt_of_merging(extensions)) or _doubt_of_kinds(samples)
    accepted: list[_File] = []
    firsts = [0]
    for key in sorted(samples):
        files = sorted(samples[key], key=lambda file: file.extension)
        parts = [(file.extension, file.name, file.size, file.fault) for file in files]
        fault, path = parts_fault(tar_key(key) if key_end_last else key, parts)
        if fault:
            part = next(file.extension.lower() for file in files if file.name == path)
            names_of_part = [file.name for file in files if file.extension.lower() == part]
            rejected += [Reject.of(printable(name), key, fault) for name in names_of_part]
        else:
            accepted += files
            firsts.append(len(accepted))
    rejected.sort(key=lambda reject: (reject.file, reject.key))
    names = ShardNames.of(file.name for file in accepted)
    columns = names.ends, [file.size for file in accepted], [file.time_ns for file in accepted], firsts
    arrays = (memoryview(np.asarray(each, "<i8").tobytes()) for each in columns)
    return FolderTable(names.text, *arrays, rejected, walk.hidden, doubt, walk.folders, started_ns)  # type: ignore[call-arg, arg-type]


def _samples(
    found: list[tuple[str, os.stat_result | None, str]], rejected: list[Reject], key_end_last: bool
) -> dict[str, list[_File]]:
    """Group files by key. Files that are not parts of samples are added to `rejected`."""
    samples: dict[str, list[_File]] = {}
    for name, status, fault in found:
        key_and_extension = split_name(without_dots(name) if key_end_last else name)
        if key_and_extension is None:
            reason = "named like metadata (__name__ or ._name)" if is_metadata(name) else "no extension"
            rejected.append(Reject(printable(name), "", fault or reason))
            continue
        key, extension = key_and_extension
        fault = fault or (_IS_TAR if name.lower().endswith(_TARS) else "")
        if key_end_last:
            key = name.rpartition(".")[0]
        size, time_ns = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
        samples.setdefault(key, []).append(_File(extension, name, size, time_ns, fault))
    return samples


def _doubt_of_kinds(samples: dict[str, list[_File]]) -> str:
    """Return a warning of samples that seem to have two files of one kind by chance, or "".

    Two extensions belong to one sample if half of the samples that have the more frequent one have both.
    """
    counts = Counter(file.extension for files in samples.values() for file in files)
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}  # names, by pair of extensions
    for files in samples.values():
        plain = sorted((file.extension, file.name) for file in files if file.extension.lower() in _MEDIA_KINDS)
        for (one, name), (other, other_name) in itertools.combinations(plain, 2):
            if _MEDIA_KINDS[one.lower()] == _MEDIA_KINDS[other.lower()]:
                found.setdefault((one, other), []).append((name, other_name))
    doubtful = [
        pair
        for (one, other), pairs in found.items()
        if one.lower() == other.lower() or 2 * len(pairs) < max(counts[one], counts[other])
        for pair in pairs
    ]
    if not doubtful:
        return ""
    count, (one, other) = counted(len(doubtful), "sample has", "samples have"), map(printable, min(doubtful))
    return (
        f"{count} two files of one kind, such as {one} and {other}. Rename one of them, or give {_FIRST} if both are "
        "parts of one sample"
    )


def _doubt_of_merging(samples: dict[str, list[str]]) -> str:
    """Return a warning of samples that dots in file names seem to have merged, or "". See `are_merged`.

    A sample with many parts is compared only with samples of its own folder, because names may restart in each folder.
    """
    if not any("." in part for parts in samples.values() for part in parts):
        return ""
    anywhere = Counter(part for parts in samples.values() for part in parts)
    inside: dict[str, Counter[str]] = {}
    for key, parts in samples.items():
        inside.setdefault(key.rpartition("/")[0], Counter()).update(parts)
    merged = {
        key: parts
        for key, parts in samples.items()
        if are_merged(parts, inside[key.rpartition("/")[0]] if len(parts) > _MANY_PARTS else anywhere)
    }
    if not merged:
        return ""
    key = max(sorted(merged), key=lambda key: len(merged[key]))
    part, files = printable(min(merged[key])), counted(sum(map(len, merged.values())), "file")
    name = f"{printable(key)}.{part}"
    return (
        f"a key ends at the first dot of a file's name, so {files} would become {counted(len(merged), 'sample')}: "
        f"{name} would be the part {part} of the sample {printable(key)}. Pass {_LAST} to end keys at the last dot, "
        f"so it is of the sample {name.rpartition('.')[0]}, or {_FIRST} if these are parts of one sample"
    )


def tar_key(key: str) -> str:
    """Return the key that a sample has in a tar, where it ends at the first dot.

    a.b/c.d becomes a.b/c_d.
    """
    folder, slash, base = key.rpartition("/")
    return f"{folder}{slash}{base.replace('.', '_')}"


def without_dots(name: str) -> str:
    """Return a file's name with all dots but the last replaced."""
    stem, dot, extension = name.rpartition(".")
    return f"{tar_key(stem)}{dot}{extension}"


class _Sample(NamedTuple):
    """A sample of a folder: its row, its key, and the numbers of its files by part."""

    row: int
    key: str
    files: dict[str, int]


class FolderStore(RecordStore):
    """Files of a folder and its subfolders.

    `key_end` says which dot of a name ends the key. None means the first, and raises `ShardError` if that seems to
    merge samples. With `classes`, each sample has a part `cls`, the number of its top folder. Raises `ShardError`.
    """

    unit = "file"
    found: IndexedFiles

    def __init__(
        self, found: IndexedFiles, *, key_end: Literal["first", "last"] | None = None, classes: Classes = False
    ) -> None:
        self.found, self.root, self.address, self.entries = found, found.root, found.address, found.entries
        found.check_rows(0)
        self.table = FolderTable.of(found.blob(0))
        self._sizes, self._times, self._firsts, self._ends = (
            each.cast("q") for each in (self.table.sizes, self.table.times, self.table.firsts, self.table.ends)
        )
        self.keys_end_last = key_end == "last"
        self._last_sample = _Sample(-1, "", {})  # the last one that was requested
        if key_end is None and (fault := self.table.fault(self.address, 'key_end="{0}" (--key-end {0})')):
            raise ShardError(fault)
        self.classes = [] if classes is False else self._class_names(classes)
        self._class_numbers = {name: number for number, name in enumerate(self.classes)}
        if self.classes:  # the digest includes the class names, because other class numbers are other samples
            (entry,) = self.entries
            digest = entry.digest ^ xxh3_64_intdigest("\0".join(self.classes).encode("utf-8", "surrogateescape"))
            self.entries = ShardList.of([msgspec.structs.replace(entry, digest=digest)])
            log.info("%s: %s: %s", self.address, counted(len(self.classes), "class", "classes"), listed(self.classes))

    def key(self, shard: int, row: int) -> str:
        """Return the path within the folder, up to the dot that ends the key."""
        return self._sample(row).key

    def extensions(self, shard: int, row: int) -> list[str]:
        """Return the sorted extensions of the sample's files, and `cls`."""
        files = self.files(row)
        return sorted([*files, CLASS]) if self._class(row) else [*files]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """Return the bytes of a file.

        Raises `ShardError` if it was changed since the folder was indexed.
        """
        if (number := self._sample(row).files.get(extension)) is not None:
            return self._bytes(number)
        return self._read_other(row, extension)

    def _read_other(self, row: int, extension: str) -> bytes:
        """Return the number of the class, or a part whose name differs from `extension` only in case."""
        name = find_part(extension, self.extensions(0, row))
        if name == CLASS and (found := self._class(row)):
            return b"%d" % self._class_numbers[found]
        return self._bytes(self.files(row)[name])

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        """See `RecordStore.open`: the file itself."""
        name = find_part(extension, self.extensions(shard, row))
        if (number := self.files(row).get(name)) is None:
            return io.BytesIO(self.read(shard, row, name))
        descriptor = self._open_file(number)
        try:
            self._check_unchanged(number, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb")

    def head(self, shard: int, row: int, extension: str, limit: int) -> tuple[bytes, int]:
        """See `RecordStore.head`."""
        with self.open(shard, row, extension) as file:
            return file.read(limit), file.seek(0, os.SEEK_END)

    def sizes(self, shard: int, row: int) -> dict[str, int]:
        """See `RecordStore.sizes`."""
        sizes = {extension: self._sizes[number] for extension, number in self.files(row).items()}
        found = self._class(row)
        return dict(sorted({**sizes, CLASS: len(str(self._class_numbers[found]))}.items())) if found else sizes

    def part_sizes(self) -> dict[str, Rows]:
        """See `RecordStore.part_sizes`."""
        found: dict[str, list[int]] = {}
        for row in range(len(self._firsts) - 1):
            for extension, size in self.sizes(0, row).items():
                found.setdefault(extension, []).append(size)
        return {extension: np.array(sizes, np.int64) for extension, sizes in found.items()}

    def rejects_warning(self) -> str:
        """Return a warning with the number of files that are not parts, and why."""
        rejected = self.table.rejected
        if not rejected:
            return ""
        why = listed([f"{each.file}: {each.reason}" for each in rejected])
        return f"{self.address}: {counted(len(rejected), 'file')} left out with the samples of their names: {why}"

    def rejects(self) -> list[Reject]:
        """See `StoreFacts.rejects`."""
        return self.table.rejected

    def files(self, row: int) -> dict[str, int]:
        """Return the numbers of a sample's files, by part."""
        return self._sample(row).files

    def size(self, number: int) -> int:
        """Return the size of a file in bytes."""
        return self._sizes[number]

    def path(self, number: int) -> str:
        """Return a file's name, relative to the folder."""
        begin = self._ends[number - 1] if number else 0
        return str(self.table.names[begin : self._ends[number] - 1], "utf-8")

    def _class(self, row: int) -> str:
        """Return the class of a sample, or ""."""
        sample = self._sample(row)
        return class_of(sample.key) if self.classes and CLASS not in sample.files else ""

    def _class_names(self, classes: Literal[True] | Sequence[str] | str | os.PathLike[str]) -> list[str]:
        """Return the names of the classes in order of their numbers. Raises `ShardError` for a sample without one."""
        folders = sorted({name.partition("/")[0] for name in self.table.folders} - {""})
        names = folders if classes is True else class_names(classes)
        used = {name.partition("/")[0] for name in self.table.files if "/" in name}
        top_files = [name for name in self.table.files if "/" not in name]
        loose = [name for name in top_files if name.rpartition(".")[2].lower() in _MEDIA_KINDS]
        if loose or (unknown := sorted(used.difference(names))):
            samples = f"{loose[0]} is in no folder, so it has" if loose else f"the samples in {listed(unknown)} have"
            raise ShardError(f"{self.address}: {samples} no class. Move them, or name their folders in classes=")
        if classes is True and {name.lower() for name in folders} <= SPLITS:
            raise ShardError(
                f"{self.address}: no class has a folder here, only splits have ({listed(folders)}). Read each split by "
                "itself, and pass the training split's folder as classes= to the others"
            )
        return names

    def _sample(self, row: int) -> _Sample:
        if self._last_sample.row != row:
            key, files = "", dict[str, int]()
            for number in range(self._firsts[row], self._firsts[row + 1]):
                name = self.path(number)
                key_and_extension = split_name(without_dots(name) if self.keys_end_last else name)
                assert key_and_extension is not None, name
                key, extension = key_and_extension
                files[extension] = number
            self._last_sample = _Sample(row, name.rpartition(".")[0] if self.keys_end_last else key, files)
        return self._last_sample

    def _bytes(self, number: int) -> bytes:
        """Return the bytes of a file. Raises `ShardError`."""
        descriptor = self._open_file(number)
        try:
            wanted = self._sizes[number]
            data = os.read(descriptor, wanted)
            # Linux returns at most 2 GB at once
            while len(data) < wanted and (more := os.read(descriptor, wanted - len(data))):
                data += more
            self._check_unchanged(number, descriptor)  # after the read, so that a write during the read is detected
        except OSError as error:
            raise self._unreadable(number, error) from error
        finally:
            os.close(descriptor)
        return data

    def _open_file(self, number: int) -> int:
        path = f"{self.root}/{self.path(number)}"
        try:
            return os.open(path, _FLAGS)
        except OSError as error:
            if not lacks_handles(error):
                raise self._unreadable(number, error) from error
        return with_handles(lambda: os.open(path, _FLAGS))

    def _check_unchanged(self, number: int, descriptor: int) -> None:
        """Raise `ShardError` unless the file is as it was when the folder was indexed."""
        stat, size = os.fstat(descriptor), self._sizes[number]
        if stat.st_size != size or stat.st_mtime_ns != self._times[number]:
            self._forget_index()
            raise ShardError(
                f"{self.root}/{self.path(number)}: {size} bytes when indexed, {stat.st_size} now. Restore the file, or "
                "start again to index the folder",
                reason="changed shard",
            )

    def _unreadable(self, number: int, error: OSError) -> ShardError:
        if isinstance(error, FileNotFoundError):
            self._forget_index()
        return unreadable_error(f"{self.root}/{self.path(number)}", error)

    def _forget_index(self) -> None:
        """Delete the index, so that the next start checks all files, unless the run tolerates lost files."""
        if not self.found.tolerant:
            self.found.index_path.unlink(missing_ok=True)


def class_of(key: str) -> str:
    """Return the name of a sample's top folder, or ""."""
    return key.partition("/")[0] if "/" in key else ""


def class_names(classes: Sequence[str] | str | os.PathLike[str]) -> list[str]:
    """Return the names of classes in order of their numbers.

    `classes` is a list of them, a file with a JSON list or lines, or the folder of a data set with the same classes.

    Raises ValueError if it is none of these, `ShardError`.
    """
    found: Any = classes
    if isinstance(classes, str | os.PathLike):
        path = Path(classes)
        if path.is_dir():
            return FolderStore(open_folder(path, FOLDER), key_end="first", classes=True).classes
        try:
            text = read_regular(path, _LONGEST_LIST).decode()
            found = msgspec.json.decode(text) if text.lstrip().startswith("[") else re.findall(r"[^\r\n]+", text)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"classes={str(path)!r}: {error}. Pass a folder, or a file with a name a line") from error
    names: list[str] = [*found]
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"classes={classes!r}: pass the names of the folders in their order, each once")
    return names


FOLDER = FolderFormat("folder", (ALL,), _read, FolderStore, ("key_end", "classes", "allow_outside"), no_rows=bytes(8))
_SETTINGS = [{"key_end": end, "allow_outside": allowed} for end in ("", "last") for allowed in (False, True)]
_FORMS = [FOLDER.for_settings(settings) for settings in _SETTINGS]
FOLDER_INDEXES = [form.index_name for form in _FORMS]
