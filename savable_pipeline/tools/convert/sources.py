"""The kinds of sources, each told by its marks; what is not known is refused with what to do.

| kind    | marks                                                         | read by        |
|---------|---------------------------------------------------------------|----------------|
| folder  | a folder without any of the marks below                       | `read_folder`  |
| jsonl   | .jsonl, .ndjson; or .json with an object a line               | `read_table`   |
| json    | .json that begins with [                                      | `read_table`   |
| csv     | .csv, .tsv                                                    | `read_table`   |
| mds     | index.json with shards of the format mds                      | `read_records` |
| litdata | index.json with chunks                                        | `read_records` |
| tars    | .tar, or a folder of tars                                     | `read_stored`  |
| parquet | .parquet, or a folder of them                                 | `read_stored`  |
| hub     | a folder of .parquet with a README.md of the HF hub           | `read_stored`  |
| arrow   | .arrow, .feather, or a folder of them                         | `read_stored`  |
| hf      | a folder that `save_to_disk` of HF datasets wrote             | `read_stored`  |
| packed  | .tar.gz, .tgz, .tar.bz2, .tar.xz, .tar.zst, or a folder of them | `repack`     |
|         | .tar that is compressed all the same, by its first bytes      |                |

Tables and JSON may be compressed: .gz, .bz2, .xz, .zst. Behind a URL lie jsonl, json, csv, mds, litdata, tars, parquet
and arrow; what lies below one is told by the names that a bucket lists, or by the indexes that a web server has.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from savable_pipeline.core.file_heads import text_error
from savable_pipeline.core.wording import listed
from savable_pipeline.data.remote.session import Session, job_session
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.shards.paths import expand_braces, is_remote
from savable_pipeline.data.stores.decompressed import DamagedError
from savable_pipeline.data.stores.opening import at_commit
from savable_pipeline.data.stores.recognizer import CONTAINERS, OTHER
from savable_pipeline.data.stores.record_files import INDEX, index_format
from savable_pipeline.data.stores.sample_names import PACKED, TAR_ENDINGS, is_hidden, is_tar
from savable_pipeline.data.stores.table_store import MARK
from savable_pipeline.tools.convert import WORDS
from savable_pipeline.tools.convert.compressed import ENDINGS, close_objects, is_compressed, is_url, name_of, opened
from savable_pipeline.tools.convert.options import CLASSES

_COMPANIONS = (".json", ".jsonl", ".parquet", ".idx", ".csv", ".txt", ".log", ".sqlite")  # of tars, by tools
_BESIDE_TABLES = (*_COMPANIONS, ".md", ".py", ".yaml", ".yml", ".lock", ".crc")
_OF_PEOPLE = ("readme", "license", "notice", "citation", "changelog")


@dataclass(slots=True)
class FolderMarks:
    """What lies in a folder; names are relative to it, hidden files left out."""

    index: str = ""  # "mds", "litdata", or another format that its index.json names
    saved_to_disk: bool = False  # by HF datasets
    hub: bool = False  # a clone of the HF hub
    below: list[str] = field(default_factory=list)  # folders in it with an index
    names: list[str] = field(default_factory=list)
    suffixes: Counter[str] = field(default_factory=Counter)
    others: list[str] = field(default_factory=list)  # what no tool leaves beside tars
    lone: list[str] = field(default_factory=list)  # files that share their key with no other
    token_files: list[str] = field(default_factory=list)  # x.idx beside x.bin, and nothing else of that name

    def count(self, suffix: str) -> int:
        """The number of files with this end."""
        return self.suffixes[suffix]

    def beside_tables(self, suffixes: tuple[str, ...]) -> list[str]:
        """The files that neither have one of these ends nor are left by a tool, or for people, beside those that do."""
        known, begins = (*suffixes, *_BESIDE_TABLES), (*_OF_PEOPLE, "_")
        bases = {name: name.rpartition("/")[2].lower() for name in self.names}
        return [name for name, base in bases.items() if not base.endswith(known) and not base.startswith(begins)]

    def are_companions(self, suffix: str) -> bool:
        """Whether files with this end are tables beside tars of the same names."""
        tars = {name.partition(".")[0] for name in self.names if is_tar(name)}
        return all(name.partition(".")[0] in tars for name in self.names if name.lower().endswith(suffix))


def kind_in(folder: Path) -> str:
    """The kind that the index.json in a folder says, if one is there; else ""."""
    with contextlib.suppress(OSError):
        return index_format({INDEX: (folder / INDEX).read_bytes()})
    return ""


def kind_behind(url: str, session: Session) -> str:
    """The kind that the index.json below a URL says, or "". Raises `RemoteError`."""
    return index_format({INDEX: session.read(url, INDEX) or b"{}"})


def object_names(url: str, index_names: list[str], session: Session) -> list[str]:
    """The names of the objects below a URL; of a web server those of these indexes."""
    return [*(session.stats(url, index_names) if url.startswith("http") else session.listing(url).texts())]


def look_into(folder: Path) -> FolderMarks:
    """The marks of a folder. Raises OSError."""
    marks = FolderMarks(index=kind_in(folder))
    if marks.index:
        return marks
    saved = (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    marks.saved_to_disk = saved or (folder / "dataset_dict.json").is_file()
    marks.hub = any((folder / name).exists() for name in (".gitattributes", ".cache/huggingface", ".huggingface"))
    add_names(marks, _files_below(folder))
    indexes = [name for name in marks.names if name.endswith("/index.json") and kind_in((folder / name).parent)]
    marks.below = [name.removesuffix("/index.json") for name in indexes]
    return marks


def add_names(marks: FolderMarks, names: Iterable[str]) -> None:
    """Add the files with these names to the marks of a folder, or of what lies below a URL."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        marks.names.append(name)
        marks.suffixes[os.path.splitext(name)[1].lower()] += 1  # noqa: PTH122  # a Path per name is slow
        here, _, base = name.rpartition("/")
        groups.setdefault(f"{here}/{base.partition('.')[0]}", []).append(name)
    marks.lone = [names[0] for names in groups.values() if len(names) == 1]
    marks.others = [name for names in groups.values() for name in names if not _beside_tars(name, names)]
    marks.token_files = [
        names[1] for names in groups.values() if [name.rpartition(".")[2] for name in names] == ["bin", "idx"]
    ]


