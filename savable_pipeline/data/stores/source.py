"""`Source`: the files that a user names, recognized: of which kind they are, and how they are reached.

    on a disk      an index.json or info.json of another program, else the names of the files
    in a bucket    the same, by one listing
    on a server    the kind that they had the last time, if its index is still there; else that of an index there

What reads files of a kind is imported when the first of them is opened: `STORES` has its places.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from savable_pipeline.core.files import is_out_of_handles, read_regular, regular_file, with_handles
from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.index import TAR, FileFormat, IndexedFiles, found_at, index_name
from savable_pipeline.data.shards.metadata import META
from savable_pipeline.data.shards.part_types import IMAGE_PARTS
from savable_pipeline.data.shards.paths import (
    LANCE,
    LANCE_CURE,
    LARGEST_INDEX,
    TAR_FILES,
    ShardKind,
    Shards,
    expand_braces,
    is_remote,
    spelled_out,
)
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.sample_names import is_hidden
from savable_pipeline.errors import ShardError

if TYPE_CHECKING:
    from savable_pipeline.data.remote.session import Session


INDEX = "index.json"
OTHER = "iterate over it with its own library, and write its samples with sp.ShardWriter"
# Files that hold many samples, which nothing here reads.
CONTAINERS = {
    **dict.fromkeys((".zip", ".7z", ".rar"), "unpack it, and convert the folder"),
    **dict.fromkeys((".h5", ".hdf5", ".lmdb", ".mdb", ".tfrecord", ".tfrecords", ".beton", ".rec"), OTHER),
    **dict.fromkeys((".db", ".sqlite", ".zarr"), OTHER),
    LANCE: LANCE_CURE,
    ".mds": "name the folder with its index.json",
}
LEROBOT_INFO = "meta/info.json"
RangeColumns: TypeAlias = Mapping[str, tuple[str, str | None, str | None]]  # of a part: those of path, begin and end
_PACKED = tuple(f".{name}.{packed}" for name in ("jsonl", "ndjson", "json") for packed in ("gz", "zst", "xz", "bz2"))

ARROW_FILES = ShardKind((".arrow", ".feather", ".ipc"), left_out=lambda name: name.startswith(("cache-", "tmp")))
JSONL_FILES = ShardKind(
    (".jsonl", ".ndjson"),
    _PACKED,
    ("a compressed JSONL file", "compressed JSONL files"),
    "`gzip -dk` or `zstd -d` unpacks",
)
CSV_FILES = ShardKind(
    (".csv", ".tsv"),
    tuple(f".{name}.{packed}" for name in ("csv", "tsv") for packed in ("gz", "zst", "xz", "bz2")),
    ("a compressed table", "compressed tables"),
    "`savable convert` reads, and `gzip -dk` or `zstd -d` unpacks",
)
JSON_FILES = ShardKind((".json",))
PARQUET_FILES = ShardKind((".parquet", ".pq", ".parq"))
TOKEN_FILES = ShardKind((".bin", ".npy"))
Cache: TypeAlias = tuple[str | os.PathLike[str] | None, int | None]  # its folder and bytes; None: the defaults

_FIRST = (index_name("tar"), INDEX, LEROBOT_INFO)  # asked for first of a web server, whose folder has mostly tars

_BESIDE = ("csv", "json")  # kinds of files that lie beside others
_FOR_PEOPLE = ("/readme", "/license", "/notice", "/citation", "/changelog")
_HEAD, _LIST = 64, re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")


def folder_kind(index: bytes) -> str:
    """What an index.json says its folder holds: mds, another format of Mosaic Streaming, litdata; "" for none."""
    try:
        found: Any = msgspec.json.decode(index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    if isinstance(found.get("chunks"), list) and isinstance(found.get("config"), dict):
        return "litdata"
    shards = found.get("shards")
    if isinstance(shards, list) and all(isinstance(shard, dict) and "format" in shard for shard in shards):
        return str(shards[0]["format"]) if shards else "mds"
    return ""


def kind_in(folder: Path) -> str:
    """The kind that the index.json in a folder says, if one is there; else ""."""
    try:
        return folder_kind(read_regular(folder / INDEX, LARGEST_INDEX))
    except OSError:
        return ""


def kind_behind(url: str, session: Session) -> str:
    """The kind that the index.json below a URL says; "" without one. Raises `RemoteError`."""
    index = session.read(url, INDEX)
    return "" if index is None else folder_kind(index)


def stored_in(folder: Path) -> str:
    """The kind that the file of another program says which lies in a folder: "lerobot" too; else ""."""
    try:
        return kind_in(folder) or _kind_of_info(read_regular(folder / LEROBOT_INFO, LARGEST_INDEX))
    except OSError:
        return ""


def stored_behind(url: str, session: Session) -> str:
    """The same of what lies below a URL. Raises `RemoteError`."""
    found = kind_behind(url, session)
    info = None if found else session.read(url, LEROBOT_INFO)
    return found if info is None else _kind_of_info(info)


def _kind_of_info(info: bytes) -> str:
    """What the info.json of a folder of robots' episodes says: "lerobot" for version 3; else ""."""
    try:
        found: Any = msgspec.json.decode(info)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    version = found.get("codebase_version") if isinstance(found, dict) else None
    return "lerobot" if str(version).startswith("v3.") else ""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files, the places of its format and of the store that reads them, and the names of its settings.

    `files` tells such files by their names; None: they are told otherwise, as by a listing in their folder.
    `seen_with` are settings for whoever looks at files that cannot be read without any, `in_order` makes those for
    whoever reads all samples once, in their order. `also` is a kind of folders that hold such files, as which their
    reader reads one. `named_at` is the place of what tells which files of a folder are read, where another program says
    so, `open_at` that of what opens an index which is made otherwise than by scanning files.
    """

    name: str
    form_at: str
    store_at: str
    files: ShardKind | None
    settings: tuple[str, ...] = ()
    seen_with: Mapping[str, Any] = field(default_factory=dict)
    in_order: Callable[[], dict[str, Any]] = dict
    named_at: str = ""
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
    from savable_pipeline.data.stores.grouped_store import DecodedBlocks

    return {"blocks": DecodedBlocks(_FEW_BYTES)}


_FEW_BYTES = 1 << 27  # that are kept unpacked
_COLUMNS = ("columns", "key", "blocks", "partial", "ranges")
_TABLES = ("key", "file_fields", "files_from", "allow_outside", "pinned")
_RECORDS = ("key", "blocks", "unpacked_bytes", "validate_hash")
_DATA = "savable_pipeline.data."  # below which the places are
STORES = {
    kind.name: kind
    for kind in (
        Kind(TAR, "shards.tar_format:TARS", "stores.tar_store:TarStore", TAR_FILES),
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
            named_at="stores.arrow_file:data_files",
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
        Kind("json", "stores.table_store:JSON", "stores.table_store:JsonArrayStore", JSON_FILES, _TABLES),
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
            "stores.token_store:TOKENS",
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
_INDEXED = [name for name, kind in STORES.items() if not kind.open_at and name != "jsonl-files"]  # by its own name


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one kind, those of the Hub at a commit. The `session` looked at those behind a URL; None: on a disk."""

    files: Shards
    kind: Kind
    session: Session | None = None

    @property
    def read(self) -> Shards:
        """What of the files is read, where another program's metadata in their folder says so."""
        at = self.kind.named_at
        files: Shards = found_at(_DATA + at)(self.files) if at else self.files
        return files


