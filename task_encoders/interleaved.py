"""`InterleavedEncoder`: documents of texts and images in turns, as web pages are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.document import parse_document
from task_encoders.mixed_tokens import MixedTokens, Vision, batch_mixed, cut_mixed, image_places, pack_mixed
from task_encoders.packing import with_target
from task_encoders.sample_images import SampleImages
from task_encoders.tokenizer import Tokenize, Tokenizer, as_tokenizer


class InterleavedEncoder(TaskEncoder):
    """Predicts the text of a document, in which images stand between the texts.

    Documents are JSON, as OBELICS or MMC4 write them (document.py), beside the images. Texts are tokenized one by
    one, between the tokenizer's `bos` and `eos`. A document of more than `max_length` tokens becomes several items,
    cut anywhere but in an image. Batches are `max_length` long too; without it, as long as their longest row.
    """

    global_rng = False  # draws nothing

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        vision: Vision,
        max_length: int | None = None,
        part: str = "json",
    ) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is the number of tokens of an item, at least 1, not {max_length}")
        self.tokenizer = as_tokenizer(tokenizer)
        self.vision = vision
        self.max_length = max_length
        self.part = part

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip | Iterator[dict[str, Any] | Skip]:
        """One item, as `MixedTokens.item`, or an iterator of them for a long document.

        Skips a sample without the part as "no json" (or what `part` is), one with neither text nor image as "empty",
        an item of images alone as "no target", and a sample of whose images one has more than `max_length` tokens as
        "image longer than max_length".
        Raises ValueError that names the field which is not as it should be, and what Pillow and json raise.
        """
        if self.part not in sample:
            return Skip(f"no {self.part}")
        document = parse_document(sample.json(self.part), SampleImages(sample))
        if not document:
            return Skip("empty")
        mixed = MixedTokens(self.tokenizer, self.vision)
        mixed.add_ids(self.tokenizer.before, target=False)
        for part in document:
            if isinstance(part, str):
                mixed.add_text(part, target=True)
            else:
                mixed.add_image(part)
        mixed.add_ids(self.tokenizer.after, target=True)
        item = mixed.item()
        if self.max_length is None or len(item["tokens"]) <= self.max_length:
            return with_target(item)
        return self._cut(item, self.max_length)

    def length(self, item: dict[str, Any]) -> int:
        """The number of tokens, those of images among them."""
        return len(item["tokens"])

    def images(self, item: dict[str, Any]) -> int:
        """The number of tiles: what a vision model sees."""
        return len(item["grids"])

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
        own = {"max_length": self.max_length, "part": self.part}
        return {**self.tokenizer.settings(), **self.vision.settings(), **own}

    def _cut(self, item: dict[str, Any], max_length: int) -> Skip | Iterator[dict[str, Any] | Skip]:
        borders, start = [0], 0
        images = image_places(item, self.vision)
        if any(end - begin > max_length for begin, end in images):
            return Skip("image longer than max_length")
        while start < len(item["tokens"]):
            stop = min(start + max_length, len(item["tokens"]))
            start = next((begin for begin, end in images if begin < stop < end), stop)
            borders.append(start)
        return (with_target(self.cut(item, *cut)) for cut in pairwise(borders))
