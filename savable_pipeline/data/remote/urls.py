"""Finds the shards at URLs: folders, globs, brace patterns, files, or lists.

A folder of the Hub is one dataset only if it has one split. Its splits and configurations are those in its card
(`configs:` at the top of README.md), or else follow from the names of files, as in HF `datasets`:

    data/train-00000-of-00002.parquet    split train
    test/a.jsonl, corpus_test.jsonl      split test
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.shards import paths
from savable_pipeline.data.shards.index import Format
from savable_pipeline.data.shards.indexing import without_compressed
from savable_pipeline.data.shards.metadata import META, METADATA_FILES
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import ShardError

_NUMBERED = re.compile(r"(.*/)?([\w.]+)-\d{5}-of-\d{5}[^/]*")
_SPLIT_WORDS = "train|training|validation|valid|val|dev|test|testing|eval|evaluation"
_SPLIT_WORD = re.compile(rf"(?:.*[/._ -]|.*\d|)({_SPLIT_WORDS})(?=[/._ \d-]|$)")
_CARD = re.compile(rb"---\s*\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)
_MOST_SHOWN = 12
_WILDCARDS = frozenset("*?[")
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]*$")  # a file suffix, but not a version such as v1.5


@dataclass(frozen=True, slots=True, eq=False)
class RemoteShards:
    """Shards below one URL, with names relative to `root`, in order.

    Attributes:
        root: URL of the folder that was named, or of the deepest one that has all the shards.
        names: Names of the shards.
        sizes: int64 (names,), in bytes, -1 for a shard that was named and not listed.
        stamps: Texts that change when a shard is replaced, "" if unknown. There are as many as names, or none.
        is_listed: Whether a marker lists all that there should be.
        whole: Whether these are all files below a folder that was named.
    """

    root: str
    names: Sequence[str]
    sizes: Rows
    stamps: Sequence[str] = ()
    is_listed: bool = False
    whole: bool = False

    @classmethod
    def named(cls, root: str, names: Sequence[str], *, whole: bool = False) -> RemoteShards:
        """Build shards of which only the names are known."""
        return cls(root, names, np.full(len(names), -1, np.int64), whole=whole)

    def only(self, names: Sequence[str]) -> RemoteShards:
        """Return shards with these names, of unknown size if they are not among these."""
        if len(names) == len(self.names):
            return self
        known = {name: number for number, name in enumerate(self.names)}
        numbers = [known.get(name, -1) for name in names]
        sizes = np.array([self.sizes[number] if number >= 0 else -1 for number in numbers], np.int64)
        stamps = [self.stamps[number] if number >= 0 else "" for number in numbers] if self.stamps else ()
        return replace(self, names=names, sizes=sizes, stamps=stamps)


def list_remote(files: paths.Shards, session: Session) -> RemoteShards:
    """List the objects that URLs name, without hidden ones.

    URLs name a folder with all below it, globs in buckets, brace patterns, objects, or a list of these. A folder on a
    web server, which cannot be listed, yields no names. Raises `ShardError` for nothing, and for an object that is
    named twice.
    """
    specs = [spelled for spec in paths.expand_specs(files) for spelled in paths.expand_braces(spec)]
    if not specs:
        raise ShardError("the list of shards is empty")
    objects = _objects(specs, session)
    if len(specs) == 1 and specs[0] not in objects and _WILDCARDS.isdisjoint(specs[0]):
        root = specs[0].rstrip("/")
        if (folder := _all_below(root, session)) is not None:
            return folder
        if specs[0] != root:
            raise ShardError(f"{root}: no object has this prefix. Check the address", reason=paths.NO_SUCH_PATH)
        objects = {root}  # reading it raises an error that names the missing object
    known: dict[str, tuple[int, str]] = {}  # by URL: size in bytes, and stamp
    for spec in specs:
        found = {spec: (-1, "")} if spec in objects else _matching(spec, session)
        if twice := known.keys() & found:
            raise ShardError(f"{min(twice)}: the same shard is named twice. Name it once")
        known |= found
    return _relative_to_root(known)


def select(listed: RemoteShards, form: Format, chosen: Sequence[str] | None, session: Session) -> RemoteShards:
    """Return the files of a format among those that were listed.

    They are below the deepest folder that has all of them.

    `chosen` has the names of files that were recognized. None: choose by name. In a folder of the Hub, they must be of
    one split. On a web server, a marker lists them. Raises `ShardError` if there are none, or for a compressed file.
    """
    root = listed.root
    try:
        heads = session.heads(root, dict.fromkeys(form.markers, paths.LARGEST_INDEX)) if listed.whole else {}
        groups = None if form.listed is None else form.listed(heads)
        if groups is not None:
            return _listed_by_marker(root, form, heads, groups, session)
        if listed.whole and root.startswith("http"):
            return replace(listed, names=())
        names = form.files(listed.names, {}) if chosen is None else chosen
    except ValueError as error:
        raise ShardError(f"{root}: {error}", reason=paths.NO_SUCH_PATH) from error
    unlisted = [listed.names[number] for number in np.flatnonzero(listed.sizes < 0).tolist()]
    instead = f"Read other files from a copy: `{paths.HubAddress.of(root).download}`" if paths.is_hub(root) else ""
    advice = "object has this prefix", instead or "sp.read(…) reads any kind of files"
    names = without_compressed(root, form, listed, names, unlisted, advice)
    if listed.whole and paths.is_hub(root) and session.stat(root, f"{META}/{METADATA_FILES[2]}") is None:
        _check_one_split(root, names, form.suffixes[0], session)
    found = listed.only(names)
    if not listed.whole:
        rows = zip(names, found.sizes.tolist(), found.stamps, strict=True)
        found = _relative_to_root({f"{root}/{name}": (size, stamp) for name, size, stamp in rows})
    return replace(found, stamps=()) if form.whole and not paths.is_hub(root) else found


def _all_below(root: str, session: Session) -> RemoteShards | None:
    """Return all objects below a folder, or None.

    For a web server, which cannot be listed, there are no names.
    """
    if root.startswith("http"):
        return RemoteShards.named(root, [], whole=True)
    found = session.listing(root).only(lambda name: not paths.is_hidden_path(name))
    return RemoteShards(root, found.all_names, found.sizes_in_bytes(), found.all_stamps, whole=True) if found else None


def _objects(specs: Sequence[str], session: Session) -> set[str]:
    """Return which addresses are objects. A bucket is asked about doubtful ones."""
    is_alone, found, doubtful = len(specs) == 1, set[str](), defaultdict[str, list[str]](list)
    for spec in specs:
        folder, _, name = spec.rpartition("/")
        has_suffix = _SUFFIX.search(spec) is not None
        if not name or folder.count("/") < (4 if paths.is_hub(spec) else 2) or not _WILDCARDS.isdisjoint(spec):
            continue
        # In a list, an address with a suffix is an object. On a web server, a folder is alone and has no suffix.
        if has_suffix and not is_alone:
            found.add(spec)
        elif spec.startswith("http"):
            found |= {spec} if has_suffix or not is_alone else set()
        elif has_suffix == is_alone:
            doubtful[folder].append(name)
    return found.union(
        *({f"{folder}/{name}" for name in session.stats(folder, names)} for folder, names in doubtful.items())
    )


def _matching(spec: str, session: Session) -> dict[str, tuple[int, str]]:
    """Return the size and stamp of each object in a folder or glob of a bucket, by URL."""
    folder, pattern = _split_glob(spec)
    if folder.startswith("http"):
        raise ShardError(f"{spec}: web servers cannot be listed. Name the shards, or a single folder")
    names_hidden = paths.is_hidden_path(pattern or "")
    listing = [each for each in session.listing(folder) if names_hidden or not paths.is_hidden_path(each[0])]
    for glob in (pattern or "**", f"{pattern}/**"):  # the pattern may match folders
        matches = _matcher(glob)
        if found := {f"{folder}/{name}": (size, stamp) for name, size, stamp in listing if matches(name)}:
            return found
    raise ShardError(f"{spec}: no shard matches. Check the pattern", reason=paths.NO_SUCH_PATH)


def _relative_to_root(known: Mapping[str, tuple[int, str]]) -> RemoteShards:
    """Return objects with names relative to the deepest folder that has all of them.

    `known` has size and stamp by URL.
    """
    urls, root = sorted(known), _common_root([*known])
    sizes, stamps = zip(*map(known.__getitem__, urls), strict=True)
    return RemoteShards(root, [url[len(root) + 1 :] for url in urls], np.array(sizes, np.int64), stamps)


def _listed_by_marker(
    root: str, form: Format, heads: dict[str, bytes], groups: list[tuple[str, ...]], session: Session
) -> RemoteShards:
    """Return the files that a marker lists.

    Raises ValueError, and `ShardError` if one is missing.
    """
    stats = session.stats(root, sorted({name for each in groups for name in each if paths.is_inside(name)}))
    names = form.files([*stats], heads)
    if missing := set(names).difference(stats):
        raise ShardError(
            f"{root}/{min(missing)}: named by {' or '.join(heads)}, and not there. Copy the whole folder",
            reason="missing shard",
        )
    sizes = np.array([stats[name][0] for name in names], np.int64)
    return RemoteShards(root, names, sizes, [stats[name][1] for name in names], is_listed=True, whole=True)


def _split_glob(spec: str) -> tuple[str, str | None]:
    """Return the folder of a URL, and the glob below it or None."""
    parts = spec.rstrip("/").split("/")
    first = next((i for i, part in enumerate(parts) if not _WILDCARDS.isdisjoint(part)), None)
    return ("/".join(parts), None) if first is None else ("/".join(parts[:first]), "/".join(parts[first:]))


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a name matches a glob.

    Components are matched one by one, and `**` matches any number of them.
    """
    parts = pattern.split("/")
    if parts == ["**"]:
        return lambda name: True
    if "**" in parts:
        return lambda name: _matches(name.split("/"), parts)
    # A wildcard does not match a slash, so names need as many slashes as the pattern.
    match, slashes = re.compile(fnmatch.translate(pattern)).match, pattern.count("/")
    return lambda name: match(name) is not None and name.count("/") == slashes