def _beside_tars(name: str, group: list[str]) -> bool:
    """Whether a file is a tar, or lies beside tars without being a sample: with a tar's name, or for people."""
    base = name.rpartition("/")[2].lower()
    if ".tar" in base or is_tar(base) or base.startswith(_OF_PEOPLE) or base == CLASSES:
        return True
    return base.endswith(_COMPANIONS) and (any(".tar" in other for other in group) or "stats" in base)


def _files_below(folder: Path) -> Iterator[str]:
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        prefix = os.path.relpath(here, folder)
        for name in files:
            if not is_hidden(name):
                yield name if prefix == "." else f"{prefix}/{name}"


BEHIND_URLS = ("jsonl", "json", "csv", "mds", "litdata", "tars", "parquet", "arrow")
TEXTS = ("jsonl", "json", "csv")  # tables, whose rows may name files
STORED = ("tars", "parquet", "arrow", "hf", "hub")  # read in place by a store
ROWS = ("parquet", "arrow", "hf", "hub")  # those of them whose rows may name files
TABLES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv"}

_STORED_FILES = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
_INDEXES = {INDEX_NAME: "tars", ".nv-meta/savable.parquet.index": "parquet", ".nv-meta/savable.arrow.index": "arrow"}
_MEGATRON = b"MMIDIDX\0\0"
_CHUNK = re.compile(r"(.*/)?chunk-[0-9]+-[0-9]+([.].+)?[.]bin")
_PEEK, _HEAD = 1 << 20, 64  # bytes of a file that are looked at
_PATTERN = "*?[{"
_FEW = 16  # files that are opened to see what they hold
_MANY = 4096  # tars that are


@dataclass(frozen=True, slots=True)
class ConversionSource:
    """What is converted, and what it was taken for. A URL is a str, a file or a folder a `Path`."""

    path: Path | str
    kind: str

    @property
    def words(self) -> str:
        """What it was taken for, for people."""
        return WORDS[self.kind]


