"""Opens the files that a user names, local or remote.

They are named by a folder, file, glob, list, URL, bucket or address of the Hub.

    find_source("shards/")                         ──▶ Source: where the files are, and their format
    open_store("shards/")                          ──▶ the store of their samples, indexed first if needed
    open_store("rows/", format="jsonl", key="id")      a format and settings that the user passes
    open_store(source, inspect=True)                   for commands that look at files, and know no settings

`info`, `check`, `preview` and `convert` open with `inspect=True`. A missing setting then has its usual value, rows that
name files without their bytes lack these parts, and the cache of decoded groups is small.

Every reader of files uses this module, and `formats.py` alone decides their format. A store counts its samples in
`entries` (one per file: name, bytes, samples), reads them by (shard, row), and has `row_groups`; see `RecordStore`. A
`Source` can be pickled, and opened again in another process.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from savable_pipeline.core.job_engine import Engine
from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards import paths
from savable_pipeline.data.shards.index import TAR, Format, IndexedFiles
from savable_pipeline.data.shards.index_making import FileProgress, each_shard_by
from savable_pipeline.data.shards.indexing import check_faults, index_files, index_paths, open_files, valid_mark
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores import formats
from savable_pipeline.data.stores.arrow import ARROW, STATE
from savable_pipeline.data.stores.folder_store import FOLDER, FOLDER_INDEXES, is_known, open_folder
from savable_pipeline.data.stores.formats import Recognized, recognize, wanted
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.sample_names import FileNames
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import RemoteError, ShardError

if TYPE_CHECKING:
    from savable_pipeline.data.remote.session import Session
    from savable_pipeline.data.remote.urls import RemoteShards

log = logging.getLogger(__name__)

# folder and bytes of the cache; None means the default
Cache: TypeAlias = tuple[str | os.PathLike[str] | None, int | None]


# the format that the user passed, "" for none, and the names of the user's settings
Asked: TypeAlias = tuple[str, tuple[str, ...]]
# returns the first bytes of files, by their names; takes the most bytes to read of each
Heads: TypeAlias = Callable[[Mapping[str, int]], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class Source:
    """Files that a user names, with their format. Files of the Hub have a commit.

    Attributes:
        files: What was named.
        format: Their format.
        settings: Settings of the store that these files need.
        listed: The files on a disk, if they were listed. None: they are listed when they are opened.
        session: The session that sends requests. None: the files are on a disk.
        asked: What the user passed: see `Asked`.
    """

    files: paths.Shards
    format: Format
    settings: Mapping[str, Any] = field(default_factory=dict)
    listed: paths.ListedFiles | None = None
    session: Session | None = None
    asked: Asked = ("", ())


def find_source(
    files: paths.Shards,
    *,
    format: str = "",
    settings: Collection[str] = (),
    pinned: dict[str, bytes] | None = None,
    cache: Cache = (None, None),
) -> Source:
    """Return the source of the files that a user names.

    Args:
        files: A folder, a file, a glob, a brace pattern, a URL, or a list of these.
        format: The name of their format. "": it is recognized.
        settings: The names of the user's settings, by which a format is chosen where several could be.
        pinned: The commits of datasets of the Hub, by address. Those that are missing are found and added.
        cache: The cache of remote files: its folder, and its most bytes.

    Raises:
        ShardError: There is nothing, or it could be of several formats.
        RemoteError: A server cannot be reached.
    """
    if paths.is_remote(files):
        return _remote_source(files, format, settings, {} if pinned is None else pinned, cache)
    specs = paths.expand_specs(files)
    if len(specs) == 1 and Path(specs[0]).is_dir():
        root = Path(specs[0]).absolute()
        if format in ("", TAR) and valid_mark(root, TARS) and not any((root / name).exists() for name in _markers("")):
            return Source(files, TARS)
        indexes = (path for name in FOLDER_INDEXES for path in index_paths(root, name, near=False))
        if not format and any(path.exists() for path in indexes) and is_known(root):
            return Source(files, FOLDER)
    found = paths.list_files(files)
    recognized = _recognized(str(found.root), found.names, found.heads, (format, (*settings,)), found.sizes_of)
    if not found.whole and not format and recognized.format is FOLDER:
        forms = {_format_by_suffix(name, FOLDER) if (found.root / name).exists() else TARS for name in found.names}
        # the error of this format says what to do
        recognized = Recognized(forms.pop() if len(forms) == 1 else FOLDER, [])
    _check_suffix(files, found.names if format and found.exact else (), recognized.format)
    found = replace(found, chosen=None if format else recognized.files or None)
    return Source(files, recognized.format, recognized.settings, found)


def _markers(format: str) -> list[str]:
    """Return the markers of all formats that the reader of this format reads, or of all formats for ""."""
    formats.format_named(format or TAR)  # raises ValueError for an unknown name
    return [name for form in formats.FORMATS if format in ("", form.name, form.reader) for name in form.markers]


def _recognized(
    where: str, names: Sequence[str], heads: Heads, asked: Asked, sizes_of: Callable[[Sequence[str]], Iterable[int]]
) -> Recognized:
    """Return the format and the files of these names. Data that is not read is a warning, or an error if it is most."""
    format, settings = asked
    grouped = FileNames(names)
    known = dict.fromkeys(_markers(format), paths.LARGEST_INDEX) if format else wanted(grouped)
    try:
        found = recognize(grouped, heads(known), format=format, settings=settings)
    except ValueError as error:
        raise ShardError(f"{where}: {error}") from error
    if found.unread:
        unread, name = found.unread, found.format.name
        fault = f"{where}: {listed(unread)} {'is' if len(unread) == 1 else 'are'} not read beside the {name} files"
        rest, size = sorted({*names}.difference(unread)), sum(sizes_of(unread))
        if all(size > 2 * total for total in itertools.accumulate(sizes_of(rest))):
            raise ShardError(f'{fault}, with most of the bytes. Unpack or name them alone, or pass format="{name}"')
        hint = f", or name media such as {grouped.media[0]} in a field file_name" if grouped.media else ""
        log.warning("%s. Name it alone to read it, or unpack it%s", fault, hint)
    return found


def _format_by_suffix(name: str, default: Format = TARS) -> Format:
    """Return the format for a name's suffix, with or without compression."""
    plain = (form for form in formats.FORMATS if not form.reader and form.choose is None)
    return next((form for form in plain if form.has(name) or form.packs(name)), default)


