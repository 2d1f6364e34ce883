"""The parts of a sample as entries: images as thumbnails, texts and JSON as text, the rest as bytes."""

from __future__ import annotations

import json

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.shards.part_types import IMAGE_PARTS, TEXT_PARTS
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.preview.page_model import Card, Entry, cut, first_line
from savable_pipeline.tools.preview.thumbnails import LARGEST_BYTES, thumbnail_of_file
from savable_pipeline.tools.preview.turns import conversation_in

_MOST_PARTS = 16  # of a sample that are shown
_TEXT_HEAD = 1 << 14  # bytes that are read of a longer text
_JSON_LARGEST = 1 << 18  # bytes of JSON that is laid out anew
_FAULTS = (SavableError, ValueError, OSError, IndexError, RecursionError, MemoryError)


def sample_card(sample: Sample, number: int) -> Card:
    """A sample with its parts; a fault of it, or of a part, is shown in its place."""
    where = f"{sample.shard} · sample {number:,} of the dataset"
    try:
        names = list(sample)
        entries = [part_entry(sample, name) for name in names[:_MOST_PARTS]]
        if len(names) > _MOST_PARTS:
            entries.append(Entry("…", f"{len(names) - _MOST_PARTS:,} parts more"))
        return Card(sample.key, where, entries)
    except _FAULTS as error:
        return Card("unreadable sample", where, fault=first_line(error))


def part_entry(sample: Sample, extension: str) -> Entry:
    """One part, of which no more is read than is shown."""
    suffix = extension.lower().rpartition(".")[2]
    limit = LARGEST_BYTES if suffix in IMAGE_PARTS else _JSON_LARGEST if suffix == "json" else _TEXT_HEAD
    note = ""
    try:
        head, size = sample.head(extension, limit)
        note = human_bytes(size)
        if len(head) >= 64 and not head.strip(b"\0"):
            raise ValueError(f"zero-filled: the first {len(head):,} bytes are zeros")
        if suffix in IMAGE_PARTS:
            return _image_entry(extension, note, head, size)
        if suffix == "json" and len(head) == size:
            return _json_entry(extension, note, head)
        if suffix in TEXT_PARTS or suffix == "json" or _is_text(head, size):
            return Entry(extension, note, text=_text(head, size))
        return Entry(extension, f"{note}, beginning with {head[:12].hex(' ')}")
    except _FAULTS as error:
        return Entry(extension, note, fault=first_line(error))


def _image_entry(extension: str, note: str, head: bytes, size: int) -> Entry:
    if len(head) < size:
        raise ValueError(f"not decoded: {size:,} bytes, more than {LARGEST_BYTES:,}")
    thumbnail, about = thumbnail_of_file(head)
    return Entry(extension, f"{about}, {note}", thumbnails=[thumbnail])


def _json_entry(extension: str, note: str, data: bytes) -> Entry:
    """A conversation as its turns, and the rest of the record, or all of it, laid out anew."""
    try:
        record = json.loads(data)
        turns, rest = conversation_in(record) or ([], record)
        text = "" if turns and rest is None else cut(json.dumps(rest, indent=2, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON: {error}") from error
    return Entry(extension, note, text=text, turns=turns)


def _text(head: bytes, size: int) -> str:
    """The beginning of a text. Raises ValueError where that is no UTF-8."""
    cut_short = len(head) < size
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if not cut_short or error.start < len(head) - 4:  # else it is only cut within a character
            raise ValueError(f"malformed text: {error}") from None
        text = head[: error.start].decode()
    return f"{cut(text).removesuffix(' …')} …" if cut_short else cut(text)


def _is_text(head: bytes, size: int) -> bool:
    """Whether a part of unknown kind, a class number or a subtitle, can be read as text."""
    try:
        return _text(head, size).replace("\n", "").replace("\t", "").replace("\r", "").isprintable()
    except ValueError:
        return False