def recognize(path: Path | str, kind: str | None = None) -> ConversionSource:
    """Tell the kind of a source by its marks, unless it is given. A URL is a str.

    Raises ValueError for what is not known, OSError; of a URL `ShardError`, `RemoteError`.
    """
    if kind is not None and kind not in WORDS:
        raise ValueError(f"the kind of a source is one of {', '.join(WORDS)}, not {kind!r}")
    if isinstance(path, str) and is_remote(path):
        path = str(at_commit(path, {}, job_session()))
        return ConversionSource(path, _behind_url(path, kind))
    path = Path(path)
    if re.match("[a-z][a-z0-9+.-]+:/", str(path)):
        raise ValueError(f"{path}: a Path cannot hold a URL. Pass it as a str")
    if not path.exists():
        here = "" if path.is_absolute() else f" (current folder: {Path.cwd()})"
        raise ValueError(f"{path}: no such file or folder{here}. Check the path")
    if kind is not None:
        return ConversionSource(path, kind)
    return ConversionSource(path, _of_folder(path, look_into(path)) if path.is_dir() else _of_file(path))


def _behind_url(url: str, kind: str | None) -> str:
    """The kind of what lies behind a URL. Raises ValueError for what must be copied first."""
    try:
        found = kind or (_below_url(url) if _is_place(url) else _of_file(url))
    finally:
        close_objects()
    if found not in BEHIND_URLS:
        raise ValueError(
            f"{url}: {WORDS[found]} cannot be read remotely. Copy it to a disk, and convert that\n"
            f"Read remotely: {', '.join(WORDS[each] for each in BEHIND_URLS)}"
        )
    if found not in STORED and any(c in url for c in _PATTERN):
        raise ValueError(f"{url}: {WORDS[found]} is converted one by one. Name one of them")
    return found


def _is_place(url: str) -> bool:
    """Whether a URL names what lies below it, or matches it, and not one file."""
    name = name_of(url)
    return url.endswith("/") or any(c in url for c in _PATTERN) or not Path(name).suffix


def _below_url(url: str) -> str:
    if any(c in url for c in _PATTERN):
        return _of_file(expand_braces(url)[0])
    marks = FolderMarks()
    session = job_session()
    names = object_names(url.rstrip("/"), [INDEX, *_INDEXES], session)
    form = kind_behind(url.rstrip("/"), session) if INDEX in names else ""
    if form:
        return _of_index(url, form)
    indexed = [kind for name, kind in _INDEXES.items() if name in names]
    if indexed:
        return indexed[0]
    add_names(marks, (name for name in names if not any(map(is_hidden, name.split("/")))))
    if url.startswith("http"):
        raise ValueError(
            f"{url}: nothing found, and web servers cannot be listed. "
            f"Name the files: {url.rstrip('/')}/{{000..099}}.tar"
        )
    if not marks.names:
        raise ValueError(f"{url}: nothing found. Check the URL")
    folders = [name.removesuffix(f"/{INDEX}") for name in marks.names if name.endswith(f"/{INDEX}")][:_FEW]
    _refuse_several(url, [folder for folder in folders if kind_behind(f"{url.rstrip('/')}/{folder}", session)])
    found = _of_names(url, marks)
    if found is None and marks.count(".jsonl") + marks.count(".ndjson") == len(marks.names):
        raise ValueError(f"{url}: several JSONL files. Convert them one by one: {listed(marks.names)}")
    return found or "folder"


def _of_file(path: Path | str) -> str:
    name = name_of(path).lower()
    if is_tar(name):
        several = is_url(path) and any(c in name for c in _PATTERN)
        return "packed" if name.endswith(PACKED) or (not several and is_compressed(path)) else "tars"
    suffix = _table_suffix(name)
    if suffix == ".json":
        return _of_json(path)
    if suffix in TABLES:
        return TABLES[suffix]
    if suffix in _STORED_FILES:
        return _STORED_FILES[suffix]
    if suffix in CONTAINERS:
        raise ValueError(f"{path}: {suffix} is not read here: {CONTAINERS[suffix]}")
    raise ValueError(
        f"{path}: unknown format. To convert it, {OTHER}\nKnown: a folder of files, .jsonl, .json, .csv and .tsv (also "
        f"{', '.join(ENDINGS)}), .parquet, .arrow, .tar, .tar.gz, folders of MDS and LitData (URLs end with /)"
    )


def _of_json(path: Path | str) -> str:
    try:
        with opened(path) as file:
            head = file.read(_PEEK).removeprefix(MARK).lstrip()
    except DamagedError as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    fault = text_error(head, name_of(path))
    if fault:
        raise ValueError(f"{path}: {fault}")
    lines = [line.strip() for line in head.split(b"\n") if line.strip()]
    if head.startswith(b"["):
        return "json"
    if len(lines) > 1 and all(line.startswith(b"{") and line.endswith(b"}") for line in lines[:2]):
        return "jsonl"
    raise ValueError(
        f"{path}: expected a list of objects, [{{…}}, {{…}}], or an object a line. Write its samples into such a file"
    )


