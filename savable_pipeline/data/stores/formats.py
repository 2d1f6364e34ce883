"""All formats, and the function that recognizes files by names and first bytes.

A new format is a file, and its name in `FORMATS`. If several formats are possible, those with markers are tried first,
in this order.

    names ── wanted ──▶ files whose first bytes are needed ── recognize ──▶ format, files, settings

Both steps are pure functions, the same for a folder, a bucket, the Hub, a web server and every command. On a web
server, `names` are the named addresses and the markers that exist. Otherwise they are all names without hidden ones.
`tests/data/test_layouts.py` is the specification: layouts and their recognized formats.

1. A marker of another program decides: `index.json`, `meta/info.json`, `state.json`, `dataset_dict.json`.
2. If there are tars, they are the dataset. Tables next to them are ignored.
3. With images, audio or video, a table whose first row names one of the files is the dataset. Otherwise the files are
   a folder of samples, and a single other table is skipped with a warning.
4. Otherwise, files of rows of one format are the dataset, or else tokens, tables and lists of JSON, or else raw files.

Ambiguous files are an error that lists the formats found, and how to choose.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from savable_pipeline.core.wording import counted, listed
from savable_pipeline.data.shards.index import Format
from savable_pipeline.data.shards.paths import LARGEST_INDEX
from savable_pipeline.data.stores.arrow import ARROW
from savable_pipeline.data.stores.csv_table import CSV, as_fields, csv_rows, quotes_are_text, separator_of
from savable_pipeline.data.stores.folder_store import FOLDER
from savable_pipeline.data.stores.jsonl import JSONL
from savable_pipeline.data.stores.kaldi import KALDI
from savable_pipeline.data.stores.lerobot import INFO, LEROBOT
from savable_pipeline.data.stores.parquet import PARQUET, PARQUET_OF_FILES
from savable_pipeline.data.stores.record_files import INDEX, index_format
from savable_pipeline.data.stores.record_kinds import LITDATA, MDS
from savable_pipeline.data.stores.sample_names import OTHER, TABLES, FileNames, is_for_people, is_media_file, stem_of
from savable_pipeline.data.stores.shar import SHAR
from savable_pipeline.data.stores.table_store import BYTE_ORDER_MARK, FILE_FIELDS, FIRST_ROWS, JSON
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.data.stores.token_store import TOKENS

FORMATS = (TARS, MDS, LITDATA, LEROBOT, PARQUET, ARROW, JSONL, CSV, JSON, TOKENS, SHAR, KALDI, FOLDER)
_USUAL_FIELDS = (*FILE_FIELDS, "audio_filepath")  # fields that usually name files; the last one is of NeMo's manifests
_METADATA = "metadata.parquet"  # table of HF's image folders, whose rows name files
_MAGICS = {b"PAR1": PARQUET, b"ARROW1": ARROW}  # formats by the first bytes of a file
# prefixes of the names of images that a README shows, which are no samples
_README_IMAGES = ("assets", "docs", "fig", "logo", "banner", "teaser", "thumbnail", "preview", "cover")
_VERSIONED_TABLES = {  # in the names of metadata of tables, whose folders also have files of older versions
    "_delta_log/": "Delta Lake",
    ".metadata.json": "Apache Iceberg",
    ".hoodie/": "Apache Hudi",
    "snapshot/snapshot-": "Apache Paimon",
}
_ANNOTATION_STEMS = ("annotations", "captions", "classes", "labels", "meta", "metadata")  # of files about others
_LABEL_SUFFIXES = (".txt", ".xml", ".npy", ".npz", ".pkl", ".pt", ".label", ".ann", ".lab")
_MEDIA_NAME = re.compile(rb"\.(jpe?g|png|webp|wav|flac|mp3|mp4)\b", re.IGNORECASE)
_MOST_INSPECTED, _HEAD_BYTES = 16, 1 << 16  # most tables that are inspected, and bytes of each
_LIST = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
_LINES = re.compile(rb"(\xef\xbb\xbf)?\s*\{[^\n]*\}\s*\n\s*\{")


class Recognized(NamedTuple):
    """A format, its files, the settings of its store, and other data that is not read."""

    format: Format
    files: list[str]
    settings: Mapping[str, Any] = {}
    unread: Sequence[str] = ()


def format_named(name: str) -> Format:
    """Return the format of this name. Raises ValueError for none."""
    found = next((form for form in FORMATS if form.name == name), None)
    if found is None:
        raise ValueError(f"no format {name!r}. Use one of {', '.join(form.name for form in FORMATS)}")
    return found


def wanted(names: FileNames) -> dict[str, int]:
    """Return the files whose first bytes `recognize` needs, and how many bytes.

    Args:
        names: The names of all files, relative to the folder that was named.
    """
    markers = {marker for form in FORMATS for marker in form.markers}
    texts = names.ending(JSON.suffixes)
    found = {name: LARGEST_INDEX for name in texts if name in markers}
    if names.ending(TARS.suffixes):
        return found
    if names.media:
        texts += names.ending((*JSONL.suffixes, *CSV.suffixes))
    tables = names.lone(texts) or _files_without_suffix(names)
    return {**dict.fromkeys(sorted(tables)[:_MOST_INSPECTED], _HEAD_BYTES), **found}


def recognize(
    names: FileNames, heads: Mapping[str, bytes], *, format: str = "", settings: Collection[str] = ()
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
    found = _chosen(names, heads, format, settings)
    return found if format else _with_unread(found, names, heads)


def _with_unread(found: Recognized, names: FileNames, heads: Mapping[str, bytes]) -> Recognized:
    """Add the files with data of other formats, which are not read.

    A format with markers, or with a characteristic file, may use files of any suffix.
    """
    form, unread = found.format, {*names.containers}
    if form is FOLDER:
        unread = names.unread_with_media()
    elif form.claims is None and form.choose is None:
        unread.update(*(names.ending(other.packed) for other in FORMATS if other is not form))
        unread.update(names.lone(names.ending(TABLES)), names.lone(names.ending(TOKENS.suffixes)))
        unread.update(name for name, head in heads.items() if _LIST.match(head))
        unread.update(name for name in names.media if form is TARS and not name.lower().startswith(_README_IMAGES))
    return found._replace(unread=sorted(unread.difference(found.files)))


def _chosen(names: FileNames, heads: Mapping[str, bytes], format: str, settings: Collection[str]) -> Recognized:
    """Return what `recognize` returns, without the files that are not read."""
    for form in FORMATS:
        claims = form.claims if not heads.keys().isdisjoint(form.markers) else None
        if claims is not None and format in ("", form.name, form.reader) and claims(heads):
            return Recognized(form, form.files(names.all, heads))
    if format:
        form = format_named(format)
        return Recognized(form, form.files(names.all, heads))
    if INDEX in heads and (other := index_format(heads)) not in ("", "mds", "litdata"):
        raise ValueError(f"Mosaic Streaming shards of the format {other}, not mds. To read them, {OTHER}")
    text, tars = "\n".join(names.all), sorted(names.ending(TARS.suffixes))
    for form in FORMATS:  # `choose`: a text in the names of such files, and a function that returns the files to read
        if form.choose is not None and form.choose[0] in text and (files := form.choose[1](names.all)):
            if rest := [name for name in tars if name not in files]:
                raise _ambiguous({form: files, TARS: rest})
            return Recognized(form, files)
    media = sum(not name.lower().startswith(_README_IMAGES) for name in names.media)
    if media > len(tars) and tars:
        raise _ambiguous({TARS: tars, FOLDER: names.media})
    if tars:
        return Recognized(TARS, tars)
    found = _by_format(names, heads)
    if not found and not media and (bare := _files_without_suffix(names)):
        kinds = {*map(_format_of, filter(None, map(heads.get, bare)))}
        return _folder(names) if len(kinds) != 1 or None in kinds else Recognized(kinds.pop() or FOLDER, bare)
    fitting = [form for form in found if set(settings) <= set(form.settings)] if settings else []
    if len(fitting) == 1:
        return Recognized(fitting[0], found[fitting[0]])
    if names.media and not (settings and set(settings) <= set(FOLDER.settings)):
        tables = {form: files for form in found if form is not TOKENS and (files := names.lone(found[form]))}
        if naming := _naming_tables(names, heads, tables):
            return naming
        if media:
            _check_apart(names, heads)
            return _folder_with_tables(names, tables)
    return _without_media(names, found)


def _by_format(names: FileNames, heads: Mapping[str, bytes]) -> dict[Format, list[str]]:
    """Group files by format, using names, and the first bytes of JSON.

    Raises ValueError for several datasets.
    """
    _check_one_dataset(names)
    json_files = sorted(filter(JSON.has, heads))
    lists, lines = ([name for name in json_files if begin.match(heads[name])] for begin in (_LIST, _LINES))
    found: dict[Format, list[str]] = {}
    for form in FORMATS:
        if form in (TARS, FOLDER) or form.reader or form.choose or INDEX in form.markers:
            continue
        files = lists if form is JSON else names.ending(form.suffixes)
        if files := [*files, *lines] if form is JSONL else files:
            found[form] = sorted(files)
    packed = {} if found or names.media else {form: sorted(names.ending(form.packed)) for form in FORMATS}
    return found or {form: files for form, files in packed.items() if files}


def _naming_tables(names: FileNames, heads: Mapping[str, bytes], found: dict[Format, list[str]]) -> Recognized | None:
    """Return the tables of one format whose first rows name files, or None.

    Raises ValueError for several formats, and for several tables of one folder that name files in a folder beside them.
    """
    known, naming = {*names.all} if found else set(), dict[Format, Recognized]()
    for form, files in found.items():
        inspected = [table for table in files if table in heads]
        fields = {table: _fields_of(table, heads[table], known) for table in inspected}
        if not any(fields.values()):
            fields = {table: _fields_below(table, heads, known) for table in inspected}
            below = [table for table in inspected if fields[table]]
            if len(below) > len({*map(posixpath.dirname, below)}):
                raise ValueError(
                    f"{len(below)} tables name files in a folder beside them, maybe the same. Name one of them: "
                    + ", ".join(below)
                )
        chosen = [table for table in files if fields.get(table)]
        if chosen and len(inspected) < len(files):  # the others are assumed to be like those that were inspected
            chosen = files if len(chosen) == len(inspected) else []
        if chosen:
            naming[form] = Recognized(form, chosen, {"file_fields": fields[chosen[0]]})
        if form is PARQUET and all(posixpath.basename(name).lower() == _METADATA for name in files):
            naming[form] = Recognized(PARQUET_OF_FILES, files)
    if len(naming) > 1:
        raise _ambiguous({form: each.files for form, each in naming.items()})
    return next(iter(naming.values()), None)


def _folder_with_tables(names: FileNames, tables: Mapping[Format, list[str]]) -> Recognized:
    """Return the folder of samples. A single table next to it is not read."""
    folders = {*map(posixpath.dirname, names.media)} if tables else set()
    # A table of the name of a folder is about it, as img2dataset writes them.
    strays = [(form, name) for form, files in tables.items() for name in files if stem_of(name) not in folders]
    if len(strays) > 1 or any(form not in (JSONL, CSV) or JSON.has(name) for form, name in strays):
        raise _ambiguous({**tables, FOLDER: names.media})
    return _folder(names)


def _check_apart(names: FileNames, heads: Mapping[str, bytes]) -> None:
    """Raise ValueError for annotation files that would become samples separate from their media.

    Such a file shares its stem with no media file, and its suffix with no file that does. It has a suffix of labels, or
    is JSON that names media or shares its last name with one. Files with names in `_ANNOTATION_STEMS` are such files
    too. Examples are labels of YOLO, VOC or KITTI in folders of their own, annotations of COCO and transcripts of
    LibriSpeech.
    """
    stems, skipped = {*map(stem_of, names.media)}, names.no_samples()
    apart = sorted(name for name in names.others if stem_of(name) not in stems and name not in skipped)
    suffixes = {posixpath.splitext(name)[1].lower() for name in {*names.others}.difference(apart)} if apart else ""
    bases = {*map(posixpath.basename, stems)} if apart else set()
    for name in apart:
        base, suffix = posixpath.basename(stem_of(name)), posixpath.splitext(name)[1].lower()
        is_json = suffix == ".json" and (base in bases or _MEDIA_NAME.search(heads.get(name, b"")))
        is_label = suffix not in suffixes and (suffix in _LABEL_SUFFIXES or is_json)
        if is_label or (base.lower() in _ANNOTATION_STEMS and names.lone([name])):
            raise ValueError(
                f"{name} beside {names.media[0]} shares its name with no image, audio or video. Put the files of a "
                'sample into one folder, or write a row for each into metadata.jsonl. format="folder" makes it a sample'
            )


def _without_media(names: FileNames, found: dict[Format, list[str]]) -> Recognized:
    """Return the files of rows, or else tokens, tables and lists of JSON, or else raw files."""
    rows = {form: files for form, files in found.items() if form not in (TOKENS, CSV, JSON)}
    if not rows and TOKENS in found:
        without_index = FileNames(name for name in names.all if not name.lower().endswith(".idx"))
        rows = {TOKENS: tokens} if (tokens := without_index.lone(found[TOKENS])) else {}
    if not rows:
        rows = {form: files for form, files in found.items() if form is not TOKENS and names.lone(files)}
        known = {*itertools.chain(*rows.values())}
        others = [n for n in names.others if n not in known and not is_for_people(n)]
        others = [*{*others}.difference(names.containers, *map(names.ending, (form.packed for form in FORMATS)))]
        if rows and others:
            rows[FOLDER] = others
    if len(rows) > 1:
        raise _ambiguous(rows)
    return Recognized(*rows.popitem()) if rows else _folder(names)


def _folder(names: FileNames) -> Recognized:
    """Return the files that are parts of samples. Raises ValueError for an unsupported file of many samples."""
    skipped = names.no_samples()
    parts = sorted(name for name in names.all if name not in skipped)
    if names.containers and (fault := FileNames(parts).container_fault()):
        raise ValueError(fault)
    return Recognized(FOLDER, parts) if parts else Recognized(TARS, [])


def _ambiguous(found: Mapping[Format, Sequence[str]]) -> ValueError:
    """Return the error for files of several formats, with what was found and how to choose."""
    kinds = [f"{form.name} ({counted(len(files), 'file')}, such as {min(files)})" for form, files in found.items()]
    choice = " or ".join(f'format="{form.name}"' for form in found)
    return ValueError(f"several kinds of files, {listed(kinds)}. Pass {choice}, or name those of one by a glob")


def _fields_below(table: str, heads: Mapping[str, bytes], names: Collection[str]) -> tuple[str, ...]:
    """Return the fields whose first rows name media files of one folder beside a table, such as `clips/`."""
    folder = posixpath.join(posixpath.dirname(table), "")
    below = {name[len(folder) :].partition("/")[0] for name in names if name.startswith(folder) and is_media_file(name)}
    naming = [*filter(None, (_fields_of(table, heads[table], names, each) for each in sorted(below)))]
    return naming[0] if len(naming) == 1 else ()


def _fields_of(table: str, head: bytes, names: Collection[str], below: str = "") -> tuple[str, ...]:
    """Return the fields whose first rows name files of the folder, or media files of a folder `below` it.

    These are the usual fields, if there are any, and otherwise all fields. A field has its own part name if another
    field has files of the same kind.
    """
    folder, found = posixpath.join(posixpath.dirname(table), below), dict[str, str]()
    for row in itertools.islice(_first_rows(table, head), FIRST_ROWS if below else None):
        for field, value in row.items():
            path = value[0] if isinstance(value, list) and value else value
            is_path = bool(field) and isinstance(path, str) and (not below or is_media_file(path))
            if is_path and posixpath.normpath(posixpath.join(folder, path)) in names:
                found.setdefault(field, path)
    usual = [field for field in _USUAL_FIELDS if field in found]
    return tuple(usual or as_fields({field: [path] for field, path in found.items()}))


def _first_rows(table: str, head: bytes) -> Iterator[dict[str, Any]]:
    """Yield the complete rows in the first bytes of a table."""
    text = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace").lstrip(" \r\n")
    with contextlib.suppress(ValueError, LookupError, StopIteration, csv.Error, RecursionError):
        if CSV.has(table):
            lines = [*io.StringIO(text, newline="")][: None if len(head) < _HEAD_BYTES else -1]
            rows = csv_rows(lines, separator_of(lines[0], table), plain=quotes_are_text(lambda: lines, table))
            header = next(rows)
            yield from (dict(zip(header, row, strict=False)) for row in rows)
        end, decoder = 0, json.JSONDecoder()
        while not CSV.has(table):
            row, end = decoder.raw_decode(text, text.index("{", end))
            yield row


def _files_without_suffix(names: FileNames) -> list[str]:
    """Return the data files without a suffix, or [] if another data file has one."""
    has_others = any("." in posixpath.basename(name) and _is_data(name) for name in names.all)
    return [] if has_others else sorted(filter(_is_data, names.all))


def _is_data(name: str) -> bool:
    return not (name.endswith(".tar.idx") or is_for_people(name) or posixpath.basename(name).startswith("_"))


def _format_of(head: bytes) -> Format | None:
    """Return the format that the first bytes of a file without a suffix show."""
    if head[257:262] == b"ustar":
        return TARS
    found = next((form for magic, form in _MAGICS.items() if head.startswith(magic)), None)
    return found or (JSON if _LIST.match(head) else JSONL if _LINES.match(head) else None)


def _check_one_dataset(names: FileNames) -> None:
    """Raise ValueError for several datasets, and for tables of several versions."""
    json_files = names.ending(JSON.suffixes)
    text = "\n".join(["", *names.all])
    for part, program in _VERSIONED_TABLES.items():
        if part in text and re.search(rf"[\n/](?:metadata/[^/\n]+)?{re.escape(part)}", text):
            raise ValueError(f"a table of {program}, whose files have rows of older versions. To read it, {OTHER}")
    folders = {posixpath.dirname(name) for name in names.ending((".mds", ".bin"))}
    folders &= {posixpath.dirname(name) for name in json_files if name.endswith(f"/{INDEX}")}
    folders |= {name.removesuffix(f"/{INFO}") for name in json_files if name.endswith(f"/{INFO}")}
    if folders:
        raise ValueError(
            f"{counted(len(folders), 'folder')} of records, {listed(sorted(folders))}. Name one, or mix by sp.blend"
        )
