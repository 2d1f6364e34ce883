"""Tokens of text and of images in one sequence, packs and batches of such sequences, and the base of encoders of them.

`ab`, an image of 2 × 4 patches, 2 × 2 to a token (`#`), and `c`; predicted are `b` and `c`:

    tokens       a b # # c
    labels       b - - c -     never an image
    patches      8 of them, row by row
    grids        2 4           rows and columns of each tile
    tile_counts  1             tiles of each image

Image features take the places of `#` in order: those of a batch, read row by row, are those of `patches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image

from savable_pipeline import Rng, Sample, TaskEncoder
from task_encoders.parts.image_tiles import ImageTiles
from task_encoders.parts.scaled_image import Decode, ScaledImage, check_decode, decode_setting
from task_encoders.parts.square_crop import MEAN, STD, normalized
from task_encoders.parts.token_packing import (
    IGNORED,
    batch_documents,
    batch_tokens,
    check_multiple,
    is_packed,
    multiple_setting,
    pack_tokens,
    padded_length,
)
from task_encoders.parts.tokenizer import Ids, Tokenize, Tokenizer, as_tokenizer, joined

_IMAGES = ("patches", "grids", "tile_counts")


@dataclass(frozen=True)
class Vision:
    """How images appear in a sequence of tokens.

    Args:
        tiles: How an image becomes patches: `NativeSize`, `Tiles` or `Buckets`.
        token: The id in the place of each token of an image; text must not contain it.
        text: What a chat template writes in the place of an image.
        before: Text in front of each image, such as the tokenizer's mark of its beginning.
        after: Text behind each image.
        mean: The mean of red, green and blue in the training data, between 0 and 1; that of ImageNet.
        std: Their standard deviation.
        decode: "scaled" decodes a JPEG at 1/2, 1/4 or 1/8 of its size where its tiles have fewer pixels than that, the
            same tiles of the same sizes; "exact" always in full, as states of earlier releases need it.

    Raises:
        ValueError: `token` is no id, `text` is empty, or `decode` is neither.

    Example:
        ```python
        from task_encoders import NativeSize, Vision
        qwen = Vision(
            NativeSize(), 151655, text="<|image_pad|>", before="<|vision_start|>", after="<|vision_end|>"
        )
        qwen.tiles.size(1280, 720)   # (1288, 728)
        ```
    """

    tiles: ImageTiles
    token: int
    text: str = "<image>"
    before: str = ""
    after: str = ""
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD
    decode: Decode = "scaled"

    def __post_init__(self) -> None:
        if not hasattr(self.token, "__index__"):
            raise ValueError(
                f"Vision: token is the id of a token, such as tokenizer.token_to_id({str(self.token)!r}), not "
                f"{self.token!r}; what a template writes in an image's place is text="
            )
        if not self.text:
            raise ValueError("Vision: text is what stands for an image in rendered text; it cannot be empty")
        check_decode(self.decode)

    def image(self, sample: Sample, part: str) -> Image.Image | ScaledImage:
        """Decode an image of a sample as large as its tiles need it, for `tiles.cut`.

        Args:
            sample: The sample.
            part: The name of the part.

        Raises:
            OSError: The image is damaged.
        """
        if self.decode == "exact" or not self.tiles.takes_scaled:
            return sample.image(part)
        full = (0, 0)

        def needed(width: int, height: int) -> tuple[float, float]:
            nonlocal full
            full = width, height
            return self.tiles.at_least(width, height)

        pixels = sample.image(part, at_least=needed)
        return pixels if pixels.size == full else ScaledImage(*full, pixels)

    def normalize(self, patches: torch.Tensor) -> torch.Tensor:
        """Normalize patches: `mean` and `std` of each channel become 0 and 1.

        Args:
            patches: uint8 (n, 3, patch, patch).

        Returns:
            float32 of the same shape.
        """
        return normalized(patches, self.mean, self.std)

    def settings(self) -> dict[str, Any]:
        """Every argument, for `TaskEncoder.settings`."""
        own: dict[str, Any] = {"image_token": self.token, "image_text": [self.text, self.before, self.after]}
        own |= {"mean": list(self.mean), "std": list(self.std)}
        return {**self.tiles.settings(), **own, **decode_setting(self.decode)}


class MixedTokens:
    """A sequence under construction: add texts and images in order, then call `item`.

    Args:
        tokenizer: The tokenizer of all texts.
        vision: How images become tokens; None: there are none.
    """

    def __init__(self, tokenizer: Tokenizer, vision: Vision | None) -> None:
        self._tokenizer = tokenizer
        self._vision = vision
        self._pieces: list[Ids] = []
        self._targets: list[bool] = []  # of each piece
        self._patches: list[torch.Tensor] = []
        self._grids: list[torch.Tensor] = []

    def add_ids(self, ids: Ids, *, target: bool) -> None:
        """Append ids, which are learned if `target`. Raises ValueError if one is the image token's."""
        if self._vision is not None and self._vision.token in ids:
            raise ValueError(
                f"the text holds the image token {self._vision.token} itself; its images would be mistaken"
            )
        self._append(ids, target)

    def add_text(self, text: str, *, target: bool) -> None:
        """Append a text, tokenized by itself."""
        self.add_ids(self._tokenizer.piece(text), target=target)

    def add_image(self, image: Image.Image | ScaledImage) -> None:
        """Append an RGB image. Raises ValueError where there are no tiles for its shape."""
        assert self._vision is not None, "an image without vision"
        patches, grids = self._vision.tiles.cut(image)
        self.add_text(self._vision.before, target=False)
        self._append([self._vision.token] * self._vision.tiles.tokens(grids), False)
        self.add_text(self._vision.after, target=False)
        self._patches.append(patches)
        self._grids.append(grids)

    def item(self) -> dict[str, Any]:
        """`tokens` and `labels`, int64 (n,), and unless `vision` is None:

        `patches`, uint8 (p, 3, patch, patch); `grids`, int64 (tiles, 2); `tile_counts`, int64 (images,).
        """
        tokens = joined(self._pieces) if self._pieces else torch.empty(0, dtype=torch.int64)
        lengths = torch.tensor([len(piece) for piece in self._pieces], dtype=torch.int64)
        target = torch.tensor(self._targets, dtype=torch.bool).repeat_interleave(lengths)
        labels = torch.full_like(tokens, IGNORED)
        labels[:-1] = torch.where(target[1:], tokens[1:], IGNORED)
        text = {"tokens": tokens, "labels": labels}
        return text if self._vision is None else {**text, **self._image_fields(self._vision.tiles.patch)}

    def _append(self, ids: Ids, target: bool) -> None:
        if len(ids):
            self._pieces.append(ids)
            self._targets.append(target)

    def _image_fields(self, patch: int) -> dict[str, torch.Tensor]:
        return {
            "patches": torch.cat([torch.empty(0, 3, patch, patch, dtype=torch.uint8), *self._patches]),
            "grids": torch.cat([torch.empty(0, 2, dtype=torch.int64), *self._grids]),
            "tile_counts": torch.tensor([len(grids) for grids in self._grids], dtype=torch.int64),
        }


