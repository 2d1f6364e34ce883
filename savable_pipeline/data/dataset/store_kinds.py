"""The kinds of files, and the places of what reads them: it is imported when the first file of a kind is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from savable_pipeline.data.shards.file_format import FileFormat, found_at
from savable_pipeline.data.shards.index_file import TAR
from savable_pipeline.data.shards.paths import TAR_FILES, ShardKind, Shards
from savable_pipeline.data.stores.file_kinds import (
    ARROW_FILES,
    CSV_FILES,
    JSON_FILES,
    JSONL_FILES,
    PARQUET_FILES,
    TOKEN_FILES,
)
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.record_store import RecordStore


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files, the places of its format and of the store that reads them, and the names of its settings.

    `files` tells such files by their names; None: they are told otherwise, as by a listing in their folder.
    `seen_with` are settings for whoever looks at files that cannot be read without any, `in_order` makes those for
    whoever reads all samples once, in their order. `named` tells which files of a folder are read, where another
    program says so. `also` is a kind of folders that hold such files, as which their reader reads one. `open_at` is the
    place of what opens an index that is made otherwise than by scanning files.
    """

    name: str
    form_at: str
    store_at: str
    files: ShardKind | None
    settings: tuple[str, ...] = ()
    seen_with: Mapping[str, Any] = field(default_factory=dict)
    in_order: Callable[[], dict[str, Any]] = dict
    named: Callable[[Shards], Shards] = lambda files: files
    also: str = ""
    open_at: str = ""

    @property
    def form(self) -> FileFormat:
        """The format of such files."""
        form: FileFormat = found_at(_DATA + self.form_at)
        return form

    def indexed(self, files: Shards, **settings: Any) -> IndexedFiles:
        """Such files by the index that `open_at` opens."""
        found: IndexedFiles = found_at(_DATA + self.open_at)(files, self.form, **settings)
        return found

    def store(self, files: IndexedFiles, **settings: Any) -> RecordStore:
        """The store of such files."""
        store: RecordStore = found_at(_DATA + self.store_at)(files, **settings)
        return store


def _partial() -> dict[str, Any]:
    return {"partial": True}


def _few_blocks() -> dict[str, Any]:
    from savable_pipeline.data.stores.decoded_blocks import DecodedBlocks

    return {"blocks": DecodedBlocks(_FEW_BYTES)}


def _data_files(files: Shards) -> Shards:
    from savable_pipeline.data.stores.saved_dataset import data_files

    return data_files(files)


_FEW_BYTES = 1 << 27  # that are kept unpacked
_COLUMNS = ("columns", "key", "blocks", "partial", "ranges")
_TABLES = ("key", "file_fields", "files_from", "allow_outside", "pinned")
_RECORDS = ("key", "blocks", "unpacked_bytes", "validate_hash")
_DATA = "savable_pipeline.data."  # below which the places are
STORES = {
    kind.name: kind
    for kind in (
        Kind(TAR, "shards.scan:TARS", "stores.tar_store:TarStore", TAR_FILES),
        Kind(
            "parquet",
            "stores.parquet:PARQUET",
            "stores.parquet:ParquetStore",
            PARQUET_FILES,
            _COLUMNS,
            in_order=_partial,
            also="lerobot",
        ),
        Kind(
            "arrow",
            "stores.arrow_file:ARROW",
            "stores.arrow_store:ArrowStore",
            ARROW_FILES,
            _COLUMNS,
            in_order=_partial,
            named=_data_files,
        ),
        Kind(
            "jsonl",
            "stores.jsonl:JSONL",
            "stores.jsonl:JsonlStore",
            JSONL_FILES,
            ("key", "ranges", "file_fields", "files_from"),
        ),
        Kind("jsonl-files", "stores.jsonl:JSONL", "stores.table_store:LinesStore", None, _TABLES),
        Kind("csv", "stores.csv_table:CSV", "stores.csv_table:CsvStore", CSV_FILES, _TABLES),
        Kind("json", "stores.json_array:JSON", "stores.json_array:JsonArrayStore", JSON_FILES, _TABLES),
        *(
            Kind(
                name,
                f"stores.raw_folder:{name.upper().replace('-', '_')}",
                "stores.folder_store:FolderStore",
                None,
                ("key_end", "classes"),
                open_at="stores.raw_folder:open_folder",
            )
            for name in ("folder", "folder-last", "folder-outside", "folder-outside-last")
        ),
        Kind(
            "tokens",
            "stores.token_file:TOKENS",
            "stores.token_store:TokenStore",
            TOKEN_FILES,
            ("length", "stride", "dtype"),
            {"length": 1024},
        ),
        Kind("mds", "stores.mds:MDS", "stores.record_folder_store:MdsStore", None, _RECORDS, in_order=_few_blocks),
        Kind(
            "litdata",
            "stores.litdata:LITDATA",
            "stores.record_folder_store:LitDataStore",
            None,
            _RECORDS,
            in_order=_few_blocks,
        ),
        Kind("lerobot", "stores.lerobot:LEROBOT", "stores.lerobot:LeRobotStore", None, ("key", "blocks", "partial")),
        *(
            Kind(f"{name}-ranges", f"stores.ranges:{name.upper()}_RANGES", f"stores.ranges:ranged_{name}", None)
            for name in ("parquet", "arrow", "jsonl")
        ),
    )
}
