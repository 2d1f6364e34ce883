"""Token ids as text, if the encoder's tokenizer can decode them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from savable_pipeline.stages.task_encoder import TaskEncoder

_LONGEST_CHARACTER = 8  # tokens


class Decoder:
    """Pieces of text for tokens; their numbers where there is no text.

    Asks the encoder's `tokenizer`, or what that holds as `tokenize`, for `decode(ids)`. `bos`, `eos` and `pad` of the
    tokenizer are called so.
    """

    def __init__(self, encoder: TaskEncoder | None) -> None:
        tokenizer = getattr(encoder, "tokenizer", None)
        found: Any = getattr(tokenizer, "decode", None) or getattr(getattr(tokenizer, "tokenize", None), "decode", None)
        self._decode = found if callable(found) else None
        special = {name: getattr(tokenizer, name, None) for name in ("pad", "eos", "bos")}
        self._names = {number: name for name, number in special.items() if type(number) is int}

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Text and number of tokens of each piece: one token, or the few that share a character."""
        found: list[tuple[str, int]] = []
        start, before = 0, 0  # where the piece starts, and the one before it: its text shows what stands between
        for end in range(1, len(ids) + 1):
            text = self._between(ids, before, start, end)
            if not text.endswith("\ufffd") or end - start >= _LONGEST_CHARACTER or end == len(ids):
                found.append((text or self._name(ids[start]), end - start))
                before, start = start, end
        return found

    def _between(self, ids: Sequence[int], before: int, start: int, end: int) -> str:
        """The text of `ids[start:end]` as it reads after those before: some put a space between words only so."""
        context, both = self._text(ids[before:start]), self._text(ids[before:end])
        return both.removeprefix(context) if both.startswith(context) else self._text(ids[start:end])

    def _text(self, ids: Sequence[int]) -> str:
        if self._decode is None or not ids:
            return ""
        try:
            return str(_decoded(self._decode, list(ids)))
        except Exception:  # an id out of its range is no fault of the page
            return ""

    def _name(self, number: int) -> str:
        return f"‹{self._names.get(number, number)}›"


def _decoded(decode: Any, ids: list[int]) -> Any:
    try:
        return decode(ids, skip_special_tokens=False)  # tokenizers leave them out otherwise
    except TypeError:
        return decode(ids)