def _check_suffix(files: paths.Shards, names: Sequence[str], chosen: Format) -> None:
    """Raise `ShardError` for one file whose suffix is that of another format."""
    other = _format_by_suffix(names[0], chosen) if len(names) == 1 else chosen
    if other is not chosen and not chosen.has(names[0]):
        raise ShardError(f"{files}: a file of the kind {other.name}, not {chosen.name}. sp.read(…) reads any kind")


def _remote_source(
    files: paths.Shards, format: str, settings: Collection[str], pinned: dict[str, bytes], cache: Cache
) -> Source:
    from savable_pipeline.data.remote.session import Session  # imported only for remote files

    session = Session.of(*cache)
    asked = format, tuple(sorted(settings))
    files = at_commit(files, pinned, session)
    recognized = _recognize_remote(files, asked, session)[1]
    return Source(files, recognized.format, recognized.settings, session=session, asked=asked)


def _recognize_remote(files: paths.Shards, asked: Asked, session: Session) -> tuple[RemoteShards, Recognized]:
    """Return the objects that URLs name, and their format. The session caches it until its next opening."""
    return session.once((paths.as_names(files), asked), lambda: _list_and_recognize(files, asked, session))


def _list_and_recognize(files: paths.Shards, asked: Asked, session: Session) -> tuple[RemoteShards, Recognized]:
    from savable_pipeline.data.remote.urls import list_remote

    listed, (format, _) = list_remote(files, session), asked
    root, names = listed.root, listed.names
    indexes = {form.index_name: form for form in formats.FORMATS if form is not FOLDER}
    if listed.whole and not names:
        names = _on_server(root, session, indexes, _markers(format))
    own = [indexes[name] for name in names if name in indexes]
    if len(own) == 1 and not format:
        return listed, Recognized(own[0], [])
    where = os.fspath(files) if isinstance(files, str | os.PathLike) else root
    recognized = _recognized(where, names, partial(session.heads, root), asked, lambda n: listed.only(n).sizes.tolist())
    if recognized.format is FOLDER and listed.whole and not listed.names:
        recognized = Recognized(TARS, [])  # the error of this format says what a web server needs
    if recognized.format is FOLDER:
        raise ShardError(f"{where}: raw files are read from disks alone. Copy them to a disk, or write them as tars")
    _check_suffix(files, names if format and not listed.whole else (), recognized.format)
    return listed, recognized


