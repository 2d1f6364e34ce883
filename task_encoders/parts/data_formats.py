"""Parsers of conversations and documents with images, videos and audio.

The turns of a conversation have `role` and `content` (OpenAI, TRL), `from` and `value` (LLaVA, ShareGPT), or `user` and
`assistant` (FineVision). They are the list `messages`, `conversations` or `texts` of an object, or the whole JSON:

    {"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                  {"role": "assistant", "content": "A cat."}]}

    {"texts": [{"user": "What is it?", "assistant": "A cat."}]}

A text in the object's `system` or `system_prompt` comes first, as a turn of `system`. An answer whose `weight`, `loss`
or `train` is 0 or false does not contribute to the loss.

The object's `tools` and the entries of its `chat_template_kwargs` are passed to the chat template. Tool calls are in
OpenAI's format, or turns of `function_call` (LLaMA-Factory) or `tool_call` (ms-swift), whose text is JSON. Arguments
that are JSON text are parsed, because templates format them as JSON themselves. Turns of `observation`,
`tool_response`, `function` and `tool` get the role `tool`. Rows with `chosen` and `rejected` answers, or with a `label`
that is false, are rejected.

`<image>` in a text, or {"type": "image"} in a list of content, is a placeholder for an image. Placeholders take the
images of the sample in order, or in the order in which the object's `images` or `image` names their parts. These fields
may also have `data:` URLs. A content's `image_url` names a part or is a `data:` URL, and `index` is the index of an
image. In turns of user and assistant, images without placeholder come before the first text. All of this also holds for
`video` and `audio`, if the encoder takes them.

A document of OBELICS (Laurençon et al., 2023) has two lists, of which one is null where the other is not. In a document
of MMC4 (Zhu et al., 2023), an image comes before the text that it is matched with:

    {"texts": ["A cat:", null, "asleep."], "images": [null, "0.jpg", null]}

    {"text_list": ["A cat.", "A dog."], "image_info": [{"image_name": "0.jpg", "matched_text_index": 1}]}

Documents name the parts of their images. If a name is not a part, such as a URL, images are taken in order. A document
of OBELICS may also have the lists `videos` and `audios`. Then all lists but one are null at each index.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from savable_pipeline import Sample
from task_encoders.parts.sample_parts import DecodedImage, SampleImages, SampleMedia, ShownMedia

log = logging.getLogger(__name__)

_CALL_ROLES = ("function_call", "tool_call")  # roles of turns that are tool calls
_RESULT_ROLES = dict.fromkeys(("observation", "tool_response", "function", "tool"), "tool")  # roles of their results
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ROLES |= _RESULT_ROLES
_SYSTEM_FIELDS = ("system", "system_prompt")  # fields next to the turns that may have the system prompt
# keys of a turn that say whether the turn is trained on, in OpenAI, ms-swift and axolotl
_LOSS_FIELDS = ("weight", "loss", "train")
_LIST_FIELDS = {"image": "images", "video": "videos", "audio": "audios"}  # fields of a document by kind of media

ContentPart = str | ShownMedia


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Args:
        role: "user", "assistant", "system", or another that the chat template knows.
        parts: In order, texts (str), images (PIL.Image.Image, or a `ScaledImage` from `Vision.image`), and videos and
            audio (`MediaPart`, whose `text` is their placeholder).
        trained: Whether an answer contributes to the loss (default). False is "weight", "loss" or "train": 0.
        more: Further fields, for the chat template.

    Example:
        ```python
        from task_encoders import Message
        Message("assistant", ["A cat."]).is_answer                  # True
        Message("assistant", ["A cat."], trained=False).is_answer   # False
        ```
    """

    role: str
    parts: list[ContentPart]
    trained: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def is_answer(self) -> bool:
        """Return whether this is an answer that contributes to the loss."""
        return self.role == "assistant" and self.trained


def parse_conversation(record: Any, media: SampleMedia) -> list[Message]:
    """Return the messages of a sample's JSON, with `media` instead of placeholders.

    Raises ValueError, which names the invalid field.
    """
    name = next((each for each in CONVERSATIONS if isinstance(record, dict) and record.get(each) is not None), "")
    if not name and not isinstance(record, list):
        raise ValueError(f"expected {_KNOWN_FORMATS}; found {_describe_fields(record)}")
    turns = _expect(record[name], list, name) if name else record
    where = name or "messages"
    turns = [_expect(turn, dict, f"{where}[{i}]") for i, turn in enumerate(turns)]
    if not turns:
        return []
    turn_format = next((keys for keys in _PARSERS if {*keys.split(" and ")} & turns[0].keys()), None)
    if turn_format is None:
        raise ValueError(f"{where}[0]: expected {_KNOWN_FORMATS}; found {_describe_fields(turns[0])}")
    if isinstance(record, dict):
        media.order_by(record)
    parse_turn = _PARSERS[turn_format]
    messages = [message for i, turn in enumerate(turns) for message in parse_turn(turn, f"{where}[{i}]", media)]
    if parse_turn is _finevision_turn:  # its images have no placeholders
        next(message for message in messages if message.role == "user").parts[:0] = media.images.unplaced()
    media.check_all_used()
    if isinstance(record, dict):
        messages[:0] = _system_message(record, messages)
    _log_format(f"{name or 'a list'} of {turn_format}")
    return messages