def recognize(
    files: Shards, *, kind: str = "", pinned: dict[str, bytes] | None = None, cache: Cache = (None, None)
) -> Source:
    """The source of the files that a user names: of this `kind`, or of the one that they are found to be.

    Those behind a URL are read through the `cache`, a folder and its most bytes; branches of the Hub become the
    commits that are `pinned`, which are found and added if they are not there. Raises `ShardError` for files of several
    kinds, or of another than `kind`, `RemoteError`.
    """
    session = None
    if is_remote(files):
        from savable_pipeline.data.remote.session import Session
        from savable_pipeline.data.stores.hub_commits import at_commit

        session = Session.of(*cache)
        files = at_commit(files, {} if pinned is None else pinned, session)
    name = with_handles(partial(_checked_kind, files, kind, session) if kind else partial(_kind_of, files, session))
    return Source(files, STORES[name], session)


def _checked_kind(files: Shards, name: str, session: Session | None) -> str:
    """The kind of files that are of the kind `name`, or of folders that hold such files and are read as another."""
    if not isinstance(files, str | os.PathLike):
        return name
    spec, also = spelled_out(files)[0].rstrip("/"), STORES[name].also
    named = _kind_of_name(spec)
    if named not in ("", name) and (session or not Path(spec).is_dir()):
        raise ShardError(f"{files}: is a file of the kind {named}, not {name}; sp.read(…) reads any kind")
    if not also or "*" in spec or (session and named):
        return name
    return also if also == (stored_in(Path(spec)) if session is None else stored_behind(spec, session)) else name


