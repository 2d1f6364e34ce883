"""`RecordFolder`: a folder whose index.json names files of records, on a disk or behind a URL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.tools.convert.remote_folder import RemoteFolder
from savable_pipeline.tools.convert.source_file import open_source, place_behind
from savable_pipeline.tools.convert.stretches import RecordFile

INDEX = "index.json"


class RecordFolder(Protocol):
    """The folder `root`, and which of its files are there."""

    root: str

    def look_for(self, names: Iterable[str], /) -> None:
        """Says which names may be asked for. Raises `RemoteError`."""

    def size(self, name: str, /) -> int | None:
        """The bytes of a file; None if there is none of this name."""

    def file(self, name: str, packed: str = "", content_size: int | None = None) -> RecordFile:
        """A file that is there, to be read; see `RecordFile`."""

    def place(self) -> str:
        """Which folder behind a URL this is: see `place_behind`; empty on a disk."""


class FolderOnDisk:
    """A `RecordFolder` on a disk."""

    def __init__(self, root: Path) -> None:
        self._path, self.root = root, str(root)

    def look_for(self, names: Iterable[str]) -> None:
        """Nothing: the disk is near."""

    def size(self, name: str) -> int | None:
        """See `RecordFolder.size`."""
        path = self._path / name
        return path.stat().st_size if is_inside(name) and path.is_file() else None

    def file(self, name: str, packed: str = "", content_size: int | None = None) -> RecordFile:
        """See `RecordFolder.file`."""
        return RecordFile.at(self._path / name, packed, content_size)

    def place(self) -> str:
        """Nothing: see `place_of`."""
        return ""


class FolderBehindUrl:
    """A `RecordFolder` behind a URL, of the files that were looked for."""

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._folder = RemoteFolder(self.root, "", {})

    def look_for(self, names: Iterable[str]) -> None:
        """See `RecordFolder.look_for`."""
        self._folder = RemoteFolder.at(self.root, filter(is_inside, names))

    def size(self, name: str) -> int | None:
        """See `RecordFolder.size`."""
        return self._folder.files[name][0] if name in self._folder.files else None

    def file(self, name: str, packed: str = "", content_size: int | None = None) -> RecordFile:
        """See `RecordFolder.file`."""
        size = self._folder.files[name][0]
        return RecordFile(f"{self.root}/{name}", size, 0, packed, content_size, self._folder)

    def place(self) -> str:
        """See `RecordFolder.place`."""
        return place_behind(self.root, (stamp for _, stamp in self._folder.files.values()))


def folder_at(path: Path | str) -> RecordFolder:
    """The folder of a source; a URL is a str."""
    return FolderOnDisk(path) if isinstance(path, Path) else FolderBehindUrl(path)


def index_of(path: Path | str) -> bytes:
    """The index of the folder of a source. Raises OSError; of a URL `ShardError`, `RemoteError`."""
    with open_source(path / INDEX if isinstance(path, Path) else f"{path.rstrip('/')}/{INDEX}") as file:
        return file.read()


def in_turn(files: Sequence[RecordFile]) -> Iterator[RecordFile]:
    """Files that are read one after the other: each is announced while the one before it is read."""
    for file, later in zip(files, [*files[1:], None], strict=True):
        file.expect()
        if later is not None:
            later.expect()
        yield file