def _system_message(record: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Return the message of a system prompt in a field next to the turns, or [] if the first turn has it."""
    texts = {name: _expect(record[name], str, name) for name in _SYSTEM_FIELDS if record.get(name)}
    prompts = list(dict.fromkeys(texts.values()))
    if len(prompts) > 1 or (prompts and messages[0].role == "system" and messages[0].parts != prompts):
        raise ValueError(f"{' and '.join(texts)}: more than one system prompt. Keep one of them")
    return [Message("system", [prompt]) for prompt in prompts if messages[0].role != "system"]


@cache
def _log_format(description: str) -> None:
    """Log the format of conversations, once per process because of the cache."""
    log.info("ChatEncoder: the conversations are %s", description)


def _describe_fields(record: Any) -> str:
    """Return the fields of an object, or the type of another value, for a message."""
    return f"the fields {', '.join(record)}" if isinstance(record, dict) else type(record).__name__


def _llava_turn(turn: dict[str, Any], where: str, media: SampleMedia) -> list[Message]:
    """Parse one turn of LLaVA's format. `where` is the path of the turn, for errors."""
    role, trained = turn.get("from"), _is_trained(turn, where)
    if role in _CALL_ROLES:
        return [_call_turn(turn.get("value"), f"{where}.value", trained=trained)]
    if role not in _ROLES:
        raise ValueError(f"{where}.from: expected one of {', '.join((*_ROLES, *_CALL_ROLES))}, found {role!r}")
    kinds = ["image", *media.shown_kinds]
    return [Message(_ROLES[role], _split_text(turn.get("value"), kinds, f"{where}.value", media), trained)]


def _finevision_turn(turn: dict[str, Any], where: str, media: SampleMedia) -> list[Message]:
    """Parse one turn of FineVision's format: a question and its answer, and perhaps a system prompt."""
    roles = [role for role in ("system", "user", "assistant") if role != "system" or turn.get(role)]
    parts = {role: _split_text(turn.get(role), media.shown_kinds, f"{where}.{role}", media) for role in roles}
    return [Message(role, parts[role], trained=_is_trained(turn, where)) for role in roles]


def _is_trained(turn: dict[str, Any], where: str) -> bool:
    """Return whether a turn, if it is an answer, contributes to the loss."""
    values = {name: turn[name] for name in _LOSS_FIELDS if turn.get(name) is not None}
    for name, value in values.items():
        if value not in (0, 1):
            raise ValueError(f"{where}.{name}: expected 0 or 1, found {value!r}")
    return all(values.values())


def _split_text(text: Any, kinds: Iterable[str], where: str, media: SampleMedia) -> list[ContentPart]:
    """Split a text at placeholders such as `<image>`, and replace these by the media."""
    # the result of the split is a text, a kind, a text, …
    texts_and_kinds = re.split(f"<({'|'.join(kinds) or '(?!)'})>", _expect(text, str, where))
    parts: list[ContentPart] = list(texts_and_kinds)
    for number, kind in list(enumerate(texts_and_kinds))[1::2]:
        parts[number] = media.of(kind, where).next(where)
    return [part for part in parts if part != ""]


def _openai_turn(turn: dict[str, Any], where: str, media: SampleMedia) -> list[Message]:
    """Parse one message of OpenAI's format. `where` is the path of the message, for errors."""
    turn = {name: value for name, value in turn.items() if value is not None}  # tables have null for missing fields
    role = _expect(turn.get("role"), str, f"{where}.role")
    trained = _is_trained(turn, where)
    content = turn.get("content")
    if role in _CALL_ROLES:
        return [_call_turn(content, f"{where}.content", trained=trained)]
    if "function_call" in turn:  # OpenAI's form before `tool_calls`
        turn["tool_calls"] = [{"function": turn.pop("function_call")}]
    if turn.get("tool_calls"):
        turn["tool_calls"] = _parse_calls(turn["tool_calls"], f"{where}.tool_calls")
    if isinstance(content, str):
        parts = _split_text(content, media.shown_kinds, f"{where}.content", media)
    elif content is None and "tool_calls" in turn:
        parts = []
    else:
        listed = enumerate(_expect(content, list, f"{where}.content"))
        parts = [_content_part(part, f"{where}.content[{i}]", media) for i, part in listed]
    more = {name: value for name, value in turn.items() if name not in ("role", "content", *_LOSS_FIELDS)}
    return [Message(_RESULT_ROLES.get(role, role), parts, trained, more)]


def _content_part(value: Any, where: str, media: SampleMedia) -> ContentPart:
    """Return the text or medium of a part of a message's content."""
    part = _expect(value, dict, where)
    kind = str(part.get("type"))
    if kind == "text":
        text: str = _expect(part.get("text"), str, f"{where}.text")
        return text
    if kind in _LIST_FIELDS:
        parts = media.of(kind, where)
        if isinstance(index := part.get("index"), int):
            return parts.numbered(index, f"{where}.index")
        name = next(filter(None, (parts.resolve(part.get(field)) for field in (kind, "url", "path"))), None)
        return parts.next(where) if name is None else parts.named(name, where)
    linked_kind = kind.removesuffix("_url")
    if kind != linked_kind and linked_kind in _LIST_FIELDS:
        link = part.get(kind)
        url = link.get("url") if isinstance(link, dict) else link
        where = f"{where}.{kind}.url"
        return media.of(linked_kind, where).named(_expect(url, str, where), where)
    raise ValueError(
        f"{where}.type: expected text, image, image_url, or these of video or audio, found {part.get('type')!r}"
    )


def _call_turn(value: Any, where: str, *, trained: bool = True) -> Message:
    """Parse a turn with one tool call or a list of calls, as objects or as JSON text."""
    parsed = _parse_json(value, where)
    calls = _parse_calls(parsed if isinstance(parsed, list) else [parsed], where)
    return Message("assistant", [], trained=trained, more={"tool_calls": calls})


def _parse_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Convert tool calls to the form of chat templates: functions whose arguments are objects."""
    calls = []
    for number, unparsed in enumerate(_expect(_parse_json(value, where), list, where)):
        call = _expect(_parse_json(unparsed, f"{where}[{number}]"), dict, f"{where}[{number}]")
        call = {"function": call} if "name" in call else call
        function = _expect(call.get("function"), dict, f"{where}[{number}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
            function = {**function, "arguments": _parse_json(arguments, f"{where}[{number}].function.arguments")}
        calls.append({"type": "function", **call, "function": function})
    return calls


def _parse_json(value: Any, where: str) -> Any:
    """Parse a text as JSON, and return other values unchanged. Raises ValueError, which names the field."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected JSON, found {value[:80]!r} ({error})") from error


