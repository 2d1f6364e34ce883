"""Formats of conversations and documents, read as lists of messages and parts.

They may have images, videos and audio.

Turns of a conversation are of role and content (OpenAI, TRL), of from and value (LLaVA, ShareGPT), or of user and
assistant (FineVision). They are the list `messages`, `conversations` or `texts` of an object, or a list by itself:

    {"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                  {"role": "assistant", "content": "A cat."}]}

    {"texts": [{"user": "What is it?", "assistant": "A cat."}]}

`tools` beside them goes to the chat template, and so do the entries of `chat_template_kwargs`. Tool calls are OpenAI's,
or turns of `function_call` (LLaMA-Factory) and `tool_call` (ms-swift), whose text is JSON; arguments that are JSON text
are read, since templates write them as JSON themselves. Turns of `observation`, `tool_response`, `function` and `tool`
are the role `tool`. Rows with `chosen` and `rejected` answers, or a `label` that is false, are refused.

A place for an image is `<image>` in a text, and in lists of content {"type": "image"}: these take the images of the
sample in order, or as the object's `images`, or `image`, names their parts or has them as `data:` URLs. An `image_url`
of a content names a part, or has a `data:` URL; an `index` says which of the images it is. Of user and assistant,
images without a place stand before the first text. So with `video` and `audio` in the place of `image`, where the
encoder takes them.

OBELICS' documents (Laurençon et al., 2023), two lists, one with null where the other has something; and MMC4's (Zhu et
al., 2023), where an image comes before the text it is matched with:

    {"texts": ["A cat:", null, "asleep."], "images": [null, "0.jpg", null]}

    {"text_list": ["A cat.", "A dog."], "image_info": [{"image_name": "0.jpg", "matched_text_index": 1}]}

Their images are known by the names of their parts, or, where one of the document's is none, such as a URL, taken in
order. OBELICS' may have the lists `videos` and `audios` as well: one list has something where all others have null.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from savable_pipeline import Sample
from task_encoders.parts.sample_parts import DecodedImage, SampleImages, SampleMedia, ShownMedia

log = logging.getLogger(__name__)

_CALLS = ("function_call", "tool_call")
_RESULTS = dict.fromkeys(("observation", "tool_response", "function", "tool"), "tool")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"} | _RESULTS
_LISTS = {"image": "images", "video": "videos", "audio": "audios"}  # of a document

ContentPart = str | ShownMedia


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Args:
        role: "user", "assistant", "system", or another that the chat template knows.
        parts: Texts (str), images (PIL.Image.Image, or a `ScaledImage` as `Vision.image` decodes it), and videos and
            sounds (`MediaPart`, whose `text` stands in their place), in order.
        trained: False for an answer that is context only (in OpenAI's format, "weight": 0).
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
        """Whether this is an answer that is learned."""
        return self.role == "assistant" and self.trained


def parse_conversation(record: Any, media: SampleMedia) -> list[Message]:
    """Return the messages of a sample's JSON.

    Raises ValueError that names the wrong field.
    """
    name = next((each for each in CONVERSATIONS if isinstance(record, dict) and record.get(each) is not None), "")
    if not name and not isinstance(record, list):
        raise ValueError(f"expected {_KNOWN}; found {_found(record)}")
    turns = _expect(record[name], list, name) if name else record
    at = name or "messages"
    found = [_expect(turn, dict, f"{at}[{i}]") for i, turn in enumerate(turns)]
    if not found:
        return []
    form = next((form for form in _TURNS if {*form.split(" and ")} & found[0].keys()), None)
    if form is None:
        raise ValueError(f"{at}[0]: expected {_KNOWN}; found {_found(found[0])}")
    if isinstance(record, dict):
        media.order_by(record)
    messages = [message for i, turn in enumerate(found) for message in _TURNS[form](turn, f"{at}[{i}]", media)]
    if _TURNS[form] is _finevision:
        messages[0].parts[:0] = media.images.unplaced()
    media.check_all_used()
    _say_once(f"{name or 'a list'} of {form}")
    return messages


@cache
def _say_once(form: str) -> None:
    log.info("ChatEncoder: the conversations are %s", form)


def _found(record: Any) -> str:
    return f"the fields {', '.join(record)}" if isinstance(record, dict) else type(record).__name__


def _llava(turn: dict[str, Any], at: str, media: SampleMedia) -> list[Message]:
    role = turn.get("from")
    if role in _CALLS:
        return [_call(turn.get("value"), f"{at}.value")]
    if role not in _ROLES:
        raise ValueError(f"{at}.from: expected one of {', '.join((*_ROLES, *_CALLS))}, found {role!r}")
    return [Message(_ROLES[role], _with_places(turn.get("value"), media.kinds, f"{at}.value", media))]


def _finevision(turn: dict[str, Any], at: str, media: SampleMedia) -> list[Message]:
    both = ("user", "assistant")
    return [Message(role, _with_places(turn.get(role), media.shown_kinds, f"{at}.{role}", media)) for role in both]


def _with_places(text: Any, kinds: list[str], at: str, media: SampleMedia) -> list[ContentPart]:
    """The parts of a text in which `<image>` and the like are places."""
    texts_and_kinds = re.split(f"<({'|'.join(kinds) or '(?!)'})>", _expect(text, str, at))  # a text, a kind, a text, …
    parts: list[ContentPart] = list(texts_and_kinds)
    for number, kind in list(enumerate(texts_and_kinds))[1::2]:
        parts[number] = media.of(kind, at).next(at)
    return [part for part in parts if part != ""]


def _openai(turn: dict[str, Any], at: str, media: SampleMedia) -> list[Message]:
    turn = {name: value for name, value in turn.items() if value is not None}  # tables have null for what is not there
    role = _expect(turn.get("role"), str, f"{at}.role")
    weight = turn.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"{at}.weight: expected 0 or 1, found {weight!r}")
    content = turn.get("content")
    if role in _CALLS:
        return [_call(content, f"{at}.content", trained=weight == 1)]
    if "function_call" in turn:  # OpenAI's form before `tool_calls`
        turn["tool_calls"] = [{"function": turn.pop("function_call")}]
    if turn.get("tool_calls"):
        turn["tool_calls"] = _calls(turn["tool_calls"], f"{at}.tool_calls")
    if isinstance(content, str):
        parts = _with_places(content, media.shown_kinds, f"{at}.content", media)
    elif content is None and "tool_calls" in turn:
        parts = []
    else:
        listed = enumerate(_expect(content, list, f"{at}.content"))
        parts = [_part(_expect(part, dict, f"{at}.content[{i}]"), f"{at}.content[{i}]", media) for i, part in listed]
    more = {name: value for name, value in turn.items() if name not in ("role", "content", "weight")}
    return [Message(_RESULTS.get(role, role), parts, trained=weight == 1, more=more)]


def _part(part: dict[str, Any], at: str, media: SampleMedia) -> ContentPart:
    kind = str(part.get("type"))
    if kind == "text":
        text: str = _expect(part.get("text"), str, f"{at}.text")
        return text
    if kind in _LISTS:
        found = media.of(kind, at)
        if isinstance(index := part.get("index"), int):
            return found.numbered(index, f"{at}.index")
        address = next((known for name in (kind, "url", "path") if (known := found.known(part.get(name)))), None)
        return found.next(at) if address is None else found.named(address, at)
    named = kind.removesuffix("_url")
    if kind != named and named in _LISTS:
        link = part.get(kind)
        url = link.get("url") if isinstance(link, dict) else link
        at = f"{at}.{kind}.url"
        return media.of(named, at).named(_expect(url, str, at), at)
    raise ValueError(
        f"{at}.type: expected text, image, image_url, or these of video or audio, found {part.get('type')!r}"
    )


def _call(value: Any, at: str, *, trained: bool = True) -> Message:
    """The answer that calls tools, of one call, or a list of calls, of name and arguments, as JSON text or not."""
    found = _read_json(value, at)
    calls = _calls(found if isinstance(found, list) else [found], at)
    return Message("assistant", [], trained=trained, more={"tool_calls": calls})


def _calls(value: Any, at: str) -> list[dict[str, Any]]:
    """Tool calls as chat templates take them: functions, whose arguments are objects."""
    calls = []
    for number, each in enumerate(_expect(_read_json(value, at), list, at)):
        call = _expect(_read_json(each, f"{at}[{number}]"), dict, f"{at}[{number}]")
        call = {"function": call} if "name" in call else call
        function = _expect(call.get("function"), dict, f"{at}[{number}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
            function = {**function, "arguments": _read_json(arguments, f"{at}[{number}].function.arguments")}
        calls.append({"type": "function", **call, "function": function})
    return calls


def _read_json(value: Any, at: str) -> Any:
    """What a text is as JSON; anything else as it is. Raises ValueError that names the field."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{at}: expected JSON, found {value[:80]!r} ({error})") from error


