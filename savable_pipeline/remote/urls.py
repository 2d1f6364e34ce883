"""Finds the shards behind URLs that a user names by a folder, a glob, a brace pattern, one file, or a list of these."""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias
from urllib.parse import urlsplit

from savable_pipeline.errors import ShardError
from savable_pipeline.remote.downloader import Downloader
from savable_pipeline.shards.braces import expand_braces
from savable_pipeline.shards.paths import NOT_THERE, TARS, ShardKind, Shards, spelled_out

SCHEMES = ("s3", "gs", "az", "http", "https")

_Listed: TypeAlias = dict[str, tuple[int, str]]  # by name: size in bytes, and stamp


@dataclass(frozen=True, slots=True)
class RemoteShards:
    """Shards behind one URL: names relative to `root`, in order; sizes in bytes and stamps if the server listed them.

    A stamp changes when the shard is replaced.
    """

    root: str
    names: Sequence[str]
    sizes: dict[str, int]
    stamps: dict[str, str] = field(default_factory=dict, compare=False)


def is_remote(shards: Shards) -> bool:
    """Whether these are URLs. Raises `ShardError` for a mixture with files, and for an unsupported URL."""
    specs = spelled_out(shards)
    remote = [spec for spec in specs if "://" in spec]
    if remote and len(remote) < len(specs):
        raise ShardError(f"{remote[0]}: local shards and shards behind a URL need a reader each")
    for spec in remote:
        if spec.split("://")[0] not in SCHEMES:
            raise ShardError(f"{spec}: shards can be read from {', '.join(SCHEMES)}, not from this kind of URL")
        if "?" in spec and spec.startswith("http"):
            raise ShardError(f"{spec}: a URL with a query names one object; shards need plain addresses")
    return bool(remote)


def find_remote(shards: Shards, downloader: Downloader, kind: ShardKind = TARS) -> RemoteShards:
    """The shards of these URLs: folders, brace patterns, globs in buckets, files, or a list of these.

    The root is the given folder, or the deepest that holds all the shards. A folder on a web server, which cannot be
    listed, gives no names. Raises `ShardError` if there is no shard, or if one is named twice.
    """
    specs = [spelled for spec in spelled_out(shards) for spelled in expand_braces(spec)]
    root, pattern = _folder(specs[0]) if len(specs) == 1 else ("", None)
    if len(specs) == 1 and pattern is None and not root.endswith(kind.suffixes):
        _check_readable(root, kind)
        return _below(root, _listed(root, downloader, kind))
    urls: list[str] = []
    listed: _Listed = {}  # by URL
    for spec in specs:
        folder, pattern = _folder(spec)
        _check_readable(spec, kind)
        if pattern is None and spec.endswith(kind.suffixes):
            urls.append(spec)
            continue
        objects = _listed(folder, downloader, kind)
        if not objects:
            raise ShardError(f"{spec}: a web server cannot be listed; name the shards, or give one folder alone")
        found = [name for name in objects if pattern is None or _matches(name.split("/"), pattern.split("/"))]
        if not found:
            raise ShardError(f"{spec}: no shard matches", reason=NOT_THERE)
        urls += [f"{folder}/{name}" for name in found]
        listed.update((f"{folder}/{name}", objects[name]) for name in found)
    if len(set(urls)) < len(urls):
        raise ShardError(f"{next(url for url in urls if urls.count(url) > 1)}: the same shard is named twice")
    root = _common_root(urls)
    found_there = _below(root, {url[len(root) + 1 :]: of for url, of in listed.items()})
    return replace(found_there, names=sorted(url[len(root) + 1 :] for url in urls))


def _below(root: str, listed: _Listed) -> RemoteShards:
    sizes = {name: size for name, (size, _) in listed.items()}
    return RemoteShards(root, sorted(listed), sizes, {name: stamp for name, (_, stamp) in listed.items()})


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
        raise ShardError(f"{urls[0]}: the shards of one reader lie in one bucket or on one server, not {len(places)}")
    scheme, netloc = places.pop()
    return f"{scheme}://{netloc}{posixpath.commonpath([posixpath.dirname(urlsplit(url).path) for url in urls])}".rstrip(
        "/"
    )


def _check_readable(spec: str, kind: ShardKind) -> None:
    """Raises `ShardError` for a name that says that the file is compressed."""
    if spec.endswith(kind.refused):
        raise ShardError(f"{spec}: {kind.compressed[0]} cannot be read at an offset; {kind.cure} it")


def _listed(root: str, downloader: Downloader, kind: ShardKind) -> _Listed:
    """The shards below a folder, by name; none on a web server, which cannot be listed."""
    if root.startswith("http"):
        return {}
    found = {name: (size, stamp) for name, size, stamp in downloader.call("listing", root) if _is_shard(name, kind)}
    if not found:
        raise ShardError(f"{root}: no {' or '.join(kind.suffixes)} object below this prefix")
    return found


def _is_shard(name: str, kind: ShardKind) -> bool:
    return name.endswith(kind.suffixes) and not _hidden(name) and not kind.left_out(name.rpartition("/")[2])


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