def _kind_of(files: Shards, session: Session | None) -> str:
    """ "tar" or the name of another kind."""
    specs = spelled_out(files)
    found = {kind for spec in specs for kind in (_kinds_behind(spec, session) if session else _kinds_at(spec))} - {""}
    if "tar" in found or not found:
        return "tar"
    if len(found) > 1 and "tokens" in found:  # `.bin` and `.npy` lie beside many things
        found.remove("tokens")
    if len(found) > 1:
        raise ShardError(
            f"{files}: holds files of several kinds, {listed(sorted(found))}; name those of one, by a glob"
        )
    return found.pop()


def _kinds_at(spec: str) -> set[str]:
    path = Path(spec)
    if (kind := stored_in(path)) in STORES:
        return {kind}
    if not path.is_dir():
        return {_kind_of_name(name) for name in expand_braces(spec)[:1]}
    if _is_known_folder(path):
        return {"folder"}
    kinds: set[str] = set()
    for _, folders, files in os.walk(path, onerror=_raise_out_of_handles):
        folders[:] = [name for name in folders if not name.startswith(".")]
        kinds |= {_kind_of_name(name) for name in files} - _of_parts(files)
        if "tar" in kinds:
            break
    return kinds - {"", *_BESIDE} or _of_raw_files(path)


def _raise_out_of_handles(error: OSError) -> None:
    if is_out_of_handles(error):
        raise error


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
    for here, folders, files in os.walk(folder, onerror=_raise_out_of_handles):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        below = os.path.relpath(here, folder)
        names += [name if below == "." else f"{below}/{name}" for name in sorted(files) if not is_hidden(name)]
    ends: dict[str, list[str]] = {}  # of the files with a stem
    for name in names:
        ends.setdefault(_stem(name), []).append(Path(name).suffix.lower())
    alone = [name for name in names if len(ends[_stem(name)]) == 1]
    tables = [name for name in alone if _kind_of_name(name) == "csv" or _holds_list(folder / name)]
    if tables and all(_kind_of_name(name) == "csv" or _stem(name).lower().endswith(_FOR_PEOPLE) for name in names):
        return {"csv"}
    for name in tables:
        raise ShardError(
            f"{folder} holds the table {name}, whose rows may be the samples: name it, {folder / name}, or move it "
            "away to read each file as a part of a sample"
        )
    for name in names:
        (end, *others) = sorted(set(ends[_stem(name)]))
        if not others and (cure := CONTAINERS.get(end)):
            raise ShardError(f"{folder} holds {name}, and {end} is not read here: {cure}")
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


def _kinds_behind(url: str, session: Session) -> set[str]:
    """The kinds of what lies behind a URL, by its own name, or else by the names below it."""
    if (kind := _kind_of_name(url)) or "*" in url:
        return {kind}
    url = url.rstrip("/")
    if url.startswith("http"):
        return _kinds_on_server(url, session)
    names = session.listing(url).texts()
    if (found := stored_behind(url, session)) in STORES:
        return {found}
    kinds = {_kind_of_name(name) for name in names}
    return _kinds_of_indexes(names) or kinds - {"", *_BESIDE} or kinds & {"csv"}


def _kinds_on_server(url: str, session: Session) -> set[str]:
    from savable_pipeline.data.remote.cache_files import (
        own_folder,  # here: most files lie on a disk
        read_pin,
        write_pin,
    )

    note = own_folder(session.cache / "listings") / sha256(f"{url} kind".encode()).hexdigest()[:32]
    noted = read_pin(note)
    if noted in STORES and session.stat(url, index_name(noted)) is not None:
        return {noted}
    there = session.stats(url, _FIRST)
    stored = stored_behind(url, session) if there.keys() - {_FIRST[0]} else ""
    if stored in STORES:
        kinds = {stored}
    else:
        kinds = _kinds_of_indexes(there) or _kinds_of_indexes(session.stats(url, map(index_name, _INDEXED)))
    if len(kinds) == 1:
        write_pin(note, "".join(kinds))
    return kinds


def _kinds_of_indexes(names: Iterable[str]) -> set[str]:
    """The kinds of which an index is among these names."""
    indexes = {index_name(name): name for name in _INDEXED}
    return {indexes[name] for name in names if name in indexes}


def _kind_of_name(name: str) -> str:
    told = ((kind, each.files) for kind, each in STORES.items() if each.files is not None)
    return next((kind for kind, files in told if name.endswith(files.endings)), "")