def pack_mixed(items: Sequence[dict[str, Any]], *, pad: int = 0, multiple: int = 1) -> dict[str, Any]:
    """One pack of items: tokens as `pack_tokens` arranges them, their images one after another."""
    images = {name: torch.cat([item[name] for item in items]) for name in _IMAGES if name in items[0]}
    return {**pack_tokens(items, pad=pad, multiple=multiple), **images}


def cut_mixed(item: dict[str, Any], start: int, stop: int, vision: Vision | None) -> dict[str, Any]:
    """The tokens `start` to `stop - 1` of an item, and the images among them; the last label is the token after.

    Raises ValueError where that cuts through an image.
    """
    cut = {name: item[name][start:stop] for name in ("tokens", "labels")}
    if vision is None:
        return cut
    inside = []
    for number, (begin, end) in enumerate(image_places(item, vision)):
        if start <= begin and end <= stop:
            inside.append(number)
        elif begin < stop and start < end:
            raise ValueError(
                f"tokens {start} to {stop} cut through the image at {begin} to {end}: pack such items whole"
            )
    tiles = torch.tensor([0, *item["tile_counts"].cumsum(0)])
    patches = torch.tensor([0, *item["grids"].prod(1).cumsum(0)])
    first, last = (inside[0], inside[-1] + 1) if inside else (0, 0)
    return {
        **cut,
        "patches": item["patches"][patches[tiles[first]] : patches[tiles[last]]],
        "grids": item["grids"][tiles[first] : tiles[last]],
        "tile_counts": item["tile_counts"][first:last],
    }


def image_places(item: dict[str, Any], vision: Vision) -> list[tuple[int, int]]:
    """Where the tokens of each image begin, and where they end."""
    places = (item["tokens"] == vision.token).nonzero().flatten().tolist()
    found, seen = [], 0
    for grids in item["grids"].split(item["tile_counts"].tolist()) if len(item["grids"]) else ():
        tokens = vision.tiles.tokens(grids)
        found.append((places[seen], places[seen] + tokens))
        seen += tokens
    return found


def batch_mixed(
    rows: Sequence[dict[str, Any]], *, pad: int, length: int | None, vision: Vision | None, multiple: int = 1
) -> dict[str, Any]:
    """B packs as `batch_tokens` makes rows of them, or B items as `batch_documents` does; and their images, in order.

    Images, unless `vision` is None: `patches`, float32 (P, 3, patch, patch), normalized; `grids`, int64 (tiles, 2);
    `tile_counts`, int64 (images,); `image_counts`, int64 (B,), the images of each row; `patch_cu_seqlens`, int32
    (tiles + 1,), and `patch_max_seqlen`, int, for attention among the patches of a tile.
    """
    if is_packed(rows):
        text = batch_tokens(rows, pad=pad, length=length)
    else:
        text = batch_documents(rows, pad=pad, length=length, multiple=multiple)
    if vision is None:
        return text
    joint = {name: torch.cat([row[name] for row in rows]) for name in _IMAGES}
    sizes = joint["grids"].prod(1)
    return {
        **text,
        **joint,
        "patches": vision.normalize(joint["patches"]),
        "image_counts": torch.tensor([len(row["tile_counts"]) for row in rows]),
        "patch_cu_seqlens": torch.tensor([0, *sizes.cumsum(0)], dtype=torch.int32),
        "patch_max_seqlen": int(sizes.max()) if len(sizes) else 0,
    }


class MixedEncoder(TaskEncoder):
    """Base of encoders whose items are those of `MixedTokens`; `vision=None` sees no images.

    Batches are `max_length` long; without it, as long as their longest row. Each document of a pack, and each row, is
    padded to a multiple of `multiple` tokens.
    """

    global_rng = False  # draws nothing
    absent_settings: ClassVar = {"decode": 'Vision(decode="exact")'}

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
