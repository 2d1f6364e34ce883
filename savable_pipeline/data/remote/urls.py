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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from savable_pipeline.data.remote.listing import Listing
from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.shards import paths
from savable_pipeline.data.shards.index import Format
from savable_pipeline.data.shards.metadata import META, METADATA_FILES
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import ShardError

_NUMBERED = re.compile(r"(.*/)?([\w.]+)-\d{5}-of-\d{5}[^/]*")
_WORDS = "train|training|validation|valid|val|dev|test|testing|eval|evaluation"
_WORD = re.compile(rf"(?:.*[/._ -]|.*\d|)({_WORDS})(?=[/._ \d-]|$)")
_CARD = re.compile(rb"---\s*\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)
_SHOWN = 12
_MAGIC = "*?["


@dataclass(frozen=True, slots=True, eq=False)
class RemoteShards:
    """Shards below one URL, with names relative to `root`, in order.

    `sizes` is int64 (names,), in bytes, -1 where the server did not list the shard; `stamps`, of those that it listed,
    change when the shard is replaced. There are as many as names, or none. Whether a marker lists all that there should
    be is `is_listed`.
    """

    root: str
    names: Sequence[str]
    sizes: Rows
    stamps: Sequence[str] = ()
    is_listed: bool = False

    @classmethod
    def named(cls, root: str, names: Sequence[str]) -> RemoteShards:
        """Build shards of which only the names are known."""
        return cls(root, names, np.full(len(names), -1, np.int64))


def names_behind(files: paths.Shards, session: Session) -> tuple[str, Sequence[str]]:
    """Return the URL of a folder and the names below it.

    Of other URLs it is "" and these. Of a folder on a web server, which cannot be listed, there are none.
    """
    specs = paths.spelled_out(files)
    root, pattern = _folder(specs[0])
    is_file = posixpath.splitext(urlsplit(root).path)[1] and not specs[0].endswith("/")
    if len(specs) > 1 or pattern is not None or "{" in specs[0] or is_file:
        return "", specs
    return root, [] if root.startswith("http") else session.listing(root).texts()


def find_remote(files: paths.Shards, session: Session, form: Format, *, stamps: bool = False) -> RemoteShards:
    """Return the files of a format at these URLs.

    They are folders, brace patterns, globs in buckets, files, or a list of these.

    The root is the folder that the user named, or the deepest one that has all the shards. A folder on a web server,
    which cannot be listed, yields no names. With `stamps`, those of a bucket are returned too. Raises `ShardError` if
    there is no shard, or if one is named twice.
    """
    specs = [spelled for spec in paths.spelled_out(files) for spelled in paths.expand_braces(spec)]
    stamps = stamps or any(map(paths.is_hub, specs))
    root, pattern = _folder(specs[0]) if len(specs) == 1 else ("", None)
    if len(specs) == 1 and pattern is None and not form.has(root):
        return _in_folder(root, session, form, stamps)
    urls: list[str] = []
    known: dict[str, tuple[int, str]] = {}  # by URL: size in bytes, and stamp
    for spec in specs:
        if form.has(spec) and not any(c in spec for c in _MAGIC):
            urls.append(spec)
            continue
        matching = _matching(spec, session, form)
        urls += matching
        known |= matching
    if len({*urls}) < len(urls):
        twice = Counter(urls).most_common(1)[0][0]
        raise ShardError(f"{twice}: the same shard is named twice. Name it once")
    root = _common_root(urls)
    urls.sort()
    found = [known.get(url, (-1, "")) for url in urls]
    names = [url[len(root) + 1 :] for url in urls]
    sizes = np.array([size for size, _ in found], np.int64)
    return RemoteShards(root, names, sizes, [stamp if stamps else "" for _, stamp in found])


def _matching(spec: str, session: Session, form: Format) -> dict[str, tuple[int, str]]:
    """The size and stamp of each object of a bucket that a folder or a glob stands for, by URL."""
    folder, pattern = _folder(spec)
    _check_readable(spec, form)
    if folder.startswith("http"):
        raise ShardError(f"{spec}: web servers cannot be listed. Name the shards, or a single folder")
    matches = _matcher(pattern or "**")
    found = {f"{folder}/{name}": (size, stamp) for name, size, stamp in _listed(folder, session, form) if matches(name)}
    if not found:
        raise ShardError(f"{spec}: no shard matches. Check the pattern", reason=paths.NOT_THERE)
    return found


def _in_folder(root: str, session: Session, form: Format, stamps: bool) -> RemoteShards:
    """All files of a folder; of one of the Hub they are of one split, on a web server those that a marker lists."""
    _check_readable(root, form)
    on_server = root.startswith("http")
    if not on_server:
        session.listing(root)
    heads = {name: head for name in form.markers if (head := session.read(root, name)) is not None}
    try:
        listed = None if form.listed is None else form.listed(heads)
        if listed is not None:
            stats = session.stats(root, sorted({name for each in listed for name in each if paths.is_inside(name)}))
            names = form.files([*stats], heads)
    except ValueError as error:
        raise ShardError(f"{root}: {error}", reason=paths.NOT_THERE) from error
    if listed is None and on_server:
        return RemoteShards.named(root, [])
    if listed is None:
        found = _listed(root, session, form)
        if paths.is_hub(root) and session.stat(root, f"{META}/{METADATA_FILES[2]}") is None:
            _check_one_split(root, found.texts(), form.suffixes[0], session)
        return RemoteShards(root, found.texts(), found.sizes_in_bytes(), found.stamp_texts() if stamps else ())
    if gone := set(names).difference(stats):
        raise ShardError(
            f"{root}/{min(gone)}: named by {' or '.join(heads)}, and not there. Copy the whole folder",
            reason="missing shard",
        )
    sizes = np.array([stats[name][0] for name in names], np.int64)
    return RemoteShards(root, names, sizes, [stats[name][1] for name in names], is_listed=True)


def _folder(spec: str) -> tuple[str, str | None]:
    """Return the folder of a URL, and the glob below it or None."""
    parts = spec.rstrip("/").split("/")
    magic = next((i for i, part in enumerate(parts) if any(c in part for c in _MAGIC)), None)
    return ("/".join(parts), None) if magic is None else ("/".join(parts[:magic]), "/".join(parts[magic:]))


def _matcher(pattern: str) -> Callable[[str], bool]:
    """What tells whether a name matches a glob, part by part; `**` stands for any number of parts."""
    parts = pattern.split("/")
    if parts == ["**"]:
        return lambda name: True
    if "**" in parts:
        return lambda name: _matches(name.split("/"), parts)
    # As many slashes as in the pattern: none of them is matched by a wildcard.
    match, slashes = re.compile(fnmatch.translate(pattern)).match, pattern.count("/")
    return lambda name: match(name) is not None and name.count("/") == slashes


def _matches(parts: list[str], patterns: list[str]) -> bool:
    """Return whether a name matches a glob, part by part.

    `**` matches any number of parts.
    """
    if not patterns or not parts:
        return not parts and all(pattern == "**" for pattern in patterns)
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or _matches(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _common_root(urls: list[str]) -> str:
    folders = [urlsplit(folder) for folder in {url.rpartition("/")[0] for url in urls}]
    places = {(folder.scheme, folder.netloc) for folder in folders}
    if len(places) > 1:
        raise ShardError(f"{urls[0]}: shards of {len(places)} buckets or servers. Use one reader for each")
    scheme, netloc = places.pop()
    return f"{scheme}://{netloc}{posixpath.commonpath([folder.path or '/' for folder in folders])}".rstrip("/")


def _check_readable(spec: str, form: Format) -> None:
    """Raises `ShardError` for a name that says that the file is compressed."""
    if form.packs(spec):
        raise ShardError(f"{spec}: a compressed file cannot be read at an offset. {paths.PACKED_CURE}")


def _listed(root: str, session: Session, form: Format) -> Listing:
    """The files of a format below a folder of a bucket."""
    found = session.listing(root).only(lambda name: form.has(name) and not paths.is_hidden_path(name))
    if not found:
        copied = f". Read other files from a copy: `{paths.HubAddress.of(root).download}`" if paths.is_hub(root) else ""
        raise ShardError(f"{root}: no {' or '.join(form.suffixes)} object has this prefix{copied}")
    return found


def _check_one_split(root: str, names: Iterable[str], suffix: str, session: Session) -> None:
    """Raises `ShardError` for files of several splits below an address of the Hub, with the names to choose from."""
    whole = not paths.HubAddress.of(root).path
    found = _of_card(session.call("card", root), suffix) if whole else {}
    found = found or _of_names(names, suffix)
    if len(found) > 1:
        shown = ", ".join(f"{pattern} ({name})" for name, pattern in list(found.items())[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ShardError(
            f"{root}: {len(found)} splits or configurations. Name the files of one, or list several\n/{shown}{more}"
        )


def _of_names(names: Iterable[str], suffix: str) -> dict[str, str]:
    """Return a glob for each split that these names show, if they show several."""
    found: dict[str, str] = {}
    for name in names:
        numbered, word = _NUMBERED.fullmatch(name), _WORD.match(name)
        if numbered:
            found.setdefault(numbered[2], f"{numbered[1] or ''}{numbered[2]}-*{suffix}")
        elif word:
            begin, rest = name[: word.start(1)], name[word.end(1) :]
            folder = begin.rpartition("/")[0] + "/" if "/" in begin else ""
            glob = f"{begin}{word[1]}/**/*{suffix}" if rest.startswith("/") else f"{folder}*{word[1]}*{suffix}"
            found.setdefault(word[1], glob)
    return found if len(found) > 1 else {}


def _of_card(card: bytes, suffix: str) -> dict[str, str]:
    """Return a glob for each split of each configuration of a card, if it has any."""
    from savable_pipeline.data.shards.yaml_limits import load_yaml  # imported here, because it imports PyYAML

    head = _CARD.match(card)
    try:
        configs: Any = load_yaml(head[1]).get("configs") if head else None
        found = {
            name: pattern if pattern.endswith(suffix) else _ended(pattern, suffix)
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


def _ended(pattern: str, suffix: str) -> str:
    return f"{pattern}/*{suffix}" if pattern.endswith("**") else f"{pattern.rstrip('*')}*{suffix}"
