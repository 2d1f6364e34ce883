"""`FolderStore`: the files of a folder as samples, each file a part of the sample with its name up to the first dot.

    train/cat/0.jpg   train/dog/1.jpg   val/cat/2.jpg      →      with classes cls 0, 1, 0: of ["cat", "dog"]

Classes are the deepest folders of samples, numbered in the order of their names, as torchvision's ImageFolder does.
"""

from __future__ import annotations

import io
import os
from functools import cached_property
from typing import BinaryIO, Literal

import numpy as np

from savable_pipeline.core.files import is_out_of_handles, with_handles
from savable_pipeline.core.wording import counted, listed
from savable_pipeline.data.shards.index import IndexedFiles
from savable_pipeline.data.shards.part_types import find_part
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.data.shards.tar import split_name
from savable_pipeline.data.stores.raw_folder import LAST, FolderTable, merged_fault, without_dots
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.errors import ShardError

CLASS = "cls"
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe put in place of a file is not waited for


class FolderStore(RecordStore):
    """The files of a folder and those below it.

    `key_end` says which dot of a name ends the key; None: the first, unless that seems to merge samples, which is a
    `ShardError`. With `classes` the deepest folder of a sample is its part `cls`. Raises `ShardError`.
    """

    unit = "file"

    def __init__(
        self, found: IndexedFiles, *, key_end: Literal["first", "last"] | None = None, classes: bool = False
    ) -> None:
        self.found, self.root, self.address, self.entries = found, found.root, found.address, found.entries
        found.check_rows(0)
        self.table = FolderTable.of(found.blob(0))
        self._sizes, self._times, self._firsts, self._ends = (
            each.cast("q") for each in (self.table.sizes, self.table.times, self.table.firsts, self.table.ends)
        )
        self._last, self.has_classes = LAST in found.form.name, classes
        self._row: tuple[int, str, dict[str, int]] = -1, "", {}  # the sample asked for last: key, and files by part
        if key_end is None and self.table.merged is not None:
            raise ShardError(merged_fault(self.address, self.table.merged, 'key_end="{0}" (--key-end {0})'))

    def key(self, shard: int, row: int) -> str:
        """The path from the folder on, up to the dot that ends the key."""
        return self._sample(row)[1]

    def extensions(self, shard: int, row: int) -> list[str]:
        """The ends of the files' names; sorted, with `cls` among them."""
        files = self.files(row)
        return sorted([*files, CLASS]) if self._class(row) else [*files]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        """The bytes of a file. Raises `ShardError` if it was changed since the folder was indexed."""
        number = self._sample(row)[2].get(extension)
        if number is not None:
            return self._bytes(number)
        return self._other(row, extension)

    def _other(self, row: int, extension: str) -> bytes:
        """The class, or a part by its name in letters of another case."""
        name = find_part(extension, self.extensions(0, row))
        if name == CLASS and (found := self._class(row)):
            return b"%d" % self.classes.index(found)
        return self._bytes(self.files(row)[name])

    def open(self, shard: int, row: int, extension: str) -> BinaryIO:
        """See `RecordStore.open`: the file itself."""
        name = find_part(extension, self.extensions(shard, row))
        number = self.files(row).get(name)
        if number is None:
            return io.BytesIO(self.read(shard, row, name))
        descriptor = self._opened(number)
        try:
            self._check(number, descriptor)
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
        return dict(sorted({**sizes, CLASS: len(str(self.classes.index(found)))}.items())) if found else sizes

    def part_sizes(self) -> dict[str, Rows]:
        """See `RecordStore.part_sizes`."""
        found: dict[str, list[int]] = {}
        for row in range(len(self._firsts) - 1):
            for extension, size in self.sizes(0, row).items():
                found.setdefault(extension, []).append(size)
        return {extension: np.array(sizes, np.int64) for extension, sizes in found.items()}

    def left_out(self) -> str:
        """How many files are no parts, and why."""
        rejected = self.table.rejected
        if not rejected:
            return ""
        why = listed([f"{each.file}: {each.reason}" for each in rejected])
        return f"{self.address}: {counted(len(rejected), 'file')} left out with the samples of their names: {why}"

    def files(self, row: int) -> dict[str, int]:
        """The numbers of a sample's files, by part."""
        return self._sample(row)[2]

    def size(self, number: int) -> int:
        """The bytes of a file."""
        return self._sizes[number]

    def path(self, number: int) -> str:
        """A file's name, relative to the folder."""
        begin = self._ends[number - 1] if number else 0
        return str(self.table.names[begin : self._ends[number] - 1], "utf-8")

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes, by their number."""
        return sorted({class_of(self.key(0, row)) for row in range(len(self._firsts) - 1)} - {""})

    def _class(self, row: int) -> str:
        """The class of a sample; "" for one without."""
        return class_of(self._sample(row)[1]) if self.has_classes and CLASS not in self._sample(row)[2] else ""

    def _sample(self, row: int) -> tuple[int, str, dict[str, int]]:
        if self._row[0] != row:
            key, files = "", {}
            for number in range(self._firsts[row], self._firsts[row + 1]):
                name = self.path(number)
                found = split_name(without_dots(name) if self._last else name)
                assert found is not None, name
                key, files[found[1]] = found[0], number
            self._row = row, key, files
        return self._row

    def _bytes(self, number: int) -> bytes:
        descriptor = self._opened(number)
        try:
            wanted = self._sizes[number]
            data = os.read(descriptor, wanted)
            while len(data) < wanted and (more := os.read(descriptor, wanted - len(data))):  # Linux gives 2 GB at once
                data += more
            self._check(number, descriptor)  # after it: what was written meanwhile is told too
        except OSError as error:
            raise self._unreadable(number, error) from error
        finally:
            os.close(descriptor)
        return data

    def _opened(self, number: int) -> int:
        path = f"{self.root}/{self.path(number)}"
        try:
            return os.open(path, _FLAGS)
        except OSError as error:
            if not is_out_of_handles(error):
                raise self._unreadable(number, error) from error
        return with_handles(lambda: os.open(path, _FLAGS))

    def _check(self, number: int, descriptor: int) -> None:
        """Raises `ShardError` unless the file is as it was when the folder was indexed."""
        stat, size = os.fstat(descriptor), self._sizes[number]
        if stat.st_size != size or stat.st_mtime_ns != self._times[number]:
            self._forget()
            raise ShardError(
                f"{self.root}/{self.path(number)}: {size} bytes when the folder was indexed, {stat.st_size} now, "
                "written since; put the old file back, or start again, which indexes the folder again",
                reason="changed shard",
            )

    def _unreadable(self, number: int, error: OSError) -> ShardError:
        if isinstance(error, FileNotFoundError):
            self._forget()
        return ShardError(
            f"{self.root}/{self.path(number)}: {error.strerror}; it was there when the folder was indexed",
            reason="missing shard" if isinstance(error, FileNotFoundError) else "unreadable shard",
        )

    def _forget(self) -> None:
        """Drop the index, so that the next start looks at all files; not where a run goes on without a few."""
        if not self.found.tolerant:
            self.found.index_path.unlink(missing_ok=True)


def class_of(key: str) -> str:
    """The name of the deepest folder of a sample; "" without one."""
    return key.rpartition("/")[0].rpartition("/")[2]
