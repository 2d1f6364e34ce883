"""HTML pages: their content as plain values, which templates turn into HTML.

The content is cards of entries with text, thumbnails or tokens. Templates escape every value, and invisible characters
are shown as escape sequences. `Budget` limits the bytes of media.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from savable_pipeline import __version__
from savable_pipeline.core.wording import human_bytes

LONGEST_TEXT = 1500  # characters of a text that are shown
_INVISIBLE = re.compile("[\0-\b\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """Small image that we encoded: a data URI, and its width and height in pixels.

    `caption` is shown below it. If `link` is set, the caption links to the element of the page with that `id`.
    """

    uri: str
    width: int
    height: int
    caption: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens that are shown together.

    `kind` says whether the tokens contribute to the loss: "loss", "ignored" or "unknown". `begins` says whether a
    document starts with them. `repeat` is how often a repeated token occurs. `next` is the target of the last token if
    it is not the token shown next. `anchor` is the `id` of the document that starts here, for links.
    """

    text: str
    kind: str
    title: str
    begins: bool = False
    repeat: int = 1
    next: str = ""
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Row of tokens as spans, with a note about the row."""

    note: str
    spans: Sequence[TokenSpan]


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a conversation.

    `role` is "" for text of the page itself, such as "3 turns more". `answers` says whether the model speaks.
    """

    role: str
    text: str
    answers: bool = False


@dataclass(frozen=True, slots=True)
class Player:
    """Player of a `kind`, "video" or "audio".

    Its data is a URI, or "" for no player, and a note is shown below it.
    """

    kind: str
    uri: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sound:
    """Audio as a waveform and as a spectrogram.

    The first is a path of SVG and the second a data URI. Either may be "".

    `note` is the caption.
    """

    waveform: str
    spectrogram: str
    note: str


@dataclass(frozen=True, slots=True)
class CardEntry:
    """Entry of a card: a part of a sample, or a field of a batch.

    It has content, or `fault`, the reason why the part or field cannot be shown.
    """

    name: str
    note: str
    text: str = ""
    thumbnails: Sequence[Thumbnail] = ()
    rows: Sequence[TokenRow] = ()
    turns: Sequence[Turn] = ()
    player: Player | None = None
    sounds: Sequence[Sound] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """A sample or a batch: its title, its position, and its entries."""

    title: str
    where: str
    entries: Sequence[CardEntry] = ()
    fault: str = ""
    sources: Sequence[str] = field(default=())  # the samples of a batch

    @property
    def faulty(self) -> bool:
        """Return whether the sample or batch, or one of its entries, cannot be shown."""
        return bool(self.fault) or any(entry.fault for entry in self.entries)


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return at most `longest` characters of a text."""
    return text if len(text) <= longest else f"{text[:longest]} …"


def escape_invisible(text: str) -> str:
    """Escape invisible characters and those that UTF-8 cannot encode."""
    escaped = _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return escaped.encode("utf-8", "backslashreplace").decode()


def first_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return shorten(" ".join(str(error).split()) or type(error).__name__, 500)


def render(template: str, **values: Any) -> bytes:
    """Fill in a template with values, and return the page as UTF-8."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_escape_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = human_bytes
    environment.filters["ms"] = lambda seconds: f"{1000 * seconds:,.2f}"
    environment.filters["count"] = "{:,}".format
    footer = {"version": __version__, "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "docs": _documentation_url()}
    return environment.get_template(template).render(footer | values).encode()


def _documentation_url() -> str:
    """Return the URL of the documentation, or "" if the package is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        links = metadata.metadata("savable_pipeline").get_all("Project-URL") or ()
        urls: dict[str, str] = dict(link.split(", ", 1) for link in links)
        return urls.get("Documentation", "")
    return ""


def _escape_text(value: Any) -> Any:
    """Escape invisible characters of a value for a template, unless it is markup."""
    return escape_invisible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


PAGE_BYTES = 64_000_000  # most bytes of all media in a page, as base64
EXCERPT_BYTES = 2_000_000  # most bytes of the excerpt of one part


@dataclass(slots=True)
class Budget:
    """Bytes, as base64, that media may still take in a page or a card."""

    free: int

    @property
    def excerpt(self) -> int:
        """The most bytes of an excerpt before base64, which takes a third more."""
        return min(EXCERPT_BYTES, self.free * 3 // 4 - 3)

    def embed(self, kind: str, data: bytes) -> str:
        """Return data as a URI, and subtract its bytes from those that are free.

        Returns "" if too few bytes are free.
        """
        uri = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return uri if self.reserve(uri) else ""

    def reserve(self, uri: str) -> bool:
        """Subtract the bytes of a URI. Returns False if too few bytes are free."""
        if len(uri) > self.free:
            return False
        self.free -= len(uri)
        return True
