"""The readers of raw files: folders of them, and tables that name them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Unpack

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderData, ReaderSettings


class FolderReader(RecordReader):
    """Yields the samples of a lane's share of a folder of files, in the order of `sp.TarShardReader`.

    Files that share a path up to their first dot are a sample, with that path as its key: `cat/1.jpg` and `cat/1.txt`
    are `cat/1`, of the parts `jpg` and `txt`; these are the samples that `savable convert` writes. Names and sizes are
    indexed on first use. A file that was changed since is an error; with files added or removed, a state of before is
    refused.

    Args:
        folder: The folder, with its subfolders.
        lane: The lane of the pipeline.
        key_end: The dot of a name that ends the key; with "last", dots before it become "_". None: the first, and an
            error where that seems to merge files that are samples of their own.
        classes: Whether the name of a sample's deepest folder is its part `cls`, as a number: its place among the
            sorted names.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong.
        ShardError: The folder cannot be read, or a file was changed since it was indexed.

    Example:
        >>> for name in ("cat/1.txt", "cat/2.txt", "dog/1.txt"):
        ...     Path("pets", name).parent.mkdir(parents=True, exist_ok=True)
        ...     _ = Path("pets", name).write_text("a pet")
        >>> samples = custom.FolderReader("pets", sp.Lane(), classes=True, shuffle=False, epochs=1)
        >>> [(sample.key, list(sample), sample["cls"]) for sample in samples]
        [('cat/1', ['cls', 'txt'], b'0'), ('cat/2', ['cls', 'txt'], b'0'), ('dog/1', ['cls', 'txt'], b'1')]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        lane: Lane,
        *,
        key_end: Literal["first", "last"] | None = None,
        classes: bool = False,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        if key_end not in ("first", "last", None):
            raise ValueError(f"FolderReader: key_end must be 'first' or 'last', not {key_end!r}")
        self.files = os.fspath(folder)
        self.names: dict[str, Any] = {"key_end": key_end, "classes": classes}
        data = ReaderData.of_files("folder", self.files, lane, (key_end, classes), **self.names)
        super().__init__(data, lane, **settings)

    def settings(self) -> dict[str, Any]:
        """The settings of every reader, and those of the names; no `key_end` is that of the first dot."""
        return {**super().settings(), **self.names, "key_end": self.names["key_end"] or "first"}


class TableReader(RecordReader):
    """Yields the rows of a lane's share of tables as samples; `kind` of a subclass is that of the tables."""

    kind: ClassVar[str]

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
        key: str | None = None,
        file_fields: Sequence[str] | None = None,
        files_from: str | os.PathLike[str] | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        self.files, self.key = as_names(files), key
        options = key, None if file_fields is None else tuple(file_fields), files_from
        given: dict[str, Any] = dict(zip(("key", "file_fields", "files_from"), options, strict=True))
        super().__init__(ReaderData.of_files(self.kind, self.files, lane, options, **given), lane, **settings)

    def settings(self) -> dict[str, Any]:
        """The settings of every reader, the key, and the fields that name files."""
        fields: Sequence[str] = self.dataset.store.fields  # type: ignore[attr-defined]  # of a `TableStore`
        return {**super().settings(), "key": self.key, "file_fields": [*fields]}


class CsvReader(TableReader):
    r"""Yields the rows of a lane's share of CSV and TSV files as samples, in the order of `sp.TarShardReader`.

    The part `json` is an object of the texts of the cells, null for an empty one, as `savable convert` writes it. Files
    that cells name are parts too, called by their ends: `image` with `cats/1.jpg` is `jpg`. The first line names the
    columns. The places of rows are indexed on first use.

    Args:
        files: A folder of tables alone (with its subfolders), a glob, a brace pattern, one file, a URL, or a list of
            these.
        lane: The lane of the pipeline.
        key: The column with a sample's key. None: the key is `FILE:ROW`.
        file_fields: The columns that name files, as "column" or "column=part"; none if empty. None: those where most
            cells are paths of files, and those with one of the names image, audio, video, file and file_name.
        files_from: The folder that these paths are relative to; nothing outside of it is read. None: that of the table.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong, or the first line is a row.
        ShardError: A file is damaged, or one that a row names is missing, or newer than the index.
        RemoteError: A server cannot be reached.

    Example:
        >>> _ = Path("rows.csv").write_text("id,caption\n0,a cat\n1,\n")
        >>> samples = custom.CsvReader("rows.csv", sp.Lane(), shuffle=False, epochs=1)
        >>> [(sample.key, sample.json()) for sample in samples]
        [('rows.csv:0', {'id': '0', 'caption': 'a cat'}), ('rows.csv:1', {'id': '1', 'caption': None})]
    """

    kind = "csv"


class JsonReader(TableReader):
    """Yields the objects of JSON files that hold one list, such as LLaVA's, in the order of `sp.TarShardReader`.

    The part `json` is the object, byte for byte; files that its fields name are parts too. To be indexed, on first use,
    a file is read as a whole.

    Args:
        files: A glob, a brace pattern, one file, a URL, or a list of these.
        lane: The lane of the pipeline.
        key: The field with a sample's key. None: the key is `FILE:ROW`.
        file_fields: The fields that name files, as "field" or "field=part"; none if empty. None: those of the names
            image, audio, video, file and file_name.
        files_from: As for `custom.CsvReader`.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong.
        ShardError: A file is damaged, or one that an object names is missing, or newer than the index.
        RemoteError: A server cannot be reached.

    Example:
        >>> _ = Path("list.json").write_text('[{"n": 0}, {"n": 1}]')
        >>> sample = next(custom.JsonReader("list.json", sp.Lane(), shuffle=False))
        >>> sample.key, sample.json()
        ('list.json:0', {'n': 0})
    """

    kind = "json"
