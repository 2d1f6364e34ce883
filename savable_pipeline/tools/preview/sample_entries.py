"""Parts of a sample as entries: images as thumbnails, text and JSON as text.

A conversation in JSON is shown as turns: the records of OpenAI and of LLaVA, and lists alone, under whatever name, of
objects with a role ("role", "from") and what it says ("content", "value"), a text or a list of parts.
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
from savable_pipeline.tools.preview.media_entries import is_range, media_entry
from savable_pipeline.tools.preview.page import Card, CardEntry, Room, Turn, cut, first_line

_MOST_PARTS = 16  # of a sample that are shown
_TEXT_HEAD = 1 << 14  # bytes that are read of a longer text
_JSON_LARGEST = 1 << 18  # bytes of JSON that is laid out anew
_CONVERSATIONS = ("messages", "conversations")  # columns of a table, as JSON
_FAULTS = (SavableError, ValueError, OSError, IndexError, RecursionError, MemoryError)


def sample_card(sample: Sample, number: int, room: Room) -> Card:
    """Return a sample with its parts, with errors instead of parts that fail."""
    where = f"{sample.shard} · " * (sample.shard != ".") + f"sample {number:,} of the dataset"
    try:
        names = list(sample)
        entries = [part_entry(sample, name, room) for name in names[:_MOST_PARTS]]
        if len(names) > _MOST_PARTS:
            entries.append(CardEntry("…", f"{len(names) - _MOST_PARTS:,} parts more"))
        return Card(sample.key, where, entries)
    except _FAULTS as error:
        return Card("unreadable sample", where, fault=first_line(error))


def part_entry(sample: Sample, extension: str, room: Room) -> CardEntry:
    """Return one part, of which no more is read than is shown."""
    suffix = extension.lower().rpartition(".")[2]
    is_json = suffix == "json" or suffix in _CONVERSATIONS
    limit = LARGEST_BYTES if suffix in IMAGE_PARTS else _JSON_LARGEST if is_json else _TEXT_HEAD
    note = ""
    try:
        head, size = sample.head(extension, limit)
        note = human_bytes(size)
        if len(head) >= 64 and not head.strip(b"\0"):
            raise ValueError(f"zero-filled: the first {len(head):,} bytes are zeros")
        if suffix in VIDEO_PARTS or suffix in AUDIO_PARTS:
            return media_entry(sample, extension, note, room)
        if is_range(sample, extension, head):
            return media_entry(sample, extension, head.decode(errors="replace"), room)
        if suffix in IMAGE_PARTS:
            return _image_entry(extension, note, head, size)
        if len(head) == size and (suffix == "json" or (is_json and head.startswith(b"["))):
            return _json_entry(extension, note, head)
        if suffix in TEXT_PARTS or suffix in SUBTITLE_PARTS or is_json or _is_text(head, size):
            return CardEntry(extension, note, text=_text(head, size))
        return CardEntry(extension, f"{note}, beginning with {head[:12].hex(' ')}")
    except _FAULTS as error:
        return CardEntry(extension, note, fault=first_line(error))


def _image_entry(extension: str, note: str, head: bytes, size: int) -> CardEntry:
    if len(head) < size:
        raise ValueError(f"not decoded: {size:,} bytes, more than {LARGEST_BYTES:,}")
    thumbnail, about = thumbnail_of_file(head)
    return CardEntry(extension, f"{about}, {note}", thumbnails=[thumbnail])


def _json_entry(extension: str, note: str, data: bytes) -> CardEntry:
    """A conversation as its turns, and the rest of the record, or all of it, laid out anew."""
    try:
        record = json.loads(data)
        turns, rest = conversation_in(record) or ([], record)
        text = "" if turns and rest is None else cut(json.dumps(rest, indent=2, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON: {error}") from error
    return CardEntry(extension, note, text=text, turns=turns)


def _text(head: bytes, size: int) -> str:
    """The beginning of a text. Raises ValueError where that is no UTF-8."""
    cut_short = len(head) < size
    head = head.removeprefix(BOM_UTF8).replace(b"\r\n", b"\n")
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


_ROLES = ("role", "from")
_CONTENTS = ("content", "value")
_ANSWERING = {"assistant", "gpt", "model", "bot", "chatgpt"}
_FIRST, _LAST = 4, 8  # turns of a long conversation that are shown
_LONGEST_QUESTION, _LONGEST_ANSWER = 300, 900  # characters: a question must not push its answer out of sight


def conversation_in(record: Any) -> tuple[list[Turn], Any] | None:
    """Return the turns of the first conversation of a record, and the rest; or None.

    The rest is None for nothing.
    """
    if _is_conversation(record):
        return _turns(record), None
    if isinstance(record, dict):
        for name, value in record.items():
            if _is_conversation(value):
                return _turns(value), {other: more for other, more in record.items() if other != name} or None
    return None


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def _is_turn(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(_first(value, _ROLES), str):
        return False
    content = _first(value, _CONTENTS)
    return isinstance(content, str | list) or (content is None and len(value) > 1)


def _turns(conversation: Sequence[dict[str, Any]]) -> list[Turn]:
    hidden = len(conversation) - _FIRST - _LAST
    if hidden <= 1:
        return [_turn(each) for each in conversation]
    first, last = conversation[:_FIRST], conversation[-_LAST:]
    return [*map(_turn, first), Turn("", f"… {hidden:,} turns more …"), *map(_turn, last)]


def _turn(message: dict[str, Any]) -> Turn:
    role = _first(message, _ROLES)
    answers = role.lower() in _ANSWERING
    more = {name: value for name, value in message.items() if name not in (*_ROLES, *_CONTENTS) and value is not None}
    texts = [_content(_first(message, _CONTENTS)), json.dumps(more, ensure_ascii=False) if more else ""]
    text = "\n".join(filter(None, texts))
    return Turn(role, _cut_inside(text, _LONGEST_ANSWER if answers else _LONGEST_QUESTION), answers)


def _content(content: Any) -> str:
    """The text of a content, with `[image]` where another part than a text stands."""
    if isinstance(content, list):
        return "".join(map(_part, content))
    return content or ""


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    return f"[{kind}]" if isinstance(kind, str) else json.dumps(part, ensure_ascii=False)


def _cut_inside(text: str, longest: int) -> str:
    """At most about `longest` characters of a text, its begin and its end."""
    if len(text) <= longest:
        return text
    begin = longest * 2 // 3
    end = longest - begin
    return f"{text[:begin]} … {len(text) - longest:,} characters … {text[-end:]}"


def _first(value: dict[str, Any], names: Sequence[str]) -> Any:
    return next((value[name] for name in names if name in value), None)
