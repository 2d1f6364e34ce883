"""Which kind of store a path names, by the names of its files; and the dataset of any kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from savable_pipeline.core.on_error import OnError
from savable_pipeline.core.wording import listed
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import dataset_of, open_dataset
from savable_pipeline.data.remote.remote_files import names_behind, short_downloader
from savable_pipeline.data.remote.urls import is_remote
from savable_pipeline.data.shards.braces import expand_braces
from savable_pipeline.data.shards.energon_metadata import INDEX_NAME
from savable_pipeline.data.shards.part_types import IMAGE_PARTS
from savable_pipeline.data.shards.paths import TARS, ShardKind, Shards, Unlistable, raise_it, spelled_out
from savable_pipeline.data.stores.arrow_file import ARROW
from savable_pipeline.data.stores.arrow_store import ArrowStore
from savable_pipeline.data.stores.decoded_blocks import DecodedBlocks
from savable_pipeline.data.stores.file_format import FileFormat
from savable_pipeline.data.stores.file_indexing import IndexedFiles
from savable_pipeline.data.stores.file_store import FileStore
from savable_pipeline.data.stores.jsonl_file import JSONL
from savable_pipeline.data.stores.jsonl_store import JsonlStore
from savable_pipeline.data.stores.litdata import LITDATA
from savable_pipeline.data.stores.mds import MDS
from savable_pipeline.data.stores.parquet_file import PARQUET
from savable_pipeline.data.stores.parquet_store import ParquetStore
from savable_pipeline.data.stores.record_files import kind_behind, kind_in
from savable_pipeline.data.stores.record_folder_store import LitDataStore, MdsStore
from savable_pipeline.data.stores.token_file import TOKENS
from savable_pipeline.data.stores.token_store import TokenStore
from savable_pipeline.errors import ShardError

FORMATS = {form.name: form for form in (PARQUET, ARROW, JSONL, TOKENS, MDS, LITDATA)}
_KINDS: dict[str, ShardKind] = {
    "tar": TARS,
    **{name: form.kind for name, form in FORMATS.items() if not form.kind.listing},  # the others are told by a listing
}
_WINDOW = 1024  # tokens shown of flat files
_FEW_BYTES = 1 << 27  # that are kept unpacked where records are read in their order


def format_of(files: Shards) -> FileFormat | None:
    """The format of the files that a user names; None for tars. Raises `ShardError` for files of several kinds."""
    return FORMATS.get(kind_of(files))


def format_of_file(root: Path, name: str) -> FileFormat | None:
    """The format of one file below `root`, by an index.json there or by its name, whatever is there.

    None for a tar, and for what is of no kind.
    """
    return FORMATS.get(kind_in(root)) or FORMATS.get(_kind_of_name(name))


def kind_of(files: Shards) -> str:
    """ "tar" or the name of a format. A folder with tars is one of tars, whatever else is in it.

    Raises `ShardError` for files of several kinds.
    """
    kinds_at = _kinds_behind if is_remote(files) else _kinds_at
    found = {kind for spec in spelled_out(files) for kind in kinds_at(spec)} - {""}
    if "tar" in found or not found:
        return "tar"
    if len(found) > 1 and "tokens" in found:  # `.bin` and `.npy` lie beside many things
        found.remove("tokens")
    if len(found) > 1:
        raise ShardError(
            f"{files}: holds files of several kinds, {listed(sorted(found))}; name those of one, by a glob"
        )
    return found.pop()


def open_any(
    files: Shards,
    *,
    columns: tuple[str, ...] | None = None,
    key: str | None = None,
    on_error: OnError = "raise",
    partial: bool = False,
) -> Dataset:
    """The dataset of the files that a user names, of whichever kind; `columns` and `key` are those of their reader,
    `partial` of `ColumnarStore`.

    Raises `ShardError`, `RemoteError`, and ValueError for a setting that files of this kind do not have.
    """
    form = format_of(files)
    kind = "tar" if form is None else form.name
    if columns is not None and form not in (PARQUET, ARROW):
        raise ValueError(f"{files}: columns are for Parquet and Arrow files, not for files of the kind {kind}")
    if key is not None and form in (None, TOKENS):
        raise ValueError(f"{files}: a key is for files of rows and records, not for those of the kind {kind}")
    if form is None:
        return open_dataset(files, on_error=on_error)
    return dataset_of(
        lambda tolerant, unlistable: open_store(files, form, tolerant, unlistable, columns, key, partial),
        on_error=on_error,
    )


def open_store(
    files: Shards | IndexedFiles,
    form: FileFormat,
    tolerant: bool = False,
    unlistable: Unlistable = raise_it,
    columns: tuple[str, ...] | None = None,
    key: str | None = None,
    partial: bool = False,
) -> FileStore:
    """The store of files of a format; flat tokens are shown in windows. Raises `ShardError`."""
    if form in (PARQUET, ARROW):
        columnar = ParquetStore if form is PARQUET else ArrowStore
        return columnar(files, columns=columns, key=key, partial=partial, tolerant=tolerant, unlistable=unlistable)
    if form is JSONL:
        return JsonlStore(files, key=key, tolerant=tolerant, unlistable=unlistable)
    if form in (MDS, LITDATA):
        blocks: DecodedBlocks[Any] | None = DecodedBlocks(_FEW_BYTES) if partial else None
        folder = MdsStore if form is MDS else LitDataStore
        return folder(files, key=key, blocks=blocks, tolerant=tolerant, unlistable=unlistable)
    try:
        return TokenStore(files, tolerant=tolerant, unlistable=unlistable)
    except ValueError:
        return TokenStore(files, length=_WINDOW, tolerant=tolerant, unlistable=unlistable)


def _kinds_at(spec: str) -> set[str]:
    path = Path(spec)
    if (kind := kind_in(path)) in FORMATS:
        return {kind}
    if not path.is_dir():
        return {_kind_of_name(name) for name in expand_braces(spec)[:1]}
    kinds = set()
    for _, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        kinds |= {_kind_of_name(name) for name in files} - _of_parts(files)
        if "tar" in kinds:
            break
    return kinds


def _of_parts(files: list[str]) -> set[str]:
    """{"tokens"} for a folder to convert: where each `.npy` and `.bin` is a picture's, by its name, or LitData's."""
    pictures = {name.partition(".")[0] for name in files if name.lower().rpartition(".")[2] in IMAGE_PARTS}
    tokens = {name.partition(".")[0] for name in files if _kind_of_name(name) == TOKENS.name}
    chunked = "index.json" in files and all(name.startswith("chunk-") for name in tokens)
    return {TOKENS.name} if chunked or tokens <= pictures else set()


def _kinds_behind(url: str) -> set[str]:
    """The kinds of what lies behind a URL, by its own name, or else by the names below it."""
    if (kind := _kind_of_name(url)) or "*" in url:
        return {kind}
    with short_downloader() as downloader:
        if (kind := kind_behind(url.rstrip("/"), downloader)) in FORMATS:
            return {kind}
    indexes = {INDEX_NAME: "tar", **{form.index_name: name for name, form in FORMATS.items()}}
    names = names_behind(url.rstrip("/"), list(indexes))
    return {indexes[name] for name in names if name in indexes} or {_kind_of_name(name) for name in names}


def _kind_of_name(name: str) -> str:
    return next((kind for kind, files in _KINDS.items() if name.endswith((*files.suffixes, *files.refused))), "")
