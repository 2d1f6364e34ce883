"""Parts of a sample as entries: images as thumbnails, text and JSON as text.

A conversation in JSON is shown as turns. It is a list of objects with a role ("role", "from") and a content ("content",
"value"), which is a text or a list of parts. It may be the whole record or any of its fields, so OpenAI's and LLaVA's
formats are recognized.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import Any

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.shards.part_types import AUDIO_PARTS, IMAGE_PARTS, SUBTITLE_PARTS, TEXT_PARTS, VIDEO_PARTS
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.preview.image_entries import LARGEST_BYTES, thumbnail_of_file
from savable_pipeline.tools.preview.media_entries import is_media_range, media_entry
from savable_pipeline.tools.preview.page import Budget, Card, CardEntry, Turn, first_line, shorten

_MOST_PARTS = 16  # parts of a sample that are shown
_TEXT_BYTES = 1 << 14  # most bytes of a text that are read
_LARGEST_JSON = 1 << 18  # bytes of JSON up to which it is indented
_CONVERSATIONS = ("messages", "conversations")  # columns of a table that are JSON
_ENTRY_ERRORS = (SavableError, ValueError, OSError, IndexError, RecursionError, MemoryError)


def sample_card(sample: Sample, number: int, budget: Budget) -> Card:
    """Return the card of sample `number` of a dataset.

    A part that cannot be shown has its error.
    """
    shard = "" if sample.shard == "." else f"{sample.shard} · "  # the shard of a folder of files is "."
    where = f"{shard}sample {number:,} of the dataset"
    try:
        names = list(sample)
        entries = [part_entry(sample, name, budget) for name in names[:_MOST_PARTS]]
        if len(names) > _MOST_PARTS:
            entries.append(CardEntry("…", f"{len(names) - _MOST_PARTS:,} parts more"))
        return Card(sample.key, where, entries)
    except _ENTRY_ERRORS as error:
        return Card("unreadable sample", where, fault=first_line(error))


def part_entry(sample: Sample, extension: str, budget: Budget) -> CardEntry:
    """Return the entry of a part. No more bytes are read than are shown."""
    suffix = extension.lower().rpartition(".")[2]
    is_json = suffix == "json" or suffix in _CONVERSATIONS
    limit = LARGEST_BYTES if suffix in IMAGE_PARTS else _LARGEST_JSON if is_json else _TEXT_BYTES
    note = ""
    try:
        head, size = sample.head(extension, limit)
        note = human_bytes(size)
        if len(head) >= 64 and not head.strip(b"\0"):
            raise ValueError(f"zero-filled: the first {len(head):,} bytes are zeros")
        if suffix in VIDEO_PARTS or suffix in AUDIO_PARTS:
            return media_entry(sample, extension, note, budget)
        if is_media_range(sample, extension, head):
            return media_entry(sample, extension, head.decode(errors="replace"), budget)
        if suffix in IMAGE_PARTS:
            return _image_entry(extension, note, head, size)
        if len(head) == size and (suffix == "json" or (is_json and head.startswith(b"["))):
            return _json_entry(extension, note, head)
        if suffix in TEXT_PARTS or suffix in SUBTITLE_PARTS or is_json or _is_text(head, size):
            return CardEntry(extension, note, text=_decode_text(head, size))
        return CardEntry(extension, f"{note}, beginning with {head[:12].hex(' ')}")
    except _ENTRY_ERRORS as error:
        return CardEntry(extension, note, fault=first_line(error))


def _image_entry(extension: str, note: str, head: bytes, size: int) -> CardEntry:
    """Return the entry of an image, with a thumbnail."""
    if len(head) < size:
        raise ValueError(f"not decoded: {size:,} bytes, more than {LARGEST_BYTES:,}")
    thumbnail, description = thumbnail_of_file(head)
    return CardEntry(extension, f"{description}, {note}", thumbnails=[thumbnail])


def _json_entry(extension: str, note: str, data: bytes) -> CardEntry:
    """Return the entry of JSON: a conversation as turns, and everything else as indented JSON."""
    try:
        record = json.loads(data)
        turns, other_fields = conversation_in(record) or ([], record)
        text = "" if turns and other_fields is None else shorten(json.dumps(other_fields, indent=2, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON: {error}") from error
    return CardEntry(extension, note, text=text, turns=turns)


def _decode_text(head: bytes, size: int) -> str:
    """Decode the start of a text. Raises ValueError if it is not UTF-8."""
    is_truncated = len(head) < size
    head = head.removeprefix(BOM_UTF8).replace(b"\r\n", b"\n")
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if not is_truncated or error.start < len(head) - 4:  # otherwise `head` only ends within a character
            raise ValueError(f"malformed text: {error}") from None
        text = head[: error.start].decode()
    return f"{shorten(text).removesuffix(' …')} …" if is_truncated else shorten(text)


def _is_text(head: bytes, size: int) -> bool:
    """Return whether a part of unknown type can be read as text."""
    try:
        return _decode_text(head, size).replace("\n", "").replace("\t", "").replace("\r", "").isprintable()
    except ValueError:
        return False


_ROLES = ("role", "from")
_CONTENTS = ("content", "value")
_ANSWERING = {"assistant", "gpt", "model", "bot", "chatgpt"}
_FIRST_TURNS, _LAST_TURNS = 4, 8  # the first and last turns of a long conversation are shown
_LONGEST_QUESTION, _LONGEST_ANSWER = 300, 900  # characters; a long question must not hide its answer


def conversation_in(record: Any) -> tuple[list[Turn], Any] | None:
    """Return a record's first conversation, as turns, and its other fields.

    The second value is None if there are no other fields. Without a conversation, the result is None.
    """
    if _is_conversation(record):
        return _turns(record), None
    if isinstance(record, dict):
        for name, value in record.items():
            if _is_conversation(value):
                return _turns(value), {other: record[other] for other in record if other != name} or None
    return None


def _is_conversation(value: Any) -> bool:
    """Return whether a value of JSON is a list of turns."""
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def _is_turn(value: Any) -> bool:
    """Return whether a value of JSON is a turn of a conversation."""
    if not isinstance(value, dict) or not isinstance(_first_value(value, _ROLES), str):
        return False
    content = _first_value(value, _CONTENTS)
    return isinstance(content, str | list) or (content is None and len(value) > 1)


def _turns(conversation: Sequence[dict[str, Any]]) -> list[Turn]:
    """Return the turns to show: all, or the first and the last ones."""
    hidden = len(conversation) - _FIRST_TURNS - _LAST_TURNS
    if hidden <= 1:
        return [_turn(each) for each in conversation]
    first, last = conversation[:_FIRST_TURNS], conversation[-_LAST_TURNS:]
    return [*map(_turn, first), Turn("", f"… {hidden:,} turns more …"), *map(_turn, last)]


def _turn(message: dict[str, Any]) -> Turn:
    """Format one message of a conversation."""
    role = _first_value(message, _ROLES)
    answers = role.lower() in _ANSWERING
    known = (*_ROLES, *_CONTENTS)
    more = {name: value for name, value in message.items() if name not in known and value is not None}
    texts = [_format_content(_first_value(message, _CONTENTS)), json.dumps(more, ensure_ascii=False) if more else ""]
    text = "\n".join(filter(None, texts))
    return Turn(role, _cut_middle(text, _LONGEST_ANSWER if answers else _LONGEST_QUESTION), answers)


def _format_content(content: Any) -> str:
    """Format the content of a message as text, with placeholders such as `[image]` for other parts."""
    if isinstance(content, list):
        return "".join(map(_format_part, content))
    return content or ""


def _format_part(part: Any) -> str:
    """Format a part of a message: its text, or its type in brackets."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    return f"[{kind}]" if isinstance(kind, str) else json.dumps(part, ensure_ascii=False)


def _cut_middle(text: str, longest: int) -> str:
    """Shorten a text to the start and end of about `longest` characters."""
    if len(text) <= longest:
        return text
    start = longest * 2 // 3
    end = longest - start
    return f"{text[:start]} … {len(text) - longest:,} characters … {text[-end:]}"


def _first_value(record: dict[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of these names that a record has, or None."""
    return next((record[name] for name in names if name in record), None)
