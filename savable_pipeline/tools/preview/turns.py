"""A conversation in the JSON of a sample, as turns; what else the record holds stays JSON.

Seen as one are the records of OpenAI and of LLaVA, and lists alone, under whatever name: objects with a role ("role",
"from") and what it says ("content", "value"), a text or a list of parts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ROLES = ("role", "from")
_CONTENTS = ("content", "value")
_ANSWERING = {"assistant", "gpt", "model", "bot", "chatgpt"}
_FIRST, _LAST = 4, 8  # turns of a long conversation that are shown
_LONGEST_QUESTION, _LONGEST_ANSWER = 300, 900  # characters: a question must not push its answer out of sight


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says; `role` is "" for the words of the page itself, such as "3 turns more"."""

    role: str
    text: str
    answers: bool = False


def conversation_in(record: Any) -> tuple[list[Turn], Any] | None:
    """The turns of the first conversation of a record and what else it holds, None for nothing; None without one."""
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


def _turn(said: dict[str, Any]) -> Turn:
    role = _first(said, _ROLES)
    answers = role.lower() in _ANSWERING
    more = {name: value for name, value in said.items() if name not in (*_ROLES, *_CONTENTS) and value is not None}
    texts = [_content(_first(said, _CONTENTS)), json.dumps(more, ensure_ascii=False) if more else ""]
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
