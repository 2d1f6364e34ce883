"""Which kind of store a path names, by the names of its files; and the dataset of any kind."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from savable_pipeline.core.files import regular_file
from savable_pipeline.core.job_engine import Engine
from savable_pipeline.core.on_error import OnError, skips
from savable_pipeline.core.wording import listed
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.hub_commits import at_commit
from savable_pipeline.data.dataset.store_kinds import STORES, Kind
from savable_pipeline.data.shards.braces import expand_braces
from savable_pipeline.data.shards.energon_metadata import META, unused_settings
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_making import Progress
from savable_pipeline.data.shards.index_place import index_name
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.shards.part_types import IMAGE_PARTS
from savable_pipeline.data.shards.paths import ALL, Shards, Unlistable, is_remote, raise_it, spelled_out
from savable_pipeline.data.shards.processes import each_shard_by
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.shards.unfinished import unfinished
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.file_kinds import CONTAINERS, stored_behind, stored_in
from savable_pipeline.data.stores.indexed_files import IndexedFiles
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.sample_names import is_hidden
from savable_pipeline.errors import ShardError

OpenStore: TypeAlias = Callable[[bool, Unlistable], RecordStore]  # tolerant of damage?; told of unlistable folders
_BESIDE = ("csv", "json")  # kinds of files that lie beside others
_FOR_PEOPLE = ("/readme", "/license", "/notice", "/citation", "/changelog")
_HEAD, _LIST = 64, re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
log = logging.getLogger(__name__)


def format_of(files: Shards) -> FileFormat:
    """The format of the files that a user names. Raises `ShardError` for files of several kinds."""
    return STORES[kind_of(files)].form


def format_of_file(root: Path, name: str) -> FileFormat | None:
    """The format of one file below `root`, by an index.json there or by its name, whatever is there.

    None for what is of no kind.
    """
    kind = STORES.get("folder" if name == ALL else stored_in(root)) or STORES.get(_kind_of_name(name))
    return None if kind is None else kind.form


def kind_of(files: Shards) -> str:
    """ "tar" or the name of a format. A folder with tars is one of tars, whatever else is in it.

    Raises `ShardError` for files of several kinds.
    """
    kinds_at, files = _kinds_behind if is_remote(files) else _kinds_at, at_commit(files)
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
    on_error: OnError = "raise",
    cache: str | os.PathLike[str] | None = None,
    cache_size: int | None = None,
    partial: bool = False,
    unpacked_bytes: int = UNPACKED_BYTES,
    **settings: Any,
) -> Dataset:
    """The dataset of the files that a user names, of whichever kind; `settings` are those of its store, or None.

    `partial` is that of `ColumnarStore`, `unpacked_bytes` that of all readers. Raises `ShardError`, `RemoteError`,
    and ValueError for a setting that files of this kind do not have.
    """
    files = at_commit(files)
    kind = STORES[kind_of(files)]
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in kind.settings:
            others = listed([each.name for each in STORES.values() if name in each.settings])
            raise ValueError(f"{files}: {name}= is for files of the kinds {others}, not for {kind.name} files")

    kind = _variant(kind, given)
    if "unpacked_bytes" in kind.settings:
        given["unpacked_bytes"] = unpacked_bytes

    def open_it(tolerant: bool, unlistable: Unlistable) -> RecordStore:
        found = kind.indexed(files, tolerant, unlistable, cache=cache, cache_size=cache_size)
        return seen(found, kind, partial=partial, **given)

    return dataset_of(open_it, on_error=on_error, unpacked_bytes=unpacked_bytes)


def dataset_of(
    open_store: OpenStore,
    *,
    source: str = "",
    on_error: OnError = "raise",
    quarantine: str | os.PathLike[str] | None = None,
    unpacked_bytes: int = UNPACKED_BYTES,
) -> Dataset:
    """The dataset of the store that `open_store` opens. Raises what that raises."""
    faults: list[tuple[str, str]] = []

    def unlistable(error: ShardError) -> None:
        if not skips(on_error, error):
            raise error
        log.warning("%s", error)
        faults.append(("", str(error)))

    store = open_store(on_error != "raise", unlistable)
    for setting in [] if store.root is None else unused_settings(store.root):
        log.warning("%s: `%s` in %s/dataset.yaml is applied by Energon only", store.address, setting, META)
    missing = "" if store.root is None else unfinished(store.root).replace(str(store.root), store.address, 1)
    for text in (store.left_out(), missing):
        if text:
            log.warning("%s", text)
    return Dataset(
        store, source=source, on_error=on_error, quarantine=quarantine, faults=faults, unpacked_bytes=unpacked_bytes
    )


def open_store(
    name: str,
    files: Shards,
    tolerant: bool = False,
    unlistable: Unlistable = raise_it,
    *,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int | None = None,
    **settings: Any,
) -> RecordStore:
    """The store of files of the kind `name`, with the settings of that store; a `cache` is for files behind a URL.

    Files without an index are indexed first. If it is `tolerant`, the samples of a damaged file before the damage are
    taken. Raises `ShardError`, `RemoteError`.
    """
    kind, files = STORES[name], at_commit(files)
    named = _kind_of_name(os.fspath(files)) if isinstance(files, str | os.PathLike) else ""
    if named not in ("", name) and not Path(files).is_dir():  # type: ignore[arg-type]
        raise ShardError(f"{files}: is a file of the kind {named}, not {name}; sp.read(…) reads any kind")
    if settings.get("ranges") is None:
        settings.pop("ranges", None)
    if (other := _variant(kind, settings)) is not kind:
        kind = other
    elif kind.also and _folder_kind(files) == kind.also:
        kind = STORES[kind.also]
    return kind.store(kind.indexed(files, tolerant, unlistable, cache=cache, cache_size=cache_size), **settings)


def _variant(kind: Kind, settings: dict[str, Any]) -> Kind:
    """The kind of the same files with these settings: rows that name ranges of others, folders by where keys end."""
    name = kind.name
    if "ranges" in settings:
        name = f"{name}-ranges"
    elif name == "jsonl" and not settings.keys().isdisjoint(("file_fields", "files_from")):
        name = "jsonl-files"
    elif name == "folder":
        name += "-outside" if settings.pop("allow_outside", False) else ""
        name += "-last" if settings.get("key_end") == "last" else ""
    return STORES[name]


def _folder_kind(files: Shards) -> str:
    """The kind that another program's file in a folder says; "" for anything but one folder."""
    if not isinstance(files, str | os.PathLike):
        return ""
    if not is_remote(files):
        return stored_in(Path(spelled_out(files)[0]))
    url = os.fspath(files).rstrip("/")
    if "*" in url or _kind_of_name(url):
        return ""
    from savable_pipeline.data.remote.remote_files import short_downloader

    with short_downloader() as downloader:
        return stored_behind(url, downloader)