def remote_files(source: Source, form: Format) -> RemoteShards:
    """Return the files of a remote source that this format reads.

    They are listed again at each opening.
    """
    from savable_pipeline.data.remote.urls import select

    assert source.session is not None
    listed, recognized = _recognize_remote(source.files, source.asked, source.session)
    by_name = form.variant or source.asked[0] or not recognized.files or recognized.format != source.format
    return select(listed, form, None if by_name else recognized.files, source.session)


def _on_server(url: str, session: Session, indexes: Mapping[str, Format], markers: Sequence[str]) -> list[str]:
    """Return the names of the indexes and markers that exist in a folder of a web server.

    A web server cannot list a folder. If an earlier opening found one index, only that one is requested. Otherwise the
    usual names are requested first, and the others only if none of them exists.
    """
    from savable_pipeline.data.remote.cache_files import private_folder, read_pin, write_pin

    pin = private_folder(session.cache / "listings") / sha256(f"{url} kind".encode()).hexdigest()[:32]
    known = read_pin(pin)
    if known in indexes and session.stat(url, known) is not None:
        return [known]
    usual = dict.fromkeys((TARS.index_name, *(name for name in markers if name not in ARROW.markers)))
    names = [*session.stats(url, usual)] or [*session.stats(url, (*indexes, STATE))]
    if len(found := [name for name in names if name in indexes]) == 1:
        write_pin(pin, found[0])
    return names


def at_commit(files: paths.Shards, pinned: dict[str, bytes], session: Session) -> paths.Shards:
    """Return the same files, with those of the Hub at the commits that are `pinned`.

    Missing commits are looked up and added to `pinned`. A branch or a tag may move during a run:

    hf://datasets/org/name/data          named by the user, and a reader's setting
    hf://datasets/org/name@main          the pinned name: resolved once, sent to workers, in the state
    hf://datasets/org/name@1f0c…/data    opened, in every process

    Raises `ShardError` for a dataset or a revision that does not exist, and `RemoteError`.
    """
    specs = paths.expand_specs(files)
    if not any(map(paths.is_hub, specs)):
        return files
    if importlib.util.find_spec("huggingface_hub") is None:  # finds the package without importing it
        raise RemoteError("hf:// needs huggingface_hub. Run `pip install huggingface_hub`")
    fixed = [_with_commit(paths.HubAddress.of(spec), pinned, session) if paths.is_hub(spec) else spec for spec in specs]
    return fixed[0] if isinstance(files, str | os.PathLike) and len(fixed) == 1 else fixed


def _with_commit(address: paths.HubAddress, known: dict[str, bytes], session: Session) -> str:
    """Return an address of the Hub at its commit. A missing commit is looked up and added to `known`."""
    if address.is_fixed:
        return address.at(address.revision)
    if address.dataset not in known:
        known[address.dataset] = session.call("commit", address.dataset).encode()
    return address.at(known[address.dataset].decode())


