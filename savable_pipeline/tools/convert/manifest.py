"""Manifest of a conversion: whether a folder has the same conversion, and whether it is finished."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.shards.tar_format import TarIndex
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert.options import MANIFEST, REJECTED, Options, Report
from savable_pipeline.tools.convert.prepare import Prepared
from savable_pipeline.tools.convert.target import Target

VERSION = 3  # no other is read


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Input and options of a conversion, and its result once it is finished."""

    version: int
    input: str  # a hash of the files, of their versions and of the chosen keys
    samples: int  # rows of the source, with those that will be rejected
    options: Options
    source: str = ""  # path or URL, for messages
    done: bool = False
    size: int = 0
    hidden: int = 0
    warnings: list[str] = []
    nulls: dict[str, int] = {}


def manifest_of(path: Path | str, found: Prepared, options: Options, keys: frozenset[str] | None) -> Manifest:
    """The manifest of a conversion that starts."""
    folder = found.source.files_from
    number = Path(folder).stat().st_ino if folder else 0  # another folder of the same name has another one
    digest = hashlib.sha256(f"{found.identity}\0{folder}\0{number}".encode("utf-8", "surrogateescape"))
    digest.update("\0".join(sorted(keys or ())).encode("utf-8", "surrogateescape"))
    return Manifest(
        version=VERSION,
        input=digest.hexdigest(),
        samples=sum(span.end - span.start for spans in found.ranges for span in spans),
        options=msgspec.structs.replace(options, key_end=options.key_end or "first"),  # the same bytes
        source=_public_name(path),
    )


def _public_name(source: Path | str) -> str:
    """The absolute path of a source, or its URL without user, password and query."""
    if isinstance(source, Path):
        return str(source.absolute())
    url = urlsplit(source)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, None without one. Raises `SavableError` for one of another version."""
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


def already_finished(output: Target, manifest: Manifest) -> Report | None:
    """The report of a finished conversion; None if something of it is missing.

    Raises `SavableError` for another conversion, and for a finished one in a bucket.
    """
    folder, before = output.folder, read_manifest(output.folder)
    if before is None:
        return None
    starts_again = output.bucket is not None and not before.done
    _check_same(folder, manifest, msgspec.structs.replace(before, input=manifest.input) if starts_again else before)
    if not before.done:
        return None
    if output.bucket is not None:
        raise SavableError(f"{folder} has this whole conversion. Remove it to write it again, or use another URL")
    entries = TarIndex(folder / INDEX_NAME).shards if (folder / INDEX_NAME).exists() else []
    if not all((folder / e.name).exists() and (folder / e.name).stat().st_size == e.size for e in entries):
        return None
    with (folder / REJECTED).open("rb") as file:
        rejected = [msgspec.json.decode(line, type=Reject) for line in file]
    samples = sum(entry.samples for entry in entries)
    return Report(
        samples, len(entries), before.size, rejected, before.hidden, before.warnings, before.nulls, already=True
    )


def start_or_resume(output: Target, manifest: Manifest) -> None:
    """Write the manifest of an unfinished conversion; in a bucket it starts again."""
    write_manifest(output.folder, manifest)
    output.start_again()


def _check_same(folder: Path, manifest: Manifest, before: Manifest) -> None:
    """Raise `SavableError` that lists the differences of another conversion."""
    old, new = _flat(before), _flat(manifest)
    differences = [
        f"{name}: {old[name]!r} there, {new[name]!r} here" for name in new if old[name] != new[name] and name != "input"
    ]
    if old["input"] != new["input"]:
        differences.insert(0, "input: other files, or files that were written since")
    if differences:
        if before.source != manifest.source:
            differences.insert(0, f"source: {before.source!r} there, {manifest.source!r} here")
        raise SavableError(
            f"{folder} has another conversion. Give the same input and options to resume it, or another folder\n"
            + "\n".join(differences)
        )


def _flat(manifest: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(manifest)
    result = ("done", "source", "size", "hidden", "warnings", "nulls")
    return {**fields.pop("options"), **{name: value for name, value in fields.items() if name not in result}}