def _of_folder(path: Path, marks: FolderMarks) -> str:
    if marks.index:
        return _of_index(path, marks.index)
    if marks.saved_to_disk:
        return "hf"
    _refuse_several(path, marks.below)
    found = _of_names(path, marks)
    if found is None:
        _refuse_lone(path, marks)
    return found or "folder"


def _of_names(path: Path | str, marks: FolderMarks) -> str | None:
    """The kind that the names of files tell; None for other files."""
    for suffix, kind in _STORED_FILES.items():
        if marks.count(suffix) and not marks.are_companions(suffix):
            found = "hub" if kind == "parquet" and marks.hub else kind
            _refuse_others(path, marks, kind, found)
            return found
    packed = [name for name in marks.names if name.lower().endswith(PACKED)]
    if packed and marks.others:
        raise ValueError(
            f"{path}: compressed tars ({listed(packed)}) beside other files ({listed(marks.others)}). Move the tars "
            "into their own folder, or convert them one by one"
        )
    if packed:
        return "packed"
    if marks.count(".tar") and not marks.others:
        _refuse_capitals(path, marks)
        tars = [path / name for name in marks.names if is_tar(name)] if isinstance(path, Path) else []
        return "packed" if any(map(is_compressed, tars[:_MANY])) else "tars"
    return None


def _refuse_several(path: Path | str, below: list[str]) -> None:
    if below:
        raise ValueError(f"{path} has several datasets. Convert them one by one: {listed(below)}")


def _refuse_others(path: Path | str, marks: FolderMarks, form: str, kind: str) -> None:
    """Refuse files of rows beside what would not be read with them, such as pictures."""
    suffixes = tuple(suffix for suffix, other in _STORED_FILES.items() if other == form)
    others = marks.beside_tables(suffixes)
    if others:
        table = next(name for name in marks.names if name.lower().endswith(suffixes))
        raise ValueError(
            f"{path} has {table} and other files ({listed(others)}). Pass --as {kind} for the rows alone, or --as "
            "folder for each file as a part\nWhere rows name the files, add --files-from FOLDER, or write them as JSONL"
        )


def _refuse_capitals(path: Path | str, marks: FolderMarks) -> None:
    unseen = [name for name in marks.names if is_tar(name) and not name.endswith(TAR_ENDINGS)]
    if unseen:
        raise ValueError(f"{path}: readers read tars named .tar. Rename {listed(unseen)}")


def _of_index(path: Path | str, kind: str) -> str:
    if kind in ("mds", "litdata"):
        return kind
    raise ValueError(f"{path}: Mosaic Streaming shards of the format {kind}, not mds. To convert them, {OTHER}")


def _refuse_lone(path: Path, marks: FolderMarks) -> None:
    """Refuse a folder that holds a table of its files, or files with many samples each, as samples of one part."""
    anyway = "or pass --as folder for each file as a part"
    for name in marks.lone:
        suffix = _table_suffix(name)
        is_array = suffix == ".json" and marks.count(".json") <= _FEW and _is_array(path / name)
        if suffix in TABLES or is_array:
            raise ValueError(
                f"{path}: the lines of {name} may be the samples. Run `savable convert {path / name} DST`, {anyway}"
            )
        if suffix in CONTAINERS:
            raise ValueError(f"{path} has {name}, and {suffix} is not read here: {CONTAINERS[suffix]}, {anyway}")
        if _CHUNK.fullmatch(name):
            raise ValueError(f"{path}: chunks of LitData ({name}) without index.json. Put it beside them")
    for name in marks.token_files[:_FEW]:
        with (path / name).open("rb") as file:
            if file.read(len(_MEGATRON)) == _MEGATRON:
                raise ValueError(f"{path} has Megatron token files ({name}), not samples: {OTHER}, {anyway}")


def _table_suffix(name: str) -> str:
    name = name.lower()
    plain = next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)
    return Path(plain).suffix


def _is_array(path: Path) -> bool:
    """Whether a file, perhaps compressed, begins as a list of objects."""
    try:
        with opened(path) as file:
            head = file.read(_HEAD).removeprefix(MARK).lstrip()
    except (DamagedError, OSError):  # what is no file is rejected when the folder is read
        return False
    return head.startswith(b"[") and head[1:].lstrip().startswith(b"{")