def seen(found: IndexedFiles, kind: Kind | None = None, *, partial: bool = False, **settings: Any) -> RecordStore:
    """The store of indexed files, for whoever looks at them: with settings where they cannot be read without any."""
    kind = kind or STORES[found.form.name]
    if partial:
        settings |= kind.in_order()
    try:
        return kind.store(found, **settings)
    except ValueError:
        if not kind.seen_with:
            raise
        return kind.store(found, **kind.seen_with)


def named_files(files: Shards) -> Shards:
    """What of these files is read, where another program's metadata in their folder says so."""
    return STORES[kind_of(files)].named(files)


def index_any(
    files: Shards,
    *,
    processes: int | None = None,
    engine: Engine | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[Path, list[ShardEntry]]:
    """Indexes files of whichever kind, here or behind a URL, in processes or by the machines of an `engine`.

    Returns the path of the index, and the files that could not be read to their end. Raises `ShardError`.
    """
    files = at_commit(files)
    kind = STORES[kind_of(files)]
    if is_remote(files):
        from savable_pipeline.data.stores.remote_indexing import index_remote

        return index_remote(files, kind.form, progress, engine)
    if kind.open_at:
        from savable_pipeline.data.stores.raw_folder import open_folder  # here, as in `store_kinds`

        return open_folder(files, kind.form, looked_at=True).index_path, []
    each = None if engine is None else each_shard_by(engine)
    return index_files(kind.named(files), kind.form, processes=processes, each=each, progress=progress)


def _kinds_at(spec: str) -> set[str]:
    path = Path(spec)
    if (kind := stored_in(path)) in STORES:
        return {kind}
    if not path.is_dir():
        return {_kind_of_name(name) for name in expand_braces(spec)[:1]}
    if _is_known_folder(path):
        return {"folder"}
    kinds: set[str] = set()
    for _, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        kinds |= {_kind_of_name(name) for name in files} - _of_parts(files)
        if "tar" in kinds:
            break
    return kinds - {"", *_BESIDE} or _of_raw_files(path)


def _is_known_folder(folder: Path) -> bool:
    """Whether a folder is known to hold files that are parts of samples, and no others since."""
    if not any((folder / META).glob("savable.folder*.index")):  # most
        return False
    from savable_pipeline.data.stores.raw_folder import is_known

    return is_known(folder.absolute())


def _of_raw_files(folder: Path) -> set[str]:
    """{"folder"} for files that are parts of samples, or {"csv"} for tables alone; nothing for an empty folder.

    Raises `ShardError` for both, and for files with many samples each, where another program reads them.
    """
    names: list[str] = []
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        below = os.path.relpath(here, folder)
        names += [name if below == "." else f"{below}/{name}" for name in sorted(files) if not is_hidden(name)]
    stems = Counter(_stem(name) for name in names)
    alone = [name for name in names if stems[_stem(name)] == 1]
    tables = [name for name in alone if _kind_of_name(name) == "csv" or _holds_list(folder / name)]
    if tables and all(_kind_of_name(name) == "csv" or _stem(name).lower().endswith(_FOR_PEOPLE) for name in names):
        return {"csv"}
    for name in tables:
        raise ShardError(
            f"{folder} holds the table {name}, whose rows may be the samples: name it, {folder / name}, or move it "
            "away to read each file as a part of a sample"
        )
    for name in alone:
        if cure := CONTAINERS.get(Path(name).suffix.lower()):
            raise ShardError(f"{folder} holds {name}, and {Path(name).suffix} is not read here: {cure}")
    return {"folder"} if names else set()


def _stem(name: str) -> str:
    """The path of a file up to its first dot."""
    here, _, base = name.rpartition("/")
    return f"{here}/{base.partition('.')[0]}"


def _holds_list(path: Path) -> bool:
    """Whether a file is called JSON, and begins as a list of objects."""
    if path.suffix.lower() != ".json":
        return False
    with contextlib.suppress(OSError), open(path, "rb", opener=regular_file) as file:
        return bool(_LIST.match(file.read(_HEAD)))
    return False


def _of_parts(files: list[str]) -> set[str]:
    """{"tokens"} for a folder to convert: where each `.npy` and `.bin` is a picture's, by its name, or LitData's."""
    pictures = {name.partition(".")[0] for name in files if name.lower().rpartition(".")[2] in IMAGE_PARTS}
    tokens = {name.partition(".")[0] for name in files if _kind_of_name(name) == "tokens"}
    chunked = "index.json" in files and all(name.startswith("chunk-") for name in tokens)
    return {"tokens"} if chunked or tokens <= pictures else set()


def _kinds_behind(url: str) -> set[str]:
    """The kinds of what lies behind a URL, by its own name, or else by the names below it."""
    from savable_pipeline.data.remote.remote_files import names_behind, short_downloader  # here, as in `file_kinds`

    if (kind := _kind_of_name(url)) or "*" in url:
        return {kind}
    with short_downloader() as downloader:
        if (found := stored_behind(url.rstrip("/"), downloader)) in STORES:
            return {found}
    indexes = {index_name(name): name for name in STORES}
    names = names_behind(url.rstrip("/"), list(indexes))
    return {indexes[name] for name in names if name in indexes} or {_kind_of_name(name) for name in names}


def _kind_of_name(name: str) -> str:
    told = ((kind, each.files) for kind, each in STORES.items() if each.files is not None)
    return next((kind for kind, files in told if name.endswith(files.endings)), "")
