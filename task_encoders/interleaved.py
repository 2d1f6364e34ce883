"""`InterleavedEncoder`: documents of texts and images in turns, as web pages are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from savable_pipeline import Rng, Sample, Skip
from task_encoders.document import parse_document
from task_encoders.mixed_encoder import MixedEncoder
from task_encoders.mixed_tokens import MixedTokens, Vision, image_places
from task_encoders.packing import with_target
from task_encoders.sample_images import SampleImages
from task_encoders.tokenizer import Tokenize, Tokenizer


class InterleavedEncoder(MixedEncoder):
    """Predicts the text of a document, in which images stand between the texts.

    Documents are JSON, as OBELICS or MMC4 write them (document.py), beside the images. Texts are tokenized one by
    one, between the tokenizer's `bos` and `eos`. A document of more than `max_length` tokens becomes several items,
    cut anywhere but in an image. Batches are `max_length` long too; without it, as long as their longest row.
    """

    vision: Vision  # never without

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        vision: Vision,
        max_length: int | None = None,
        part: str = "json",
    ) -> None:
        super().__init__(tokenizer, vision=vision, max_length=max_length, part=part)

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
