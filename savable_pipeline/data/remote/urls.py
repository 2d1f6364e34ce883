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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from savable_pipeline.data.remote.listing import Listing
from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.shards.metadata import META, METADATA_FILES
from savable_pipeline.data.shards.paths import (
    NOT_THERE,
    TAR_FILES,
    HubAddress,
    ShardKind,
    Shards,
    expand_braces,
    is_hub,
    spelled_out,
)
from savable_pipeline.data.shards.shard_list import Rows
from savable_pipeline.errors import ShardError

_NUMBERED = re.compile(r"(.*/)?([\w.]+)-\d{5}-of-\d{5}[^/]*")
_WORDS = "train|training|validation|valid|val|dev|test|testing|eval|evaluation"
_WORD = re.compile(rf"(?:.*[/._ -]|.*\d|)({_WORDS})(?=[/._ \d-]|$)")
_CARD = re.compile(rb"---\s*\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)
_SHOWN = 12


@dataclass(frozen=True, slots=True, eq=False)
class RemoteShards:
    """Shards below one URL, with names relative to `root`, in order.

    `sizes` is int64 (names,), in bytes, -1 if the server did not list the shard. `stamps`, of listed shards, change
    when the shard is replaced. There are as many as names, or none.
    """

    root: str
    names: Sequence[str]
    sizes: Rows
    stamps: Sequence[str] = ()

    @classmethod
    def named(cls, root: str, names: Sequence[str]) -> RemoteShards:
        """Build shards of which only the names are known."""
        return cls(root, names, np.full(len(names), -1, np.int64))


def find_remote(shards: Shards, session: Session, kind: ShardKind = TAR_FILES, *, stamps: bool = False) -> RemoteShards:
    """Return the shards at these URLs.

    The root is the folder that the user named, or the deepest one that has all the shards. A folder on a web server,
    which cannot be listed, yields no names. With `stamps`, those of a bucket are returned too. Raises `ShardError` if
    stats is no shard, or if one is named twice.
    """
    specs = [spelled for spec in spelled_out(shards) for spelled in expand_braces(spec)]
    stamps = stamps or any(map(is_hub, specs))
    if kind.listing:
        return _in_listing_file(specs, session, kind)
    root, pattern = _folder(specs[0]) if len(specs) == 1 else ("", None)
    if len(specs) == 1 and pattern is None and not root.endswith(kind.suffixes):
        return _in_folder(root, session, kind, stamps)
    urls: list[str] = []
    listed: dict[str, tuple[int, str]] = {}  # by URL: size in bytes, and stamp
    for spec in specs:
        folder, pattern = _folder(spec)
        _check_readable(spec, kind)
        if pattern is None and spec.endswith(kind.suffixes):
            urls.append(spec)
            continue
        objects = _listed(folder, session, kind)
        if not objects:
            raise ShardError(f"{spec}: web servers cannot be listed. Name the shards, or a single folder")
        wanted = "**" if pattern is None else pattern
        matching = {
            f"{folder}/{name}": (size, stamp if stamps else "")
            for name, size, stamp in objects
            if _matches(name.split("/"), wanted.split("/"))
        }
        if not matching:
            raise ShardError(f"{spec}: no shard matches", reason=NOT_THERE)
        urls += matching
        listed.update(matching)
    if len(set(urls)) < len(urls):
        raise ShardError(f"{next(url for url in urls if urls.count(url) > 1)}: the same shard is named twice")
    root = _common_root(urls)
    of = [listed.get(url, (-1, "")) for url in sorted(urls)]
    names = [url[len(root) + 1 :] for url in sorted(urls)]
    return RemoteShards(root, names, np.array([size for size, _ in of], np.int64), [stamp for _, stamp in of])


def _in_folder(root: str, session: Session, kind: ShardKind, stamps: bool) -> RemoteShards:
    """Return all shards of a folder. Those of the Hub must be of one split."""
    _check_readable(root, kind)
    found = _listed(root, session, kind)
    if is_hub(root) and session.stat(root, f"{META}/{METADATA_FILES[2]}") is None:
        _check_one_split(root, found.texts(), kind.suffixes[0], session)
    return RemoteShards(root, found.texts(), found.sizes_in_bytes(), found.stamp_texts() if stamps else ())


def _in_listing_file(specs: list[str], session: Session, kind: ShardKind) -> RemoteShards:
    root = specs[0].rstrip("/")
    if not root.startswith("http"):
        session.listing(root)
    listing = session.read(root, kind.listing) if len(specs) == 1 else None
    if listing is None:
        raise ShardError(f"{root}/{kind.listing}: not found. Name the one folder that has it", reason=NOT_THERE)
    if root.startswith("http"):
        stats = session.stats(root, sorted({name for several in kind.names(root, listing) for name in several}))
    else:
        stats = {name: (size, stamp) for name, size, stamp in session.listing(root)}
    found = kind.names_in(root, listing, stats.__contains__, False)
    sizes = np.array([stats[name][0] for name in found], np.int64)
    return RemoteShards(root, found, sizes, [stats[name][1] for name in found])


def _folder(spec: str) -> tuple[str, str | None]:
    """Return the folder of a URL, and the glob below it or None."""
    parts = spec.rstrip("/").split("/")
    magic = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    return ("/".join(parts), None) if magic is None else ("/".join(parts[:magic]), "/".join(parts[magic:]))


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
    places = {(urlsplit(url).scheme, urlsplit(url).netloc) for url in urls}
    if len(places) > 1:
        raise ShardError(f"{urls[0]}: shards of {len(places)} buckets or servers. Use one reader for each")
    scheme, netloc = places.pop()
    return f"{scheme}://{netloc}{posixpath.commonpath([posixpath.dirname(urlsplit(url).path) for url in urls])}".rstrip(
        "/"
    )


def _check_readable(spec: str, kind: ShardKind) -> None:
    """Raise `ShardError` for a name of a compressed file."""
    if spec.endswith(kind.refused):
        raise ShardError(f"{spec}: {kind.compressed[0]} cannot be read at an offset. {kind.cure}")


def _listed(root: str, session: Session, kind: ShardKind) -> Listing:
    """Return the shards below a folder; none on a web server, which cannot be listed."""
    if root.startswith("http"):
        return Listing.of([])
    found = session.listing(root).only(lambda name: _is_shard(name, kind))
    if not found:
        copied = f". Read other files from a copy: `{HubAddress.of(root).download}`" if is_hub(root) else ""
        raise ShardError(f"{root}: no {' or '.join(kind.suffixes)} object has this prefix{copied}")
    return found


def _is_shard(name: str, kind: ShardKind) -> bool:
    return name.endswith(kind.suffixes) and not _hidden(name) and not kind.left_out(name.rpartition("/")[2])


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _check_one_split(root: str, names: Iterable[str], suffix: str, session: Session) -> None:
    """Raise `ShardError` for files of several splits, with the names to choose from."""
    whole = not HubAddress.of(root).path
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
