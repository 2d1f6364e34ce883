"""Manifest of a conversion, to recognize the same one and whether it finished."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.shards.tar_format import TarIndex
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.describe import describe
from savable_pipeline.tools.convert.options import MANIFEST, REJECTED, Options, Report
from savable_pipeline.tools.convert.prepare import Prepared
from savable_pipeline.tools.convert.source import sizes_digest, versions_of
from savable_pipeline.tools.convert.target import Target

VERSION = 6  # only manifests of this version are read
_CLOCK_STEP_NS = 2_000_000_000  # coarsest steps of the times of files
_SHOWN = 10  # most files that an error names


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Input and options of a conversion, and its result once it is finished."""

    version: int
    files: str  # hash of the names and sizes of the files, and of the chosen keys
    versions: str  # hash of the times when the files were written
    source_id: str  # identity of the source, which differs for a replaced one
    samples: int  # number of rows of the source, including those that will be rejected
    options: Options
    source: str = ""  # path or URL, for messages
    done: bool = False
    report: Report | None = None  # without its rejects
    hashes: list[int] = []  # number of hashes of contents of each range
    names_files: bool = False  # whether rows name files; `versions` does not cover these


def manifest_of(prepared: Prepared, options: Options, keys: frozenset[str] | None) -> tuple[Manifest, int]:
    """Return the manifest of a conversion, and when a file was last written, in ns."""
    is_empty = not prepared.ranges
    rejected = msgspec.json.encode(prepared.rejected)
    digest = hashlib.sha256(rejected if is_empty else sizes_digest(prepared.source).encode())
    digest.update("\0".join(sorted(keys or ())).encode("utf-8", "surrogateescape"))
    source_id, versions, newest_ns = ("", "", 0) if is_empty else versions_of(prepared.source)
    manifest = Manifest(
        version=VERSION,
        files=digest.hexdigest(),
        versions=versions,
        source_id=source_id,
        samples=sum(span.end - span.start for spans in prepared.ranges for span in spans),
        # the bytes are equal for None and "first"
        options=msgspec.structs.replace(options, key_end=options.key_end or "first"),
        source=_public_name(prepared.source.path),
    )
    return manifest, newest_ns


def _public_name(source: str) -> str:
    """Return the absolute path of a source, or its URL without user, password and query."""
    if "://" not in source:
        return str(Path(source).absolute())
    url = urlsplit(source)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if there is none.

    Raises `SavableError` for one of another version.
    """
    path, fault = folder / MANIFEST, ""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        fault = str(error)
    if fault or found.version != VERSION:
        fault = fault or f"its version is {found.version}, not {VERSION}"
        raise SavableError(
            f"{path}: not a manifest of this version: {fault}. Convert into another folder, or remove this one"
        )
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder."""
    pretty = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    replace_file(folder / MANIFEST, [pretty], sync=True)


def may_have_changed(folder: Path, manifest: Manifest, earlier: Manifest, newest_ns: int) -> bool:
    """Return whether files with the same names and sizes may have changed.

    That is since the manifest was written. `newest_ns` is the time of the last change to one of them.
    """
    written_ns = (folder / MANIFEST).stat().st_mtime_ns
    is_same = (earlier.source_id, earlier.versions) == (manifest.source_id, manifest.versions)
    return not is_same or earlier.names_files or newest_ns > written_ns - _CLOCK_STEP_NS


def finished_report(output: Target, earlier: Manifest) -> Report | None:
    """Return the report of a finished conversion, or None.

    It is None for an unfinished conversion, and for one that lacks a shard. Missing files of offsets are written.
    Raises `SavableError` for a finished conversion in a bucket.
    """
    folder = output.folder
    if earlier.report is None:
        return None
    if output.bucket is not None:
        raise SavableError(f"{folder} has this whole conversion. Remove it to write it again, or use another URL")
    entries = TarIndex(folder / INDEX_NAME).shards if (folder / INDEX_NAME).exists() else []
    if not all((folder / e.name).exists() and (folder / e.name).stat().st_size == e.size for e in entries):
        return None
    if not all((folder / f"{entry.name}.idx").exists() for entry in entries):
        describe(folder)
    with (folder / REJECTED).open("rb") as file:
        rejected = [msgspec.json.decode(line, type=Reject) for line in file]
    return replace(earlier.report, rejected=rejected, already=True)


def check_same(folder: Path, manifest: Manifest, earlier: Manifest) -> None:
    """Check that a folder has the same conversion. Times of files may differ.

    Raises `SavableError` that lists the differences.
    """
    old, new = _settings(earlier), _settings(manifest)
    differences = [f"{name}: {old[name]!r} there, {new[name]!r} here" for name in new if old[name] != new[name]]
    if not differences and earlier.files != manifest.files:
        differences = ["input: other files, or other keys"]
    if differences:
        differences = [*filter(None, [_other_source(manifest, earlier)]), *differences]
        advice = "Give the same input and options to resume it, or another folder"
        raise SavableError(f"{folder} has another conversion. {advice}\n" + "\n".join(differences))


def _other_source(manifest: Manifest, earlier: Manifest) -> str:
    """Return a line for the error if the sources differ, or ""."""
    return "" if earlier.source == manifest.source else f"source: {earlier.source!r} there, {manifest.source!r} here"


def changed_files(folder: Path, manifest: Manifest, earlier: Manifest, files: list[str]) -> SavableError:
    """Return the error for files that changed since they were converted."""
    names = "\n".join([*files[:_SHOWN], *["…"][: len(files) > _SHOWN]])
    also = _other_source(manifest, earlier)
    return SavableError(
        f"{folder} has another conversion. {len(files)} files changed at the same size since: give them as they were, "
        f"or another folder\n{names}{'; ' * bool(also)}{also}"
    )


def _settings(manifest: Manifest) -> dict[str, Any]:
    """Return the number of samples, and the options by name."""
    return {"samples": manifest.samples, **msgspec.to_builtins(manifest.options)}