def read_record(sample: Sample, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the JSON of a conversation, and other arguments of the chat template.

    Both are from the object or its columns.

    That is `tools`, which may be JSON text, and the entries of `chat_template_kwargs`; a function by itself becomes
    OpenAI's form. Fields that are null in a column are left out: its schema has them for all rows. Raises ValueError
    that names the field.
    """
    value = sample.json(name)
    if isinstance(value, dict):
        refuse_preferences(value)
        columns_read = value
    else:
        value = value if name.endswith("json") else _without_nulls(value)
        columns = [column for column in ("tools", "chat_template_kwargs") if column in sample]
        columns_read = {column: _without_nulls(_read_json(sample.text(column) or "null", column)) for column in columns}
    read = {each: _read_json(columns_read.get(each) or "null", each) for each in ("tools", "chat_template_kwargs")}
    arguments: dict[str, Any] = _expect(read["chat_template_kwargs"] or {}, dict, "chat_template_kwargs")
    tools = [_read_json(tool, f"tools[{i}]") for i, tool in enumerate(_expect(read["tools"] or [], list, "tools"))]
    wrapped = [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in tools
    ]
    return value, {**arguments, **({"tools": wrapped} if tools else {})}


def refuse_preferences(fields: Any) -> None:
    """Raise ValueError for rows with answers that must not be trained on.

    DPO, KTO and similar formats have such.
    """
    found = [name for name in ("rejected", "rejected_response") if name in fields and fields[name] is not None]
    labels = [name for name in ("label", "kto_tag") if name in fields]
    found += [name for name in labels if fields[name] is False or fields[name] == b"false"]
    if found:
        raise ValueError(
            f"the row has {found[0]!r}, as preferences, whose answers are not all targets. Drop such rows or this "
            "field, or pass part='messages' for a table"
        )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


CONVERSATIONS = ("messages", "conversations", "texts")
"""The fields of an object, or columns of a table, that a conversation may be."""
_TURNS = {"role and content": _openai, "from and value": _llava, "user and assistant": _finevision}
_KNOWN = f"turns of {', or of '.join(_TURNS)}, as a list or in a field {', '.join(CONVERSATIONS)}"


def _expect(value: Any, kind: type, at: str) -> Any:
    if isinstance(value, kind):
        return value
    names: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
    raise ValueError(f"{at}: expected {names[kind]}, found {'nothing' if value is None else repr(value)[:80]}")


def parse_document(record: Any, media: SampleMedia) -> list[ContentPart]:
    """Return texts, none of them empty, and what is between them.

    Raises ValueError that names the wrong field.
    """
    if isinstance(record, dict) and "texts" in record:
        parts = _obelics(record, media)
    elif isinstance(record, dict) and "text_list" in record:
        parts = _mmc4(_listed(record, "text_list"), _listed(record, "image_info"), media.images)
    else:
        found = _found(record)
        raise ValueError(f"expected an object with texts and images, or text_list and image_info, found {found}")
    media.check_all_used()
    return [part for part in parts if part != ""]


def _obelics(record: dict[str, Any], media: SampleMedia) -> list[ContentPart]:
    others = {
        kind: name for kind, name in _LISTS.items() if kind == "image" or (kind in media.kinds and name in record)
    }
    columns = {"text": _listed(record, "texts"), **{kind: _listed(record, name) for kind, name in others.items()}}
    names = ["texts", *others.values()]
    sizes = [len(column) for column in columns.values()]
    if len(set(sizes)) > 1:
        raise ValueError(f"{_and(names)}: expected lists of one length, found {_and(list(map(str, sizes)))}")
    known = {kind: media.of(kind, name).names for kind, name in others.items()}
    named = {kind: all(value is None or value in known[kind] for value in columns[kind]) for kind in others}
    parts: list[ContentPart] = []
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        values = [(kind, value) for kind, value in zip(columns, row, strict=True) if value is not None]
        if len(values) != 1:
            at = _and([f"{name}[{number}]" for name in names])
            raise ValueError(f"{at}: expected null in all but one of them")
        kind, value = values[0]
        if kind == "text":
            parts.append(_expect(value, str, f"texts[{number}]"))
        else:
            at = f"{others[kind]}[{number}]"
            found = media.of(kind, at)
            parts.append(found.named(value, at) if named[kind] else found.next(at))
    return parts


def _and(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]])


def _mmc4(texts: list[Any], entries: list[Any], images: SampleImages) -> list[ContentPart]:
    names = [entry.get("image_name") if isinstance(entry, dict) else None for entry in entries]
    named = all(name in images.names for name in names)
    before: dict[int, list[DecodedImage]] = {}
    for number, (entry, name) in enumerate(zip(entries, names, strict=True)):
        at = f"image_info[{number}]"
        index = entry.get("matched_text_index") if isinstance(entry, dict) else None
        if type(index) is not int or not 0 <= index < len(texts):
            raise ValueError(f"{at}.matched_text_index: expected 0 to {len(texts) - 1}, found {index!r:.80}")
        before.setdefault(index, []).append(images.named(name, at) if named and name else images.next(at))
    parts: list[ContentPart] = []
    for number, text in enumerate(texts):
        parts += [*before.get(number, ()), _expect(text, str, f"text_list[{number}]"), " "]  # between sentences
    return parts[:-1]


def _listed(record: dict[str, Any], name: str) -> list[Any]:
    found: list[Any] = _expect(record.get(name), list, name)
    return found
