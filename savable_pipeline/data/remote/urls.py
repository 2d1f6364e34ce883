"""Finds the shards behind URLs that a user names by a folder, a glob, a brace pattern, one file, or a list of these.

A folder of the Hub is read as one dataset only where it is one. Its splits and configurations are those that the card
says (`configs:` at the top of README.md), or else those that the names of files tell, as HF `datasets` reads them:

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
    """Shards behind one URL: names relative to `root`, in order.

    `sizes` is int64 (names,), in bytes, -1 where the server did not list the shard; `stamps`, of those that it listed,
    change when the shard is replaced. There are as many as names, or none.
    """

    root: str
    names: Sequence[str]
    sizes: Rows
    stamps: Sequence[str] = ()

    @classmethod
    def named(cls, root: str, names: Sequence[str]) -> RemoteShards:
        """Shards of which the names alone are known."""
        return cls(root, names, np.full(len(names), -1, np.int64))


def find_remote(shards: Shards, session: Session, kind: ShardKind = TAR_FILES, *, stamps: bool = False) -> RemoteShards:
    """The shards of these URLs: folders, brace patterns, globs in buckets, files, or a list of these.

    The root is the given folder, or the deepest that holds all the shards. A folder on a web server, which cannot be
    listed, gives no names. With `stamps` those of a bucket are found too. Raises `ShardError` if there is no shard, or
    if one is named twice.
    """
    specs = [spelled for spec in spelled_out(shards) for spelled in expand_braces(spec)]
    stamps = stamps or any(map(is_hub, specs))
    if kind.listing:
        return _listed_behind(specs, session, kind)
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
    """All shards of a folder; of one of the Hub they are of one split."""
    _check_readable(root, kind)
    found = _listed(root, session, kind)
    if is_hub(root) and session.stat(root, f"{META}/{METADATA_FILES[2]}") is None:
        _check_one_split(root, found.texts(), kind.suffixes[0], session)
    return RemoteShards(root, found.texts(), found.sizes_in_bytes(), found.stamp_texts() if stamps else ())


def _listed_behind(specs: list[str], session: Session, kind: ShardKind) -> RemoteShards:
    root = specs[0].rstrip("/")
    if not root.startswith("http"):
        session.listing(root)
    listing = session.read(root, kind.listing) if len(specs) == 1 else None
    if listing is None:
        raise ShardError(f"{root}/{kind.listing}: not found. Name the one folder that has it", reason=NOT_THERE)
    if root.startswith("http"):
        there = session.stats(root, sorted({name for several in kind.names(root, listing) for name in several}))
    else:
        there = {name: (size, stamp) for name, size, stamp in session.listing(root)}
    found = kind.names_in(root, listing, there.__contains__, False)
    sizes = np.array([there[name][0] for name in found], np.int64)
    return RemoteShards(root, found, sizes, [there[name][1] for name in found])


def _folder(spec: str) -> tuple[str, str | None]:
    """The folder of a URL, and the glob below it, or None."""
    parts = spec.rstrip("/").split("/")
    magic = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    return ("/".join(parts), None) if magic is None else ("/".join(parts[:magic]), "/".join(parts[magic:]))


def _matches(parts: list[str], patterns: list[str]) -> bool:
    """Whether a name matches a glob, part by part; `**` stands for any number of parts."""
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
    """Raises `ShardError` for a name that says that the file is compressed."""
    if spec.endswith(kind.refused):
        raise ShardError(f"{spec}: {kind.compressed[0]} cannot be read at an offset. {kind.cure}")


def _listed(root: str, session: Session, kind: ShardKind) -> Listing:
    """The shards below a folder; none on a web server, which cannot be listed."""
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
    """Raises `ShardError` for files of several splits below an address of the Hub, with the names to choose from."""
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
    """A glob for each split that these names tell, if they tell several."""
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
    """The same for each split of each configuration of a card; empty for a card that says nothing of them."""
    from savable_pipeline.data.shards.yaml_limits import load_yaml  # here: it takes PyYAML

    head = _CARD.match(card)
    try:
        configs: Any = load_yaml(head[1]).get("configs") if head else None
        found = {
            name: pattern if pattern.endswith(suffix) else _ended(pattern, suffix)
            for config in configs or ()
            for name, pattern in _splits(config)
        }
    except (ValueError, AttributeError, TypeError, LookupError):  # written by anybody: then names tell
        return {}
    return found


def _splits(config: dict[str, Any]) -> Iterable[tuple[str, str]]:
    name, files = config["config_name"], config.get("data_files", f"{config.get('data_dir', '.')}/**")
    for each in files if isinstance(files, list) else [files]:
        split, path = (each["split"], each["path"]) if isinstance(each, dict) else ("train", each)
        yield f"{name}: {split}", path if isinstance(path, str) else path[0]


def _ended(pattern: str, suffix: str) -> str:
    return f"{pattern}/*{suffix}" if pattern.endswith("**") else f"{pattern.rstrip('*')}*{suffix}"