def read_record(sample: Sample, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the JSON of a conversation, and further arguments of the chat template.

    The arguments are `tools`, which may be JSON text, and the entries of `chat_template_kwargs`, from the same object
    or from columns of a table. A conversation in a column becomes an object with the column's name, and with the system
    prompt of another column. A bare function becomes a tool in OpenAI's format. Null fields of a column are removed,
    because a table's schema has them for all rows. Raises ValueError for an invalid field, with its name.
    """
    value = sample.json(name)
    if isinstance(value, dict):
        reject_preferences(value)
        fields = value
    else:
        value = value if name.endswith("json") else _without_nulls(value)
        columns = [column for column in ("tools", "chat_template_kwargs") if column in sample]
        fields = {column: _without_nulls(_parse_json(sample.text(column) or "null", column)) for column in columns}
        system_prompts = {column: sample.text(column) for column in _SYSTEM_FIELDS if column in sample}
        if name in CONVERSATIONS or (system_prompts and isinstance(value, list)):
            value = {name if name in CONVERSATIONS else "messages": value, **system_prompts}
    parsed = {name: _parse_json(fields.get(name) or "null", name) for name in ("tools", "chat_template_kwargs")}
    arguments: dict[str, Any] = _expect(parsed["chat_template_kwargs"] or {}, dict, "chat_template_kwargs")
    tools = [_parse_json(tool, f"tools[{i}]") for i, tool in enumerate(_expect(parsed["tools"] or [], list, "tools"))]
    wrapped = [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in tools
    ]
    return value, {**arguments, **({"tools": wrapped} if tools else {})}


def reject_preferences(fields: Any) -> None:
    """Raise ValueError for rows of DPO, KTO and similar formats.

    Some of their answers must not be trained on.
    """
    rejected = [name for name in ("rejected", "rejected_response") if name in fields and fields[name] is not None]
    labels = [name for name in ("label", "kto_tag") if name in fields]
    rejected += [name for name in labels if fields[name] is False or fields[name] == b"false"]
    if rejected:
        raise ValueError(
            f"the row has {rejected[0]!r}, as preferences, whose answers are not all targets. Drop such rows or this "
            "field, or pass part='messages' for a table"
        )


def _without_nulls(value: Any) -> Any:
    """Remove fields that are null, at all levels."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


CONVERSATIONS = ("messages", "conversations", "texts")
"""Names of the fields of an object, or columns of a table, that may be a conversation."""
_PARSERS = {"role and content": _openai_turn, "from and value": _llava_turn, "user and assistant": _finevision_turn}
_KNOWN_FORMATS = f"turns of {', or of '.join(_PARSERS)}, as a list or in a field {', '.join(CONVERSATIONS)}"


def _expect(value: Any, kind: type, where: str) -> Any:
    """Return a value of JSON. Raises ValueError, with its path `where`, if the value is not of this type."""
    if isinstance(value, kind):
        return value
    names: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
    raise ValueError(f"{where}: expected {names[kind]}, found {'nothing' if value is None else repr(value)[:80]}")


def parse_document(record: Any, media: SampleMedia) -> list[ContentPart]:
    """Return the texts of a document, without empty ones, and the media between them.

    Raises ValueError, which names the invalid field.
    """
    if isinstance(record, dict) and "texts" in record:
        parts = _parse_obelics(record, media)
    elif isinstance(record, dict) and "text_list" in record:
        parts = _parse_mmc4(_expect_list(record, "text_list"), _expect_list(record, "image_info"), media.images)
    else:
        fields = _describe_fields(record)
        raise ValueError(f"expected an object with texts and images, or text_list and image_info, found {fields}")
    media.check_all_used()
    return [part for part in parts if part != ""]


def _parse_obelics(record: dict[str, Any], media: SampleMedia) -> list[ContentPart]:
    """Parse a document of OBELICS: lists of one length, in which each position is a text or a medium."""
    kinds = [kind for kind, name in _LIST_FIELDS.items() if kind == "image" or (kind in media.kinds and name in record)]
    name_of = {"text": "texts", **{kind: _LIST_FIELDS[kind] for kind in kinds}}
    columns = {kind: _expect_list(record, name) for kind, name in name_of.items()}
    names = list(name_of.values())
    sizes = [len(column) for column in columns.values()]
    if len(set(sizes)) > 1:
        raise ValueError(f"{_and_list(names)}: expected lists of one length, found {_and_list(list(map(str, sizes)))}")
    part_names = {kind: media.of(kind, name_of[kind]).names for kind in kinds}
    are_named = {kind: all(value is None or value in part_names[kind] for value in columns[kind]) for kind in kinds}
    parts: list[ContentPart] = []
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        values = [(kind, value) for kind, value in zip(columns, row, strict=True) if value is not None]
        if len(values) != 1:
            where = _and_list([f"{name}[{number}]" for name in names])
            raise ValueError(f"{where}: expected null in all but one of them")
        kind, value = values[0]
        if kind == "text":
            parts.append(_expect(value, str, f"texts[{number}]"))
        else:
            where = f"{name_of[kind]}[{number}]"
            parts_of_kind = media.of(kind, where)
            parts.append(parts_of_kind.named(value, where) if are_named[kind] else parts_of_kind.next(where))
    return parts


def _and_list(words: list[str]) -> str:
    """Join words by commas, and the last one by "and"."""
    return " and ".join([", ".join(words[:-1]), words[-1]])


def _parse_mmc4(texts: list[Any], entries: list[Any], images: SampleImages) -> list[ContentPart]:
    """Parse a document of MMC4: texts, and images that belong before a text."""
    names = [entry.get("image_name") if isinstance(entry, dict) else None for entry in entries]
    are_named = all(name in images.names for name in names)
    images_before: dict[int, list[DecodedImage]] = {}  # by index of a text
    for number, (entry, name) in enumerate(zip(entries, names, strict=True)):
        where = f"image_info[{number}]"
        index = entry.get("matched_text_index") if isinstance(entry, dict) else None
        if type(index) is not int or not 0 <= index < len(texts):
            raise ValueError(f"{where}.matched_text_index: expected 0 to {len(texts) - 1}, found {index!r:.80}")
        image = images.named(name, where) if are_named and name else images.next(where)
        images_before.setdefault(index, []).append(image)
    parts: list[ContentPart] = []
    for number, text in enumerate(texts):
        parts += [*images_before.get(number, ()), _expect(text, str, f"text_list[{number}]"), " "]  # between sentences
    return parts[:-1]


def _expect_list(record: dict[str, Any], name: str) -> list[Any]:
    value: list[Any] = _expect(record.get(name), list, name)
    return value
