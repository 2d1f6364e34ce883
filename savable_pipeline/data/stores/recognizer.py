"""Recognizes the format of files by their names and the first bytes of a few.

    names ── wanted ──▶ whose first bytes are needed ── recognize ──▶ format, files, settings

Both steps are pure: the same for a folder, a bucket, the Hub, a web server and every command. Of a web server, `names`
are the addresses that were named and the markers that exist, of anything else all names without hidden ones.
`tests/data/test_layouts.py` is the specification: layouts and what they are recognized as.

1. A marker of another program decides: `index.json`, `meta/info.json`, `state.json`, `dataset_dict.json`.
2. Tars are the dataset, whatever tables lie beside them.
3. Beside images, audio or video, a table whose first row names one of the files is the dataset. Else the files are a
   folder of samples, and a single other table is not read, with a warning.
4. Else files of rows are the dataset, of one format; then tokens, tables and lists of JSON; then raw files.

What could be meant otherwise is an error that lists what there is, and how to choose.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from savable_pipeline.core.wording import counted, listed
from savable_pipeline.data.shards.index import Format
from savable_pipeline.data.shards.paths import LANCE, LANCE_CURE, LARGEST_INDEX
from savable_pipeline.data.stores import formats
from savable_pipeline.data.stores.csv_table import CSV, separator_of
from savable_pipeline.data.stores.folder_store import FOLDER
from savable_pipeline.data.stores.jsonl import JSONL
from savable_pipeline.data.stores.record_files import INDEX, index_format
from savable_pipeline.data.stores.sample_names import is_for_people, is_media_file, no_samples, stem_of, suffix_of
from savable_pipeline.data.stores.table_store import FILE_FIELDS, JSON, MARK
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.data.stores.token_store import TOKENS

OTHER = "iterate over it with its own library, and write its samples with sp.ShardWriter"
CONTAINERS = {
    **dict.fromkeys((".zip", ".7z", ".rar"), "unpack it, and convert the folder"),
    **dict.fromkeys((".h5", ".hdf5", ".lmdb", ".mdb", ".tfrecord", ".tfrecords", ".beton", ".rec"), OTHER),
    **dict.fromkeys((".db", ".sqlite", ".zarr"), OTHER),
    LANCE: LANCE_CURE,
    ".mds": "name the folder with its index.json",
    ".scp": "write its lines as JSONL, with the fields audio and text",
}
"""Files that hold many samples, which nothing here reads, and what to do with them."""
_ROW_FIELDS = (*FILE_FIELDS, "audio_filepath")  # that name files; the last one in manifests of NeMo
_FEW, _HEAD = 16, 1 << 16  # tables of which so many bytes are looked at
_LIST = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
_LINES = re.compile(rb"(\xef\xbb\xbf)?\s*\{[^\n]*\}\s*\n\s*\{")


class Recognized(NamedTuple):
    """A format, its files, settings of its store, and tables that are not read."""

    format: Format
    files: list[str]
    settings: Mapping[str, Any] = {}
    unread: Sequence[str] = ()


def wanted(names: Sequence[str]) -> dict[str, int]:
    """Return the files whose first bytes `recognize` needs, and how many of each.

    Args:
        names: The names of all files, relative to the folder that was named.
    """
    markers = {marker for form in formats.FORMATS for marker in form.markers}
    texts = [name for name in names if name.endswith((*JSON.suffixes, *JSONL.suffixes, *CSV.suffixes))]
    found = {name: LARGEST_INDEX for name in texts if name in markers}
    if any(name.endswith(TARS.suffixes) for name in names):
        return found
    if not any(map(is_media_file, names)):
        texts = [name for name in texts if name.endswith(JSON.suffixes)]
    alone = _alone(texts, names)
    return {**dict.fromkeys(sorted(alone)[:_FEW], _HEAD), **found}


def recognize(
    names: Sequence[str], heads: Mapping[str, bytes], *, format: str = "", settings: Collection[str] = ()
) -> Recognized:
    """Return the format of files, and which of them it reads.

    Args:
        names: The names of all files, relative to the folder that was named, without hidden ones.
        heads: The first bytes of those that are `wanted`.
        format: The name of the format, where the user says it. "": it is recognized.
        settings: The names of the settings that the user passes, by which a format is chosen where several could be.

    Raises:
        ValueError: It could be several, or a marker says what cannot be read. The message names no folder.
    """
    for form in formats.FORMATS:
        if format in ("", form.reader) and not heads.keys().isdisjoint(form.markers) and form.claims(heads):
            return Recognized(form, form.files(names, heads))
    if format:
        form = formats.format_named(format)
        return Recognized(form, form.files(names, heads))
    if (other := index_format(heads)) not in ("", "mds", "litdata"):
        raise ValueError(f"Mosaic Streaming shards of the format {other}, not mds. To read them, {OTHER}")
    tars = sorted(name for name in names if name.endswith(TARS.suffixes))
    tars = tars or sorted(name for name in names if name.endswith(TARS.packed))
    media = sum(map(is_media_file, names)) if len(tars) < len(names) else 0
    if media > len(tars) and tars:
        raise _ambiguous({TARS: tars, FOLDER: [name for name in names if is_media_file(name)]})
    if tars:
        return Recognized(TARS, tars)
    found = _by_format(names, heads)
    able = [form for form in found if set(settings) <= set(form.settings)] if settings else []
    if len(able) == 1:
        return Recognized(able[0], found[able[0]])
    if media and not (settings and set(settings) <= set(FOLDER.settings)):
        return _with_media(names, heads, found)
    return _without_media(names, found)


def _alone(some: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return those of some names that share their stem with no other, and are not for people."""
    stems = Counter(map(stem_of, names)) if some else {}
    return [name for name in some if stems[stem_of(name)] == 1 and not is_for_people(name)]


