"""`Vision`: how images appear in a sequence of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image

from savable_pipeline import Sample
from task_encoders.parts.image_tiles import ImageTiles
from task_encoders.parts.medium import Grid, MediaHeader, Medium, MediumTokens, Unmeasured, element_rows
from task_encoders.parts.processor_tiles import tiles_of_processor
from task_encoders.parts.sample_parts import Decode, ScaledImage, check_decode
from task_encoders.parts.square_crop import MEAN, STD, normalized


@dataclass(frozen=True)
class Vision(Medium):
    """How images appear in a sequence of tokens.

    `Vision.from_processor` reads the settings of a model from its processor.

    Args:
        tiles: How an image becomes patches: `NativeSize`, `Tiles`, `SplitTiles` or `Buckets`.
        token: The id of each token of an image. Text must not contain it.
        text: The placeholder that a chat template writes for an image.
        before: The text before each image, such as a special token.
        after: The text after each image.
        mean: The mean of red, green and blue in the training data, between 0 and 1 (default: ImageNet's).
        std: The standard deviation of red, green and blue.
        decode: "scaled" (default) decodes a JPEG at 1/2, 1/4 or 1/8 of its size if its tiles need no more pixels. The
            tiles have the same sizes. "exact" always decodes in full.
        exif: Whether to rotate a photo by its EXIF orientation (default).
        bits: 8 converts images of 16 bits per channel by v >> 8. None (default) rejects them.

    Raises:
        ValueError: `token` is not an id, `text` is empty, or `decode` is invalid.

    Example:
        ```python
        from task_encoders import NativeSize, Vision
        mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
        qwen = Vision(NativeSize(), 151655, text="<|image_pad|>", mean=mean, std=std)
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
    exif: bool = True
    bits: int | None = None

    kind: ClassVar[str] = "image"

    def __post_init__(self) -> None:
        self.check_token()
        check_decode(self.decode)

    @classmethod
    def from_processor(cls, processor: Any, *, patch: int | None = None, decode: Decode = "scaled") -> Vision:
        """Copy the tiles, numbers and special tokens of a `transformers` processor.

        The supported processors are those of Qwen2-VL, Qwen2.5-VL and Qwen2.5-Omni, LLaVA 1.5 (the image processors of
        CLIP and SigLIP), InternVL, and SmolVLM and Idefics3.

        Args:
            processor: `AutoProcessor.from_pretrained(name)`.
            patch: `config.vision_config.patch_size` of the model. None (default): that of the processor, if any.
            decode: As for `Vision`.

        Raises:
            ValueError: The processor, or one of its settings, is not supported.
        """
        tiles, before, after = tiles_of_processor(processor, patch)
        image_processor, text = processor.image_processor, processor.image_token
        mean, std = tuple(image_processor.image_mean), tuple(image_processor.image_std)
        token = processor.tokenizer.convert_tokens_to_ids(text)
        return cls(tiles, token, text, before, after, mean, std, decode=decode)

    def image(self, sample: Sample, part: str) -> Image.Image | ScaledImage:
        """Decode an image of a sample at the size that its tiles need, for `tiles.cut`.

        Args:
            sample: The sample.
            part: The name of the part.

        Raises:
            OSError: The image is damaged.
            ValueError: The image has more than 8 bits per channel, and `bits` is None.
        """
        if self.decode == "exact" or not self.tiles.takes_scaled:
            return sample.image(part, mode="RGB", bits=self.bits, exif=self.exif)
        full = (0, 0)

        def needed(width: int, height: int) -> tuple[float, float]:
            """Return the size at which the image must be decoded, and store its full size."""
            nonlocal full
            full = width, height
            return self.tiles.at_least(width, height)

        pixels = sample.image(part, mode="RGB", bits=self.bits, at_least=needed, exif=self.exif)
        return pixels if pixels.size == full else ScaledImage(*full, pixels)

    def normalize(self, patches: torch.Tensor) -> torch.Tensor:
        """Normalize patches: `mean` and `std` of each channel become 0 and 1.

        Args:
            patches: uint8 (n, 3, patch, patch).

        Returns:
            float32 of the same shape.
        """
        return normalized(patches, self.mean, self.std)

    def tokenize(self, content: Image.Image | ScaledImage) -> MediumTokens:
        """Build the tokens and patches of an RGB image.

        Args:
            content: The image, of any size.

        Raises:
            ValueError: There are no tiles for its shape.
        """
        patches, grids = self.tiles.cut(content)
        fields = {"patches": patches, "grids": grids, "tile_counts": torch.tensor([len(grids)])}
        return self._medium_tokens(grids, fields, self.tiles.texts(content.width, content.height))

    def measure(self, info: MediaHeader) -> MediumTokens:
        """Count the tokens from the size of the image, without patches."""
        if not self.exif or info.width is None or info.height is None:  # the size in a header is that after rotation
            raise Unmeasured
        if (sizes := self.tiles.sizes(info.width, info.height)) is None:
            raise Unmeasured
        patch = self.tiles.patch
        grids = torch.tensor([(height // patch, width // patch) for width, height in sizes])
        return self._medium_tokens(grids, {}, self.tiles.texts(info.width, info.height))

    def pieces(self, tokens: MediumTokens) -> Iterator[str | MediumTokens]:
        """Yield the texts and tokens of an image in a sequence.

        Each tile may have a text before it.
        """
        yield self.before
        fields = tokens.fields
        for text, grid in zip(tokens.texts, tokens.grids, strict=bool(tokens.texts)):
            yield text
            yield MediumTokens(self, grid.tokens, fields, (grid,))
            fields = self.empty()  # the first tile carries the patches of all tiles
        if not tokens.texts:
            yield tokens
        yield self.after

    def empty(self) -> dict[str, torch.Tensor]:
        """Return the fields of an item without images.

        They are `patches`, uint8 (0, 3, patch, patch); `grids`, int64 (0, 2); `tile_counts`, int64 (0,).
        """
        return {
            "patches": torch.empty(0, 3, self.tiles.patch, self.tiles.patch, dtype=torch.uint8),
            "grids": torch.empty(0, 2, dtype=torch.int64),
            "tile_counts": torch.empty(0, dtype=torch.int64),
        }

    def token_counts(self, item: dict[str, Any]) -> list[int]:
        """Count the tokens of each image of an item."""
        return [self.tiles.tokens(grids) for grids in item["grids"].split(item["tile_counts"].tolist())]

    def select(self, item: dict[str, Any], first: int, last: int) -> dict[str, torch.Tensor]:
        """Return the fields of the images `first` to `last - 1` of an item."""
        tiles = element_rows(item["tile_counts"], first, last)
        patches = element_rows(item["grids"].prod(1), tiles.start, tiles.stop)
        return {
            "patches": item["patches"][patches],
            "grids": item["grids"][tiles],
            "tile_counts": item["tile_counts"][first:last],
        }

    def batch(self, joint: dict[str, torch.Tensor], counts: torch.Tensor) -> dict[str, Any]:
        """Return the fields of a batch from those of its rows, `joint`.

        `counts`, int64 (B,), is the number of images of each row. The fields are `patches`, float32 (P, 3, patch,
        patch), normalized; `grids`, int64 (tiles, 2); `tile_counts`, int64 (images,); `image_counts`, int64 (B,);
        `patch_cu_seqlens`, int32 (tiles + 1,), and `patch_max_seqlen`, int, for attention among the patches of a tile.
        """
        sizes = joint["grids"].prod(1)
        return {
            **joint,
            "patches": self.normalize(joint["patches"]),
            "image_counts": counts,
            "patch_cu_seqlens": torch.tensor([0, *sizes.cumsum(0)], dtype=torch.int32),
            "patch_max_seqlen": int(sizes.max()) if len(sizes) else 0,
        }

    def settings(self) -> dict[str, Any]:
        """Return every argument, for `TaskEncoder.settings`."""
        own: dict[str, Any] = {"image_token": self.token, "image_text": [self.text, self.before, self.after]}
        own |= {"mean": list(self.mean), "std": list(self.std)}
        return {**self.tiles.settings(), **own, "decode": self.decode, "exif": self.exif}

    def _medium_tokens(
        self, grids: torch.Tensor, fields: dict[str, torch.Tensor], texts: tuple[str, ...]
    ) -> MediumTokens:
        """Return the tokens of an image whose tiles have these grids of patches."""
        merge = self.tiles.merge
        shapes = tuple(Grid(1, rows // merge, columns // merge) for rows, columns in grids.tolist())
        return MediumTokens(self, self.tiles.tokens(grids), fields, shapes, texts)
