"""`MixedEncoder`: what encoders of text with images have in common, once a sample is a sequence of tokens."""

from __future__ import annotations

from typing import Any

from savable_pipeline import Rng, TaskEncoder
from task_encoders.mixed_tokens import Vision, batch_mixed, cut_mixed, pack_mixed
from task_encoders.tokenizer import Tokenize, Tokenizer, as_tokenizer


class MixedEncoder(TaskEncoder):
    """Base of encoders whose items are those of `MixedTokens`; `vision=None` sees no images.

    Batches are `max_length` long; without it, as long as their longest row.
    """

    global_rng = False  # draws nothing

    def __init__(
        self, tokenizer: Tokenizer | Tokenize | None, *, vision: Vision | None, max_length: int | None, part: str
    ) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is the number of tokens of an item, at least 1, not {max_length}")
        self.tokenizer = as_tokenizer(tokenizer)
        self.vision = vision
        self.max_length = max_length
        self.part = part

    def length(self, item: dict[str, Any]) -> int:
        """The number of tokens, those of images among them."""
        return len(item["tokens"])

    def images(self, item: dict[str, Any]) -> int:
        """The number of tiles: what a vision model sees."""
        return len(item["grids"]) if self.vision else 0

    def cut(self, item: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """The tokens `start` to `stop - 1` of an item, as an item. Raises ValueError where that cuts an image."""
        return cut_mixed(item, start, stop, self.vision)

    def pack(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """One pack, as `pack_mixed` makes it: T tokens, and all images."""
        return pack_mixed(items)

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """B packs, as `batch_mixed` makes them; or B items, each then a pack of its own."""
        packs = [item if "cu_seqlens" in item else self.pack([item], rng) for item in items]
        return batch_mixed(packs, pad=self.tokenizer.pad, length=self.max_length, vision=self.vision)

    def settings(self) -> dict[str, Any]:
        """Every argument; the tokenizer by its identity and special ids."""
        vision = self.vision.settings() if self.vision else {"tiles": None}
        return {**self.tokenizer.settings(), **vision, "max_length": self.max_length, "part": self.part}
