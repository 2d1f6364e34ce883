"""`Source`: the files that a user names, recognized: of which kind they are, and how they are reached.

    on a disk      an index.json or info.json of another program, else the names of the files
    in a bucket    the same, by one listing
    on a server    the kind that they had the last time, if its index is still there; else that of an index there

What reads files of a kind is imported when the first of them is opened: `STORES` has its places.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from savable_pipeline.core.files import lacks_handles, read_regular, regular_file, with_handles
from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.index import TAR, FileFormat, IndexedFiles, found_at, index_name
from savable_pipeline.data.shards.metadata import META
from savable_pipeline.data.shards.part_types import IMAGE_PARTS
from savable_pipeline.data.shards.paths import (
    LANCE,
    LANCE_CURE,
    LARGEST_INDEX,
    TAR_FILES,
    HubAddress,
    ShardKind,
    Shards,
    expand_braces,
    is_hub,
    is_remote,
    spelled_out,
)
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.sample_names import is_hidden
from savable_pipeline.errors import RemoteError, ShardError

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
    "Run `gzip -dk` or `zstd -d`",
)
CSV_FILES = ShardKind(
    (".csv", ".tsv"),
    tuple(f".{name}.{packed}" for name in ("csv", "tsv") for packed in ("gz", "zst", "xz", "bz2")),
    ("a compressed table", "compressed tables"),
    "Run `savable convert`, or `gzip -dk` or `zstd -d`",
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
    found = _object(index)
    if isinstance(found.get("chunks"), list) and isinstance(found.get("config"), dict):
        return "litdata"
    shards = found.get("shards")
    if isinstance(shards, list) and all(isinstance(shard, dict) and "format" in shard for shard in shards):
        return str(shards[0]["format"]) if shards else "mds"
    return ""


def kind_in(folder: Path) -> str:
    """The kind that the index.json in a folder says, if one is there; else ""."""
    return folder_kind(_read(folder / INDEX))


def kind_behind(url: str, session: Session) -> str:
    """The kind that the index.json below a URL says; "" without one. Raises `RemoteError`."""
    return folder_kind(session.read(url, INDEX) or b"")


def stored_in(folder: Path) -> str:
    """The kind that the file of another program says which lies in a folder: "lerobot" too; else ""."""
    return kind_in(folder) or _kind_of_info(_read(folder / LEROBOT_INFO), str(folder))


def stored_behind(url: str, session: Session) -> str:
    """The same of what lies below a URL. Raises `RemoteError`."""
    return kind_behind(url, session) or _kind_of_info(session.read(url, LEROBOT_INFO) or b"", url)


def _kind_of_info(info: bytes, folder: str) -> str:
    """What the info.json of a folder of robots' episodes says: "lerobot" for version 3; else "".

    Raises `ShardError` for another version: its tables without its videos would be half of it.
    """
    version = str(_object(info).get("codebase_version", ""))
    if version and not version.startswith("v3."):
        raise ShardError(
            f"{folder} is LeRobot {version}, but only v3.0 is supported. Run LeRobot's convert_dataset_v21_to_v30, or "
            "read its folder data as rows"
        )
    return "lerobot" if version else ""


def _read(path: Path) -> bytes:
    """The bytes of a file; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return read_regular(path, LARGEST_INDEX)
    return b""


def _object(raw: bytes) -> dict[str, Any]:
    """The object that JSON holds; an empty one for anything else."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(raw)
        return found if isinstance(found, dict) else {}
    return {}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files, the places of its format and of the store that reads them, and the names of its settings.

    `files` tells such files by their names; None: they are told otherwise, as by a listing in their folder.
    `seen_with` are settings for whoever looks at files that cannot be read without any. `also` is a kind of folders
    that hold such files, as which their reader reads one. `named_at` is the place of what tells which files of a folder
    are read, where another program says so, `open_at` that of what opens an index which is made otherwise than by
    scanning files.
    """

    name: str
    form_at: str
    store_at: str
    files: ShardKind | None
    settings: tuple[str, ...] = ()
    seen_with: Mapping[str, Any] = field(default_factory=dict)
    named_at: str = ""
    also: str = ""
    open_at: str = ""

    @property
    def form(self) -> FileFormat:
        """The format of such files."""
        form: FileFormat = found_at(_HERE + self.form_at)
        return form

    def indexed(self, files: Shards, **settings: Any) -> IndexedFiles:
        """Such files by the index that `open_at` opens."""
        found: IndexedFiles = found_at(_HERE + self.open_at)(files, self.form, **settings)
        return found

    def in_order(self) -> dict[str, Any]:
        """Settings for whoever reads all samples once, in their order."""
        if "columns" in self.settings:
            return {"partial": True}
        if "validate_hash" not in self.settings:
            return {}
        from savable_pipeline.data.stores.grouped_store import DecodedBlocks  # here: other files are not unpacked

        return {"blocks": DecodedBlocks(_FEW_BYTES)}

    def store(self, files: IndexedFiles, **settings: Any) -> RecordStore:
        """The store of such files."""
        store: RecordStore = found_at(_HERE + self.store_at)(files, **settings)
        return store


