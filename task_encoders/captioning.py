"""`CaptioningEncoder`: an image and its caption to an augmented image and tokens, packed or not."""

from __future__ import annotations

from typing import Any

import torch

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.field import Field
from task_encoders.packing import batch_tokens, document, pack_tokens, pad_rows
from task_encoders.square_crop import MEAN, STD, SquareCrop
from task_encoders.tokenizer import Tokenize, Tokenizer, as_tokenizer


class CaptioningEncoder(TaskEncoder):
    """Predicts the tokens of a caption, given the image.

    `tokenizer` is a function from str to ids, an object with `encode(text)` such as Hugging Face's, or a
    `Tokenizer` where special ids are wanted; None takes the UTF-8 bytes, between a beginning (257) and an end
    (258). The caption is the "txt" part, or the field `caption` of the "json" part, cut after `max_tokens`.
    With `augment` the image is a random crop whose share of the area lies in `crop_scale`, mirrored with
    probability `flip`; without, the central square.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        image_size: int = 224,
        max_tokens: int = 512,
        augment: bool = True,
        crop_scale: tuple[float, float] = (0.5, 1.0),
        flip: float = 0.5,
        mean: tuple[float, float, float] = MEAN,
        std: tuple[float, float, float] = STD,
        caption: str = "caption",
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is at least 1, not {max_tokens}")
        self.tokenizer = as_tokenizer(tokenizer)
        self.crop = SquareCrop(image_size, augment=augment, scale=crop_scale, flip=flip, mean=mean, std=std)
        self.global_rng = self.crop.global_rng
        self.max_tokens = max_tokens
        self.caption = Field(f"json[{caption}]")

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """One item: `image`, uint8 (3, size, size); `tokens` and `labels`, int64 (n,).

        Skips a sample without an image as "no image", one with no caption or an empty one as "no text".
        Raises what Pillow raises where the image cannot be decoded, UnicodeDecodeError or JSONDecodeError where
        the caption cannot, and ValueError that names the field where the caption is no text.
        """
        image = self.crop.image(sample)  # floats, four times as large, only in a batch
        if image is None:
            return Skip("no image")
        tokens = self.tokenizer(self._caption(sample))
        if len(tokens) == 0:
            return Skip("no text")
        text = {name: tensor[: self.max_tokens] for name, tensor in document(tokens).items()}
        return {"image": image, **text}

    def length(self, item: dict[str, Any]) -> int:
        """The number of text tokens; what a model makes of the image is not counted."""
        return len(item["tokens"])

    def images(self, item: dict[str, Any]) -> int:
        """One."""
        return 1

    def cut(self, item: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """The tokens `start` to `stop - 1` of an item, as an item, with its image."""
        return {"image": item["image"], "tokens": item["tokens"][start:stop], "labels": item["labels"][start:stop]}

    def pack(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """One pack of n items: `image`, uint8 (n, 3, size, size), and the captions as one pack of tokens."""
        return {"image": torch.stack([item["image"] for item in items]), **pack_tokens(items)}

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """B packs; or B items, each then a pack of its own. N images in all, in the order of their captions.

        `image`, float32 (N, 3, size, size), normalized; `image_counts`, int64 (B,), the images of each row;
        `image_index`, int64 (B, T), which of the N a token is about, -1 on padding; and, as `batch_tokens`
        makes them, `tokens`, `labels` and `position_ids`, int64 (B, T), `cu_seqlens` and `max_seqlen`.
        """
        packs = [item if "cu_seqlens" in item else self.pack([item], rng) for item in items]
        text = batch_tokens(packs, pad=self.tokenizer.pad)
        return {
            "image": self.crop.normalize(torch.cat([pack["image"] for pack in packs])),
            "image_counts": torch.tensor([len(pack["image"]) for pack in packs]),
            "image_index": _image_index(packs, length=text["tokens"].shape[1]),
            **text,
        }

    def settings(self) -> dict[str, Any]:
        """Every argument; the tokenizer by its identity and special ids."""
        own = {"max_tokens": self.max_tokens, "caption": self.caption.name}
        return {**self.tokenizer.settings(), **self.crop.settings(), **own}

    def _caption(self, sample: Sample) -> str:
        return sample.text("txt") if "txt" in sample else self.caption.read_text(sample) or ""


def _image_index(packs: list[dict[str, Any]], *, length: int) -> torch.Tensor:
    """Captions of 2 and 1 tokens in one pack and of 2 in the next give 0 0 1 and 2 2 -1, int64 (2, 3)."""
    rows, first = [], 0
    for pack in packs:
        lengths = pack["cu_seqlens"].diff()
        rows.append(torch.arange(first, first + len(lengths)).repeat_interleave(lengths))
        first += len(lengths)
    return pad_rows(rows, -1, length)
