"""`CaptioningEncoder`: an image and its caption as an image and tokens."""

from __future__ import annotations

from typing import Any

import torch

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.parts.sample_parts import Decode, Field
from task_encoders.parts.square_crop import MEAN, STD, SquareCrop
from task_encoders.parts.token_packing import (
    batch_documents,
    batch_tokens,
    check_multiple,
    document,
    is_packed,
    multiple_setting,
    pack_tokens,
    pad_rows,
    padded_length,
)
from task_encoders.parts.tokenizer import Tokenize, Tokenizer, as_tokenizer

_TEXT = Field("txt")


class CaptioningEncoder(TaskEncoder):
    """Predicts the tokens of a caption from its image.

    The caption is the `txt` part of a sample, or a field of its `json` part. Captions can be packed.

    Args:
        tokenizer: A function from text to token ids, an object with `encode(text)` as of Hugging Face, tiktoken or
            SentencePiece, or a `Tokenizer` to add special ids. None takes the UTF-8 bytes, 259 ids in all.
        image_size: Width and height of the image, in pixels.
        max_tokens: A longer caption is cut to this many tokens.
        augment: True (default) crops at random and mirrors. False takes the central square.
        crop_scale: The least and the greatest area of a random crop, as a fraction of the image's area.
        flip: The probability that a random crop is mirrored.
        mean: The mean of red, green and blue in the training data, between 0 and 1 (default: ImageNet's).
        std: The standard deviation of red, green and blue.
        caption: The field of the `json` part for samples without `txt`.
        decode: "scaled" (default) decodes a JPEG at 1/2, 1/4 or 1/8 of its size if the image needs no more pixels.
            "exact" always decodes in full.
        exif: Whether to rotate a photo by its EXIF orientation (default).
        multiple: Each caption of a pack, and each row, is padded to a multiple of this many tokens: 2 · cp for context
            parallelism over cp ranks. `length` counts the padding.
        eos: The end of a caption, for a tokenizer that adds none: True for its own `eos_token`, a token as text or id,
            False for none. It is required where such a tokenizer has special tokens. It is added once, at the true end.

    An item has `image`, uint8 (3, size, size), and `tokens` and `labels`, int64 (n,): a label is the next token, -100
    behind the last. A batch of B items, rows of T tokens, has

    - `image`, float32 (B, 3, size, size), normalized;
    - `tokens`, `labels` and `position_ids`, int64 (B, T); `lengths`, int64 (B,), the number of tokens of each caption.

    A batch of B packs with N captions has N images in `image`, in the order of their captions, and no `lengths`, but

    - `image_counts`, int64 (B,), the number of images of each row;
    - `image_index`, int64 (B, T): the index of each token's image among the N, and -1 for padding;
    - `cu_seqlens`, int32 (captions and paddings + 1,), the start of each among the B * T tokens, and `max_seqlen`, int,
      for `flash_attn_varlen_func`.

    A sample is skipped as "no image" or, without a caption or with an empty one, as "no text".

    Raises:
        ValueError: A setting is out of its range, or a caption is not text.
        UnicodeDecodeError: A part is not UTF-8.
        JSONDecodeError: A part is not JSON.
        OSError: An image is damaged.

    Example:
        ```python
        from task_encoders import CaptioningEncoder
        lane = sp.Lane()  # to inspect batches; a loader calls a pipeline function with its own lanes
        samples = sp.TarShardReader("shards/", lane)
        items = sp.Encode(samples, CaptioningEncoder(image_size=32))
        batch = next(sp.Batcher(sp.OnlinePacker(items, max_length=64), size=2))
        batch["image"].shape[1:]   # torch.Size([3, 32, 32])
        batch["tokens"].dtype      # torch.int64
        ```
    """

    global_rng = False

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
        decode: Decode = "scaled",
        exif: bool = True,
        multiple: int = 1,
        eos: bool | int | str | None = None,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.tokenizer = as_tokenizer(tokenizer).ending(eos)
        self.crop = SquareCrop(image_size, augment, crop_scale, flip, mean, std, decode, exif)
        check_multiple(multiple, None)
        self.multiple = multiple
        self.max_tokens = max_tokens
        self.caption = Field(f"json[{caption}]")

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """Return one item, or `Skip`."""
        image = self.crop.image(sample, rng)  # uint8, because floats would need four times the memory
        if image is None:
            return Skip("no image")
        tokens = self.tokenizer(self._caption(sample))
        if len(tokens) == 0:
            return Skip("no text")
        text = {name: tensor[: self.max_tokens] for name, tensor in document(tokens).items()}
        return {"image": image, **text}

    def length(self, item: dict[str, Any]) -> int:
        """Return the number of text tokens, including padding to a multiple.

        A model's tokens of the image do not count.
        """
        return padded_length(len(item["tokens"]), self.multiple)

    def images(self, item: dict[str, Any]) -> int:
        """Return the number of images in an item, which is 1."""
        return 1

    def cut(self, item: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the tokens `start` to `stop - 1` of an item with its image, as an item."""
        return {"image": item["image"], "tokens": item["tokens"][start:stop], "labels": item["labels"][start:stop]}

    def pack(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build one pack of n items.

        It has `image`, uint8 (n, 3, size, size), and the captions as one pack of tokens.
        """
        text = pack_tokens(items, pad=self.tokenizer.pad, multiple=self.multiple)
        return {"image": torch.stack([item["image"] for item in items]), **text}

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build a batch of B rows, from B packs or B items."""
        if not is_packed(items):
            text = batch_documents(items, pad=self.tokenizer.pad, multiple=self.multiple)
            return {"image": self.crop.normalize(torch.stack([item["image"] for item in items])), **text}
        packs = [item if "cu_seqlens" in item else self.pack([item], rng) for item in items]
        text = batch_tokens(packs, pad=self.tokenizer.pad)
        return {
            "image": self.crop.normalize(torch.cat([pack["image"] for pack in packs])),
            "image_counts": torch.tensor([len(pack["image"]) for pack in packs]),
            "image_index": _image_index(packs, length=text["tokens"].shape[1]),
            **text,
        }

    def settings(self) -> dict[str, Any]:
        """Return every argument, and for the tokenizer its identity and special ids."""
        own = {"max_tokens": self.max_tokens, "caption": self.caption.name, **multiple_setting(self.multiple)}
        return {**self.tokenizer.settings(), **self.crop.settings(), **own}

    def _caption(self, sample: Sample) -> str:
        """Return the caption of a sample, or "" if it has none."""
        return (_TEXT if "txt" in sample else self.caption).read_text(sample) or ""


def _image_index(packs: list[dict[str, Any]], *, length: int) -> torch.Tensor:
    """Return the index of each token's image, -1 for padding: int64 (packs, length).

    Captions of 2 and 1 tokens, and of 2 in the next pack, give 0 0 1 and 2 2 -1.
    """
    rows, images_before = [], 0
    for pack in packs:
        lengths = pack["cu_seqlens"].diff()
        rows.append(torch.arange(images_before, images_before + len(lengths)).repeat_interleave(lengths))
        images_before += len(lengths)
    return pad_rows(rows, -1, length)
