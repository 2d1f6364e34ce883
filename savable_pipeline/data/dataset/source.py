"""`Source`: the files that a user names, recognized: of which kind they are, and how they are reached.

on a disk      an index.json or info.json of another program, else the names of the files
in a bucket    the same, by one listing
on a server    the kind that they had the last time, if its index is still there; else each kind's index is asked for
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from savable_pipeline.core.files import regular_file
from savable_pipeline.core.open_files import is_out_of_handles, with_handles
from savable_pipeline.core.wording import listed
from savable_pipeline.data.dataset.hub_commits import at_commit
from savable_pipeline.data.dataset.store_kinds import STORES, Kind
from savable_pipeline.data.shards.braces import expand_braces
from savable_pipeline.data.shards.energon_metadata import META
from savable_pipeline.data.shards.file_format import FileFormat
from savable_pipeline.data.shards.index_place import index_name
from savable_pipeline.data.shards.part_types import IMAGE_PARTS
from savable_pipeline.data.shards.paths import ALL, Shards, is_remote, spelled_out
from savable_pipeline.data.stores.file_kinds import CONTAINERS, INDEX, LEROBOT_INFO, stored_behind, stored_in
from savable_pipeline.data.stores.sample_names import is_hidden
from savable_pipeline.errors import ShardError

if TYPE_CHECKING:
    from savable_pipeline.data.remote.session import Session

Cache: TypeAlias = tuple[str | os.PathLike[str] | None, int | None]  # its folder and bytes; None: the defaults

_FIRST = (index_name("tar"), INDEX, LEROBOT_INFO)  # asked for first of a web server, whose folder has mostly tars

_INDEXED = [name for name, kind in STORES.items() if not kind.open_at and name != "jsonl-files"]  # by its own name
_BESIDE = ("csv", "json")  # kinds of files that lie beside others
_FOR_PEOPLE = ("/readme", "/license", "/notice", "/citation", "/changelog")
_HEAD, _LIST = 64, re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one kind, those of the Hub at a commit. The `session` looked at those behind a URL; None: on a disk."""

    files: Shards
    kind: Kind
    session: Session | None = None

    @property
    def read(self) -> Shards:
        """What of the files is read, where another program's metadata in their folder says so."""
        return self.kind.named(self.files)


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
        from savable_pipeline.data.remote.session import Session  # here: most files lie on a disk

        session = Session.of(*cache)
        files = at_commit(files, {} if pinned is None else pinned, session)
    name = with_handles(partial(_checked_kind, files, kind, session) if kind else partial(_kind_of, files, session))
    return Source(files, STORES[name], session)


def format_of_file(root: Path, name: str) -> FileFormat | None:
    """The format of one file below `root`, by an index.json there or by its name, whatever is there.

    None for what is of no kind.
    """
    kind = STORES.get("folder" if name == ALL else stored_in(root)) or STORES.get(_kind_of_name(name))
    return None if kind is None else kind.form


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
    from savable_pipeline.data.remote.own_files import own_folder  # here: most files lie on a disk
    from savable_pipeline.data.remote.version_pins import read_pin, write_pin

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
