"""Reading a folder: files that share a path up to their first dot are a sample. No file is opened.

    a/cat.jpg  a/cat.txt  a/dog.seg.png      →      a/cat: jpg, txt      a/dog: seg.png

With `key_end="last"` they share it up to the last dot, and dots before it become "_", since readers of a tar end a key
at the first: a/dog.seg.png is a/dog_seg: png.

Samples with a wrong name or size are rejected here, those with damaged bytes when their shard is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from savable_pipeline.data.shards.tar import is_metadata, split_name
from savable_pipeline.tools.convert.file_reader import FileReader
from savable_pipeline.tools.convert.model import Files, Input, Options, Part, Reject
from savable_pipeline.tools.convert.names import is_hidden, name_fault, outside, printable, size_fault


def read_folder(root: Path, options: Options) -> Input:
    """The samples of a folder and those below it, sorted by key."""
    found = Input(str(root), FileReader(str(root)))
    samples: dict[str, list[tuple[Part, str]]] = {}
    stems: dict[str, str] = {}  # names up to the last dot, by the key that they become
    for name, size, fault in _walk(found, os.path.realpath(root), options.allow_outside):
        in_tar = name if options.key_end == "first" else _without_dots(name)
        parts = split_name(in_tar)
        if parts is None:
            unread = "readers take it for metadata" if is_metadata(name) else "no extension"
            found.rejected.append(Reject(printable(name), "", fault or unread))
        else:
            key, extension = parts
            if in_tar != name or options.key_end == "last":
                stem = stems.setdefault(key, name.rpartition(".")[0])
                if stem != name.rpartition(".")[0]:
                    fault = fault or f"two names with one key: {stem} and {name} would both be {key}"
            samples.setdefault(key, []).append((Part(extension, name, size), fault))
    for key in sorted(samples):
        add_sample(found, key, sorted(samples[key], key=lambda pair: pair[0].extension))
    found.rejected.sort(key=lambda reject: (reject.file, reject.key))
    return found


def _without_dots(name: str) -> str:
    """A file's name in which the last dot is the only one."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.rpartition(".")
    return f"{folder}{slash}{stem.replace('.', '_')}{dot}{extension}"


def add_sample(found: Input, key: str, parts: list[tuple[Part, str]], record: int = -1) -> bool:
    """Add a sample, or a reject with its first fault; gives whether it is a sample."""
    extensions: dict[str, str] = {}
    for part, fault in parts:
        twin = extensions.get(part.extension.lower())
        if twin is not None:
            fault = fault or f"two parts with one extension: {twin} and {part.path}"
        extensions[part.extension.lower()] = part.path
        fault = fault or name_fault(key, part.extension) or size_fault(part)
        if fault:
            reason, _, detail = fault.partition(": ")
            found.rejected.append(Reject(printable(part.path), printable(key), reason, printable(detail)))
            return False
    found.samples.append(Files(key, tuple(part for part, _ in parts), record))
    return True


def _walk(found: Input, root: str, allow_outside: bool) -> Iterator[tuple[str, int, str]]:
    """Name, size in bytes and fault of every file below the root, in no particular order."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(f"{root}/{folder}") as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                fault = _link_fault(root, entry, allow_outside) if entry.is_symlink() else ""
                if is_hidden(entry.name):
                    found.hidden += 1
                elif entry.is_dir() and not fault:
                    folders.append(f"{name}/")
                elif entry.is_file() and not fault:
                    yield name, entry.stat().st_size, ""
                else:
                    yield name, 0, fault or "not a regular file"


def _link_fault(root: str, entry: os.DirEntry[str], allow_outside: bool) -> str:
    target = Path(entry.path).resolve()
    if not target.exists():
        return "missing file: the link leads nowhere"
    if not allow_outside and outside(root, str(target)):
        return "outside the source: a link leads there; --allow-outside takes it"
    if target in (here := Path(entry.path).parent.resolve(), *here.parents):
        return "link to a folder above it"
    return ""
