"""`Buckets`: an image as one tile of the nearest of a few shapes, filled and cropped in the centre."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL import Image

from task_encoders.parts.image_tiles import BICUBIC, ImageTiles
from task_encoders.parts.scaled_image import ScaledImage


@dataclass(frozen=True)
class Buckets(ImageTiles):
    """One tile, of the shape among a few of like area that is nearest to the image's aspect.

    The image is scaled until it covers the shape, and cropped evenly on both sides (NovelAI: aspect ratio bucketing,
    2022). The shapes have sides from `min_side` to `max_side` in steps of `patch * merge`; for each width, the height
    is the largest that keeps within `max_pixels`.

    Args:
        patch: The side of a patch, in pixels.
        merge: A model merges `merge` × `merge` patches into one token.
        max_pixels: The most pixels of a shape.
        min_side: The least width and height, in pixels.
        max_side: The greatest width and height, in pixels.

    Raises:
        ValueError: No shape fits.

    Example:
        ```python
        from PIL import Image
        from task_encoders import Buckets
        buckets = Buckets(max_pixels=224 * 224)
        buckets.shapes()[:3]                                     # [(168, 280), (196, 252), (224, 224)]
        buckets.tiles(Image.new("RGB", (1280, 720)))[0].size     # (280, 168)
        ```
    """

    max_pixels: int = 336 * 336
    min_side: int = 168
    max_side: int = 672

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes():
            raise ValueError(
                f"Buckets: no shape has sides from {self.min_side} to {self.max_side}, multiples of {self.unit}, and "
                f"at most {self.max_pixels} pixels"
            )

    def shapes(self) -> list[tuple[int, int]]:
        """Width and height of each bucket, from the narrowest on."""
        sides = [side for side in range(self.unit, self.max_side + 1, self.unit) if side >= self.min_side]
        found: set[tuple[int, int]] = set()
        for one in sides:
            fitting = [other for other in sides if one * other <= self.max_pixels]
            if fitting:
                found |= {(one, fitting[-1]), (fitting[-1], one)}
        return sorted(found)

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """The size of its bucket."""
        return [self._shape(width, height)]

    def at_least(self, width: int, height: int) -> tuple[float, float]:
        """The size to which it is scaled."""
        shrunk = min(full / side for full, side in zip((width, height), self._shape(width, height), strict=True))
        return width / shrunk, height / shrunk

    def tiles(self, image: Image.Image | ScaledImage) -> list[Image.Image]:
        """The image, scaled and cropped to its bucket."""
        wide, high = self._shape(image.width, image.height)
        scale = min(image.width / wide, image.height / high)
        left, upper = (image.width - wide * scale) / 2, (image.height - high * scale) / 2
        right, lower = min(image.width, left + wide * scale), min(image.height, upper + high * scale)
        box = (max(0.0, left), max(0.0, upper), right, lower)  # rounding must not leave the image
        return [image.resize((wide, high), BICUBIC, box=box)]

    def _shape(self, width: int, height: int) -> tuple[int, int]:
        aspect = math.log(width / height)
        return min(self.shapes(), key=lambda shape: abs(math.log(shape[0] / shape[1]) - aspect))
