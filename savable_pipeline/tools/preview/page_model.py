"""The content of a page, as plain values for its template: cards of entries with text, thumbnails or tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from savable_pipeline.tools.preview.turns import Turn

LONGEST_TEXT = 1500  # characters of a text that are shown
_UNSEEN = re.compile("[\0-\b\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small image that we encoded: a data URI, and its width and height in pixels."""

    uri: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that are shown as one: `kind` is "loss", "ignored" or "unknown"; `begins`: a document begins here.

    `repeat` is how often the token stands there, `next` what is predicted where that is not the next token here.
    """

    text: str
    kind: str
    title: str
    begins: bool = False
    repeat: int = 1
    next: str = ""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row of tokens, in words and in spans."""

    note: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Entry:
    """A part of a sample or a field of a batch: its kind and its content; or `fault`, why it cannot be shown."""

    name: str
    note: str
    text: str = ""
    thumbnails: Sequence[Thumbnail] = ()
    rows: Sequence[TokenRow] = ()
    turns: Sequence[Turn] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """A sample or a batch: its title, where it lies, and its entries."""

    title: str
    where: str
    entries: Sequence[Entry] = ()
    fault: str = ""
    sources: Sequence[str] = field(default=())  # of a batch: its samples


def cut(text: str, longest: int = LONGEST_TEXT) -> str:
    """At most `longest` characters of a text."""
    return text if len(text) <= longest else f"{text[:longest]} …"


def visible(text: str) -> str:
    """Text that UTF-8 can hold, with invisible characters and changes of direction spelled out."""
    spelled = _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return spelled.encode("utf-8", "backslashreplace").decode()


def first_line(error: BaseException) -> str:
    """The message of an error, in one line."""
    return cut(" ".join(str(error).split()) or type(error).__name__, 500)