def _matches(parts: list[str], patterns: list[str]) -> bool:
    """Return whether the components of a name match those of a glob.

    `**` matches any number of components.
    """
    if not patterns or not parts:
        return not parts and all(pattern == "**" for pattern in patterns)
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or _matches(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _common_root(urls: Sequence[str]) -> str:
    folders = [urlsplit(folder) for folder in {url.rpartition("/")[0] for url in urls}]
    servers = {(folder.scheme, folder.netloc) for folder in folders}
    if len(servers) > 1:
        raise ShardError(f"{urls[0]}: shards of {len(servers)} buckets or servers. Use one reader for each")
    scheme, netloc = servers.pop()
    return f"{scheme}://{netloc}{posixpath.commonpath([folder.path or '/' for folder in folders])}".rstrip("/")


def _check_one_split(root: str, names: Iterable[str], suffix: str, session: Session) -> None:
    """Raise `ShardError` for files of several splits of a dataset of the Hub."""
    is_whole_dataset = not paths.HubAddress.of(root).path
    found = _splits_in_card(session.call("card", root), suffix) if is_whole_dataset else {}
    found = found or _splits_in_names(names, suffix)
    if len(found) > 1:
        shown = ", ".join(f"{pattern} ({name})" for name, pattern in list(found.items())[:_MOST_SHOWN])
        more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        raise ShardError(
            f"{root}: {len(found)} splits or configurations. Name the files of one, or list several\n/{shown}{more}"
        )


def _splits_in_names(names: Iterable[str], suffix: str) -> dict[str, str]:
    """Return a glob for each split that these names show, if they show several."""
    found: dict[str, str] = {}
    for name in names:
        numbered, word = _NUMBERED.fullmatch(name), _SPLIT_WORD.match(name)
        if numbered:
            found.setdefault(numbered[2], f"{numbered[1] or ''}{numbered[2]}-*{suffix}")
        elif word:
            begin, rest = name[: word.start(1)], name[word.end(1) :]
            folder = begin.rpartition("/")[0] + "/" if "/" in begin else ""
            glob = f"{begin}{word[1]}/**/*{suffix}" if rest.startswith("/") else f"{folder}*{word[1]}*{suffix}"
            found.setdefault(word[1], glob)
    return found if len(found) > 1 else {}


def _splits_in_card(card: bytes, suffix: str) -> dict[str, str]:
    """Return a glob for each split of each configuration of a card, if it has any."""
    from savable_pipeline.data.shards.yaml_limits import load_yaml  # imported here, because it imports PyYAML

    head = _CARD.match(card)
    try:
        configs: Any = load_yaml(head[1]).get("configs") if head else None
        found = {
            name: pattern if pattern.endswith(suffix) else _with_suffix(pattern, suffix)
            for config in configs or ()
            for name, pattern in _splits(config)
        }
    except (ValueError, AttributeError, TypeError, LookupError):  # the card is malformed, so the names decide
        return {}
    return found


def _splits(config: dict[str, Any]) -> Iterable[tuple[str, str]]:
    name, files = config["config_name"], config.get("data_files", f"{config.get('data_dir', '.')}/**")
    for each in files if isinstance(files, list) else [files]:
        split, path = (each["split"], each["path"]) if isinstance(each, dict) else ("train", each)
        yield f"{name}: {split}", path if isinstance(path, str) else path[0]


def _with_suffix(pattern: str, suffix: str) -> str:
    return f"{pattern}/*{suffix}" if pattern.endswith("**") else f"{pattern.rstrip('*')}*{suffix}"
