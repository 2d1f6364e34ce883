"""`CaptioningEncoder`: an image and its caption to an augmented image and tokens, packed or not."""

from __future__ import annotations

from typing import Any

import torch
from torchvision.transforms import v2

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.packing import batch_tokens, document, pack_tokens, pad_rows
from task_encoders.tokenizer import Tokenize, Tokenizer, as_tokenizer

IMAGE_PARTS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff", "tif", "ppm")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet: red, green, blue, between 0 and 1


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
        if image_size < 1 or max_tokens < 1:
            raise ValueError(f"image_size and max_tokens are at least 1, not {image_size} and {max_tokens}")
        self.tokenizer = as_tokenizer(tokenizer)
        self.max_tokens = max_tokens
        self.caption = caption
        self.mean, self.std = mean, std
        augmented = [v2.RandomResizedCrop(image_size, scale=crop_scale), v2.RandomHorizontalFlip(flip)]
        central = [v2.Resize(image_size), v2.CenterCrop(image_size)]
        self.transform = v2.Compose([*(augmented if augment else central), v2.PILToTensor()])
        self.global_rng = ("torch",) if augment else False  # torchvision's transforms draw from no other
        self._settings = {"image_size": image_size, "max_tokens": max_tokens, "caption": caption}
        self._settings |= {"augment": augment, "crop_scale": list(crop_scale), "flip": flip}
        self._settings |= {"mean": list(mean), "std": list(std)}

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """One item: `image`, uint8 (3, size, size); `tokens` and `labels`, int64 (n,).

        Skips a sample without an image as "no image", one with no caption or an empty one as "no text".
        Raises what Pillow raises where the image cannot be decoded, and UnicodeDecodeError or
        JSONDecodeError where the caption cannot.
        """
        extension = next((known for known in IMAGE_PARTS if known in sample), None)
        if extension is None:
            return Skip("no image")
        tokens = self.tokenizer(self._caption(sample))
        if len(tokens) == 0:
            return Skip("no text")
        text = {name: tensor[: self.max_tokens] for name, tensor in document(tokens).items()}
        image = self.transform(sample.image(extension))  # floats, four times as large, only in a batch
        return {"image": image, **text}

    def length(self, item: dict[str, Any]) -> int:
        """The number of text tokens; what a model makes of the image is not counted."""
        return len(item["tokens"])

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
        image = v2.functional.to_dtype(torch.cat([pack["image"] for pack in packs]), torch.float32, scale=True)
        return {
            "image": v2.functional.normalize(image, self.mean, self.std, inplace=True),
            "image_counts": torch.tensor([len(pack["image"]) for pack in packs]),
            "image_index": _image_index(packs, length=text["tokens"].shape[1]),
            **text,
        }

    def settings(self) -> dict[str, Any]:
        """Every argument; the tokenizer by its identity and special ids."""
        return {**self.tokenizer.settings(), **self._settings}

    def _caption(self, sample: Sample) -> str:
        if "txt" in sample:
            return sample.text("txt")
        caption = sample.json("json").get(self.caption) if "json" in sample else None
        return caption if isinstance(caption, str) else ""


def _image_index(packs: list[dict[str, Any]], *, length: int) -> torch.Tensor:
    """Captions of 2 and 1 tokens in one pack and of 2 in the next give 0 0 1 and 2 2 -1, int64 (2, 3)."""
    rows, first = [], 0
    for pack in packs:
        lengths = pack["cu_seqlens"].diff()
        rows.append(torch.arange(first, first + len(lengths)).repeat_interleave(lengths))
        first += len(lengths)
    return pad_rows(rows, -1, length)