_FEW_BYTES = 1 << 27  # that are kept unpacked
_COLUMNS = ("columns", "key", "blocks", "partial", "ranges", "unpacked_bytes")
_TABLES = ("key", "file_fields", "files_from", "allow_outside", "pinned")
_RECORDS = ("key", "blocks", "unpacked_bytes", "validate_hash")
_WINDOWS = ("length", "stride", "dtype")
_HERE = "savable_pipeline.data.stores."  # below which the places are
STORES = {
    kind.name: kind
    for kind in (
        Kind(TAR, "tar_store:TARS", "tar_store:TarStore", TAR_FILES),
        Kind("parquet", "parquet:PARQUET", "parquet:ParquetStore", PARQUET_FILES, _COLUMNS, also="lerobot"),
        Kind(
            "arrow",
            "arrow_file:ARROW",
            "arrow_store:ArrowStore",
            ARROW_FILES,
            _COLUMNS,
            named_at="arrow_file:data_files",
        ),
        Kind("jsonl", "jsonl:JSONL", "jsonl:JsonlStore", JSONL_FILES, ("key", "ranges", "file_fields", "files_from")),
        Kind("jsonl-files", "jsonl:JSONL", "table_store:LinesStore", None, _TABLES),
        Kind("csv", "csv_table:CSV", "csv_table:CsvStore", CSV_FILES, _TABLES),
        Kind("json", "table_store:JSON", "table_store:JsonArrayStore", JSON_FILES, _TABLES),
        *(
            Kind(name, at, "folder_store:FolderStore", None, ("key_end", "classes"), open_at="folder_store:open_folder")
            for name, at in (
                ("folder", "folder_store:FOLDER"),
                ("folder-last", "folder_store:FOLDER_LAST"),
                ("folder-outside", "folder_store:FOLDER_OUTSIDE"),
                ("folder-outside-last", "folder_store:FOLDER_OUTSIDE_LAST"),
            )
        ),
        Kind("tokens", "token_store:TOKENS", "token_store:TokenStore", TOKEN_FILES, _WINDOWS, {"length": 1024}),
        Kind("mds", "record_kinds:MDS", "record_folder_store:RecordFolderStore", None, _RECORDS),
        Kind("litdata", "record_kinds:LITDATA", "record_folder_store:RecordFolderStore", None, _RECORDS),
        Kind("lerobot", "ranges:LEROBOT", "ranges:LeRobotStore", None, ("key", "blocks", "partial")),
        *(
            Kind(f"{name}-ranges", f"ranges:{name.upper()}_RANGES", f"ranges:ranged_{name}", None)
            for name in ("parquet", "arrow", "jsonl")
        ),
    )
}
_KINDS = [(kind.files.endings, name) for name, kind in STORES.items() if kind.files is not None]
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
        files: Shards = found_at(_HERE + at)(self.files) if at else self.files
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

        session = Session.of(*cache)
        files = at_commit(files, {} if pinned is None else pinned, session)
    name = with_handles(partial(_checked_kind, files, kind, session) if kind else partial(_kind_of, files, session))
    return Source(files, STORES[name], session)


def at_commit(files: Shards, pinned: dict[str, bytes], session: Session) -> Shards:
    """The same files, of the Hub at the commits that are `pinned`; those that are not are found, and pinned: a branch
    or a tag may move under a run.

    hf://datasets/org/name/data          named by the user, and kept as a reader's setting
    hf://datasets/org/name@main          what is pinned: found once, sent to workers, kept in the state
    hf://datasets/org/name@1f0c…/data    what is opened, everywhere

    Raises `ShardError` for a dataset or a revision that is not there, `RemoteError`.
    """
    specs = spelled_out(files)
    if not any(map(is_hub, specs)):
        return files
    if importlib.util.find_spec("huggingface_hub") is None:  # finds it without importing it
        raise RemoteError("hf:// needs huggingface_hub. Run `pip install huggingface_hub`")
    fixed = [_fixed(HubAddress.of(spec), pinned, session) if is_hub(spec) else spec for spec in specs]
    return fixed[0] if isinstance(files, str | os.PathLike) and len(fixed) == 1 else fixed


def _fixed(address: HubAddress, known: dict[str, bytes], session: Session) -> str:
    if address.is_fixed:
        return address.at(address.revision)
    if address.dataset not in known:
        known[address.dataset] = session.call("commit", address.dataset).encode()
    return address.at(known[address.dataset].decode())


def _checked_kind(files: Shards, name: str, session: Session | None) -> str:
    """The kind of files that are of the kind `name`, or of folders that hold such files and are read as another."""
    specs = spelled_out(files)
    if not isinstance(files, str | os.PathLike) or len(specs) > 1:
        return name
    spec, also = specs[0].rstrip("/"), STORES[name].also
    named = _kind_of_name(spec)
    if named not in ("", name) and (session or not Path(spec).is_dir()):
        raise ShardError(f"{files}: a file of the kind {named}, not {name}. sp.read(…) reads any kind")
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
        raise ShardError(f"{files}: several kinds of files, {listed(sorted(found))}. Name those of one by a glob")
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
    if lacks_handles(error):
        raise error


def _is_known_folder(folder: Path) -> bool:
    """Whether a folder is known to hold files that are parts of samples, and no others since."""
    if not any((folder / META).glob("savable.folder*.index")):  # most
        return False
    from savable_pipeline.data.stores.folder_store import is_known

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
        raise ShardError(f"{folder}: {name} may have the samples as rows. Read {folder / name}, or move it away")
    for name in names:
        (end, *others) = sorted(set(ends[_stem(name)]))
        if not others and (cure := CONTAINERS.get(end)):
            raise ShardError(f"{folder}: {end} is not read here ({name}): {cure}")
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
        private_folder,  # here: most files lie on a disk
        read_pin,
        write_pin,
    )

    note = private_folder(session.cache / "listings") / sha256(f"{url} kind".encode()).hexdigest()[:32]
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
    return next((kind for endings, kind in _KINDS if name.endswith(endings)), "")