def _by_format(names: Sequence[str], heads: Mapping[str, bytes]) -> dict[Format, list[str]]:
    """Return the files of each format that no marker needs to name: by their names, and JSON by how it begins."""
    json_files = sorted(name for name in heads if name.endswith(JSON.suffixes))
    lists, lines = ([name for name in json_files if begin.match(heads[name])] for begin in (_LIST, _LINES))
    found: dict[Format, list[str]] = {}
    for form in formats.FORMATS:
        if form in (TARS, FOLDER) or form.reader or INDEX in form.markers:
            continue
        files = lists if form is JSON else form.files(names, {})
        files = sorted([*files, *lines]) if form is JSONL else files
        if files := files or [name for name in names if form.packed and name.endswith(form.packed)]:
            found[form] = files
    return found


def _with_media(names: Sequence[str], heads: Mapping[str, bytes], found: Mapping[Format, list[str]]) -> Recognized:
    """Return the table that names files, else the folder of samples beside which a single table may be."""
    tables = {form: files for form in found if form is not TOKENS and (files := _alone(found[form], names))}
    for form, files in tables.items():
        fields = [_fields_of(table, heads.get(table, b""), names) for table in files]
        if all(fields):
            return Recognized(form, files, {"file_fields": fields[0]})
    strays = [(form, name) for form, files in tables.items() for name in files]
    if len(strays) > 1 or any(form not in (JSONL, CSV) or name.endswith(JSON.suffixes) for form, name in strays):
        raise _ambiguous({**tables, FOLDER: [name for name in names if is_media_file(name)]})
    return _folder(names)._replace(unread=[name for _, name in strays])


def _without_media(names: Sequence[str], found: dict[Format, list[str]]) -> Recognized:
    """Return the files of rows; else tokens, tables and lists of JSON that are alone; else raw files."""
    rows = {form: files for form, files in found.items() if form not in (TOKENS, CSV, JSON)}
    if not rows and TOKENS in found:
        with_index = [name for name in names if not name.endswith(".idx")]
        rows = {TOKENS: tokens} if (tokens := _alone(found[TOKENS], with_index)) else {}
    if not rows:
        rows = {form: files for form, files in found.items() if form is not TOKENS and _alone(files, names)}
        others = {name for name in names if not is_for_people(name)}.difference(*rows.values())
        if rows and others:
            rows[FOLDER] = sorted(others)
    if len(rows) > 1:
        raise _ambiguous(rows)
    return Recognized(*rows.popitem()) if rows else _folder(names)


def _folder(names: Sequence[str]) -> Recognized:
    """Return the parts of samples. Raises ValueError for files with many samples each, which are none."""
    skipped = no_samples(names)
    parts = sorted(name for name in names if name not in skipped)
    for name in _alone([name for name in parts if suffix_of(name) in CONTAINERS], parts):
        raise ValueError(f"{suffix_of(name)} is not read here ({name}): {CONTAINERS[suffix_of(name)]}")
    return Recognized(FOLDER, parts) if parts else Recognized(TARS, [])


def _ambiguous(found: Mapping[Format, Sequence[str]]) -> ValueError:
    """Return the error for files of several formats, with what was found and how to choose."""
    kinds = [f"{form.name} ({counted(len(files), 'file')}, such as {min(files)})" for form, files in found.items()]
    choice = " or ".join(f'format="{form.name}"' for form in found)
    return ValueError(f"several kinds of files, {listed(kinds)}. Pass {choice}, or name those of one by a glob")


def _fields_of(table: str, head: bytes, names: Sequence[str]) -> tuple[str, ...]:
    """Return the fields of the first row of a table that name files of the folder."""
    text = head.removeprefix(MARK).decode("utf-8", "replace").lstrip()
    row: Any = {}
    with contextlib.suppress(ValueError, csv.Error, RecursionError):
        if table.endswith(CSV.suffixes):
            row = next(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator_of(text, table)), {})
        else:
            row = json.JSONDecoder().raw_decode(text, text.index("{"))[0]
    first = {field: value[0] if isinstance(value, list) and value else value for field, value in row.items()}
    paths = {field: first[field] for field in _ROW_FIELDS if isinstance(first.get(field), str)}
    known, folder = set(names) if paths else set(), posixpath.dirname(table)
    return tuple(f for f, path in paths.items() if posixpath.normpath(posixpath.join(folder, path)) in known)
