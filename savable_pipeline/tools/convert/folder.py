"""Reading a folder: files that share a path up to their first dot are a sample. No file is opened.

    a/cat.jpg  a/cat.txt  a/dog.seg.png      →      a/cat: jpg, txt      a/dog: seg.png

Where that seems to merge files which are samples of their own, it is an error unless `key_end="first"` says so. With
`key_end="last"` they share it up to the last dot, and dots before it become "_", since readers of a tar end a key
at the first: a/dog.seg.png is a/dog_seg: png.

Samples with a wrong name or size are rejected here, those with damaged bytes when their shard is written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from savable_pipeline.core.wording import counted
from savable_pipeline.data.shards.tar import is_metadata, split_name
from savable_pipeline.data.shards.uneven_parts import are_merged
from savable_pipeline.tools.convert.file_reader import FileReader
from savable_pipeline.tools.convert.model import Files, Input, Options, Part, Reject
from savable_pipeline.tools.convert.names import is_hidden, name_fault, outside, printable, size_fault

_MANY = 16  # parts of a sample of which most are not found elsewhere by chance


def read_folder(root: Path, options: Options) -> Input:
    """The samples of a folder and those below it, sorted by key."""
    found = Input(str(root), FileReader(str(root)))
    samples: dict[str, list[tuple[Part, str]]] = {}
    stems: dict[str, str] = {}  # names up to the last dot, by the key that they become
    for name, size, fault in _walk(found, os.path.realpath(root), options.allow_outside):
        in_tar = _without_dots(name) if options.key_end == "last" else name
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
    if options.key_end is None:
        _refuse_merged(root, {key: [part.extension for part, _ in parts] for key, parts in samples.items()})
    for key in sorted(samples):
        add_sample(found, key, sorted(samples[key], key=lambda pair: pair[0].extension))
    found.rejected.sort(key=lambda reject: (reject.file, reject.key))
    return found


def _refuse_merged(root: Path, samples: dict[str, list[str]]) -> None:
    """Raise ValueError for samples, parts by key, that dots in the names of files seem to have merged: `are_merged`.

    Of many parts the same ones are looked for in the sample's own folder alone: in each, names may begin anew.
    """
    anywhere = Counter(part for parts in samples.values() for part in parts)
    inside: dict[str, Counter[str]] = {}
    for key, parts in samples.items():
        inside.setdefault(_folder_of(key), Counter()).update(parts)
    merged = {
        key: parts
        for key, parts in samples.items()
        if are_merged(parts, inside[_folder_of(key)] if len(parts) > _MANY else anywhere)
    }
    if merged:
        key = max(sorted(merged), key=lambda key: len(merged[key]))
        part = min(merged[key])
        last = _without_dots(f"{key}.{part}").rpartition(".")[0]
        files = counted(sum(map(len, merged.values())), "file")
        raise ValueError(
            f"{root}: a key ends at the first dot of a file's name, so that {files} would make "
            f"{counted(len(merged), 'sample')}: {key}.{part} would be of the sample {key} the part {part}. Give "
            f"--key-end last to end keys at the last dot, which makes it the sample {last}; or --key-end first if "
            "these are parts of one sample"
        )


def _folder_of(key: str) -> str:
    return key.rpartition("/")[0]


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
