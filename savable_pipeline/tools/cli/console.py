"""Where the command prints, and text of data as a terminal may see it."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape

from savable_pipeline.core.wording import counted

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, what turns the direction of text, lone surrogates, ends of lines


def console(*, stderr: bool = False) -> Console:
    """A console that takes no word between colons for a picture: `train.py:train: …` holds one."""
    return Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)


out = console()  # results
err = console(stderr=True)  # progress and errors


def printable(text: str) -> str:
    """Text of anywhere, for a console: without markup, and what a terminal would obey as escapes, such as `\\\\x1b`."""
    return escape(visible(text))


def visible(text: str) -> str:
    """Text of anywhere for what knows no markup: what a terminal would obey as escapes."""
    return "".join(map(_seen, text))


def _seen(character: str) -> str:
    if unicodedata.category(character) not in _UNSEEN:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode()


def print_counts(console: Console, word: str, counts: Mapping[str, int], some: str = "") -> None:
    """In how many samples each of these parts is `word`, in one line; nothing where none is."""
    there = [f"{name} in {counted(count, 'sample')}" for name, count in counts.items() if count]
    if there:
        console.print(printable(f"{word}: {', '.join(there)}{some}"))


def print_warnings(console: Console, warnings: list[str]) -> None:
    """Each warning on a line."""
    for warning in warnings:
        console.print(printable(f"warning: {warning}"))