def open_store(
    files: paths.Shards | Source,
    *,
    format: str = "",
    inspect: bool = False,
    tolerant: bool = False,
    unlistable: paths.Unlistable = paths.raise_error,
    pinned: dict[str, bytes] | None = None,
    cache: Cache = (None, None),
    **settings: Any,
) -> RecordStore:
    """Open the store of the files that a user names, indexed first if needed.

    Args:
        files: As for `find_source`, or what that returned.
        format: As for `find_source`.
        inspect: Whether the files are only inspected, without settings of the user: see above.
        tolerant: Whether the samples of a damaged file before the damage are used, and lost files still count.
        unlistable: Called with the error of each folder that cannot be listed. By default it is raised.
        pinned: As for `find_source`.
        cache: As for `find_source`.
        **settings: Settings of the store, of those that `Format.settings` names. None stands for the default.

    Raises:
        ValueError: Files of this format do not have a setting.
        ShardError: The files cannot be read, or could be of several formats.
        RemoteError: A server cannot be reached.
    """
    chosen = {name: value for name, value in settings.items() if value is not None}
    source = files
    if not isinstance(source, Source):
        source = find_source(source, format=format, settings=chosen, pinned=pinned, cache=cache)
    form = with_settings(source, chosen)
    indexed = open_indexed(source, form, tolerant=tolerant, unlistable=unlistable)
    return store_of(indexed, inspect=inspect, **{**source.settings, **chosen})


def with_settings(source: Source, settings: dict[str, Any]) -> Format:
    """Return the format of a source with these settings. Raises ValueError."""
    form = source.format
    for name in settings:
        if name not in form.settings and name not in form.inspect:
            others = listed([each.name for each in formats.FORMATS if name in each.settings and not each.reader])
            raise ValueError(f"{source.files}: {name}= does not apply to {form.name} files, only to {others}")
    return form.for_settings(settings)


def open_indexed(
    source: Source, form: Format, *, tolerant: bool = False, unlistable: paths.Unlistable = paths.raise_error
) -> IndexedFiles:
    """Open the index of a source's files, in this format.

    Remote files are read through the cache. Raises `ShardError`, also for damage unless `tolerant`, `RemoteError`.
    """
    if form.name == FOLDER.name:
        return open_folder(source.files, form, tolerant=tolerant)
    if source.session is None:
        return open_files(source.listed or source.files, form, tolerant=tolerant, unlistable=unlistable)
    from savable_pipeline.data.stores.remote_indexing import open_remote  # imported only for remote files

    found = remote_files(source, form)
    remote, names = open_remote(source.files, found, form, source.session, tolerant=tolerant)
    indexed = IndexedFiles(form, remote.index, remote.index_path, names, remote.metadata, remote, tolerant=tolerant)
    check_faults(remote.url, indexed.entries, tolerant)
    return indexed


def store_of(indexed: IndexedFiles, *, inspect: bool = False, **settings: Any) -> RecordStore:
    """Open the store of indexed files. See `open_store`."""
    store: RecordStore = indexed.form.store(indexed, **{**(indexed.form.inspect if inspect else {}), **settings})
    return store


def index_any(
    files: paths.Shards,
    *,
    processes: int | None = None,
    engine: Engine | None = None,
    progress: FileProgress = lambda done, total: None,
) -> tuple[Path, list[ShardEntry]]:
    """Index files of any format, in processes or by the machines of an `engine`.

    Returns the path of the index, and the files that could not be read to their end. Raises `ShardError`.
    """
    source = find_source(files)
    form = source.format
    if source.session is not None:
        from savable_pipeline.data.stores.remote_indexing import index_remote  # imported only for remote files

        return index_remote(source.files, remote_files(source, form), form, source.session, progress, engine)
    if form.name == FOLDER.name:
        return open_folder(source.files, form, relists=True).index_path, []
    each = None if engine is None else each_shard_by(engine)
    return index_files(source.listed or source.files, form, processes=processes, each=each, progress=progress)
