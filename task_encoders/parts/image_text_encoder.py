"""`MixedEncoder`: the base of encoders whose items are sequences of text and image tokens."""

from __future__ import annotations

from typing import Any

from savable_pipeline import Rng, TaskEncoder
from task_encoders.parts.image_text_tokens import Vision, batch_mixed, cut_mixed, pack_mixed
from task_encoders.parts.token_packing import check_multiple, is_packed, multiple_setting, padded_length
from task_encoders.parts.tokenizer import Tokenize, Tokenizer, as_tokenizer


class MixedEncoder(TaskEncoder):
    """Base of encoders whose items are those of `MixedTokens`; `vision=None` sees no images.

    Batches are `max_length` long; without it, as long as their longest row. Each document of a pack, and each row, is
    padded to a multiple of `multiple` tokens.
    """

    global_rng = False  # draws nothing

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None,
        *,
        vision: Vision | None,
        max_length: int | None,
        part: str,
        multiple: int = 1,
    ) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is the number of tokens of an item, at least 1, not {max_length}")
        check_multiple(multiple, max_length)
        self.tokenizer = as_tokenizer(tokenizer)
        self.multiple = multiple
        self.vision = vision
        self.max_length = max_length
        self.part = part

    def length(self, item: dict[str, Any]) -> int:
        """The number of tokens, those of images and the padding to a multiple among them."""
        return padded_length(len(item["tokens"]), self.multiple)

    def images(self, item: dict[str, Any]) -> int:
        """The number of tiles: what a vision model sees."""
        return len(item["grids"]) if self.vision else 0

    def cut(self, item: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """The tokens `start` to `stop - 1` of an item, as an item. Raises ValueError where that cuts an image."""
        return cut_mixed(item, start, stop, self.vision)

    def pack(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """One pack, as `pack_mixed` makes it: T tokens, and all images."""
        return pack_mixed(items, pad=self.tokenizer.pad, multiple=self.multiple)

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """B packs, or B items that are not packed, as `batch_mixed` makes them."""
        if is_packed(items):
            items = [item if "cu_seqlens" in item else self.pack([item], rng) for item in items]
        return batch_mixed(
            items, pad=self.tokenizer.pad, length=self.max_length, vision=self.vision, multiple=self.multiple
        )

    def settings(self) -> dict[str, Any]:
        """Every argument; the tokenizer by its identity and special ids."""
        vision = self.vision.settings() if self.vision else {"tiles": None}
        own = {"max_length": self.max_length, "part": self.part, **multiple_setting(self.multiple)}
        return {**self.tokenizer.settings(), **vision, **own}
