"""Split an image of any shape into tiles for a vision model, and into patches.

Tiles preserve the aspect ratio.

    1280 × 720 ─ NativeSize ─ one tile, 1288 × 728        both sides a multiple of 28
               ─ Buckets    ─ one tile of a few shapes    the nearest aspect ratio, scaled and cropped centrally
               ─ Tiles      ─ 4 × 2 tiles and a thumbnail, each 448 × 448
               ─ SplitTiles ─ 4 × 3 tiles and the whole image, each 512 × 512

A tile is then cut into square patches, row by row. The model merges `merge` × `merge` patches into one token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from task_encoders.parts.sample_parts import ScaledImage

BICUBIC, LANCZOS = Image.Resampling.BICUBIC, Image.Resampling.LANCZOS
_MOST_ASPECT = 100  # aspect ratio above which an image scaled to cover its bucket would be too large for memory


@dataclass(frozen=True)
class ImageTiles(ABC):
    """Base class of rules that turn an image into tiles.

    `NativeSize`, `Buckets`, `Tiles` and `SplitTiles` are subclasses. You can write your own.

    A subclass defines `tiles(image)`, a list of images. The number of whole patches along each side is a multiple of
    `merge`. Pixels at the right and the bottom that fill no patch are dropped, as by a model's convolution.

    Args:
        patch: The side of a patch, in pixels.
        merge: A model merges `merge` × `merge` patches into one token.

    Raises:
        ValueError: One of them is less than 1.

    Example:
        ```python
        from PIL import Image
        from task_encoders import NativeSize
        patches, grids = NativeSize().cut(Image.new("RGB", (100, 60)))
        patches.shape               # torch.Size([32, 3, 14, 14])
        grids                       # tensor([[4, 8]])
        NativeSize().tokens(grids)  # 8
        ```
    """

    patch: int = 14
    merge: int = 2

    def __post_init__(self) -> None:
        if self.patch < 1 or self.merge < 1:
            raise ValueError(f"{type(self).__name__}: patch={self.patch}, merge={self.merge}: both must be at least 1")

    @property
    def unit(self) -> int:
        """The side of a token in pixels. Every side of a tile is a multiple of it."""
        return self.patch * self.merge

    @abstractmethod
    def tiles(self, image: Image.Image) -> list[Image.Image]:
        """Split an RGB image into tiles.

        Args:
            image: The image, of any size.

        Returns:
            The tiles. The number of whole patches along each side is a multiple of `self.merge`.

        Raises:
            ValueError: There are no tiles for an image of this shape.
        """

    def sizes(self, width: int, height: int) -> list[tuple[int, int]] | None:
        """Return the width and height of each tile, if known without the image.

        None (default): they are unknown.

        Args:
            width: Width of the image, in pixels.
            height: Its height.
        """
        return None

    def texts(self, width: int, height: int) -> tuple[str, ...]:
        """Return the text before each tile of an image.

        The default is (), for models without such texts.

        Args:
            width: Width of the image, in pixels.
            height: Its height.
        """
        return ()

    def at_least(self, width: int, height: int) -> tuple[float, float]:
        """Return the least size at which an image must be decoded.

        By default it is the full size.

        If the result is smaller, `tiles` may get a `ScaledImage`.

        Args:
            width: Width of the full image, in pixels.
            height: Its height.
        """
        return width, height

    @property
    def takes_scaled(self) -> bool:
        """Return whether `tiles` may get a `ScaledImage`.

        It must not if a subclass overrides `tiles` but inherits an `at_least` for other tiles.
        """
        classes = type(self).__mro__
        at_least_class, tiles_class = (next(c for c in classes if name in vars(c)) for name in ("at_least", "tiles"))
        return issubclass(at_least_class, tiles_class)

    def tokens(self, grids: torch.Tensor) -> int:
        """Count the tokens of tiles.

        Args:
            grids: The rows and columns of patches of each tile, int64 (tiles, 2).
        """
        return int(grids.prod(1).sum()) // self.merge**2

    def cut(self, image: Image.Image | ScaledImage) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut an RGB image into patches.

        Args:
            image: The image, of any size.

        Returns:
            The patches, uint8 (n, 3, patch, patch), and the rows and columns of each tile, int64 (tiles, 2).
        """
        tiles = self.tiles(cast(Image.Image, image))  # `tiles` gets a `ScaledImage` only if `takes_scaled`
        grids = [(tile.height // self.patch, tile.width // self.patch) for tile in tiles]
        return torch.from_numpy(np.concatenate([self._patches(tile) for tile in tiles])), torch.tensor(grids)

    def settings(self) -> dict[str, Any]:
        """Return the class and every argument, for `TaskEncoder.settings`."""
        return {"tiles": type(self).__qualname__, **asdict(self)}

    def _check_side(self, side: int) -> None:
        """Raise ValueError if a side is not a whole number of merged patches."""
        if not side // self.patch or side // self.patch % self.merge:
            raise ValueError(
                f"{type(self).__name__}: {side} pixels are {side // self.patch} patches of {self.patch}, not a "
                f"multiple of merge={self.merge}. Pass the model's image size"
            )

    def _patches(self, tile: Image.Image) -> Any:
        """Cut a tile into patches, row by row: uint8 (n, 3, patch, patch)."""
        rows, columns = tile.height // self.patch, tile.width // self.patch
        whole = np.asarray(tile)[: rows * self.patch, : columns * self.patch]
        pixels = whole.reshape(rows, self.patch, columns, self.patch, 3)
        return pixels.transpose(0, 2, 4, 1, 3).reshape(-1, 3, self.patch, self.patch)


@dataclass(frozen=True)
class NativeSize(ImageTiles):
    """One tile of about the image's own size and aspect ratio.

    Each side is rounded to a multiple of `patch * merge`.

    This is `smart_resize` of Qwen2-VL (Wang et al., 2024, section 2.1).

    Args:
        patch: The side of a patch, in pixels.
        merge: A model merges `merge` × `merge` patches into one token.
        min_pixels: A smaller image is enlarged to this many pixels.
        max_pixels: A larger one is shrunk to this many.

    Raises:
        ValueError: A setting is out of its range, or one side of an image is over 200 times as long as the other.

    Example:
        ```python
        from task_encoders import NativeSize
        NativeSize().size(1280, 720)                      # (1288, 728)
        NativeSize(max_pixels=448 * 448).size(1280, 720)  # (588, 336)
        NativeSize().size(1000, 4)                        # ValueError: image of 1000 × 4 pixels: one side is ...
        ```
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 1280 * 28 * 28

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.unit**2 <= self.max_pixels >= self.min_pixels >= 1:
            raise ValueError(
                f"NativeSize: expected {self.unit}² ≤ max_pixels and 1 ≤ min_pixels ≤ max_pixels, found "
                f"{self.min_pixels} and {self.max_pixels}"
            )

    def tiles(self, image: Image.Image | ScaledImage) -> list[Image.Image]:
        """Return the resized image."""
        return [image.resize(self.size(image.width, image.height), BICUBIC)]

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """Return the size to which the image is resized."""
        return [self.size(width, height)]

    def at_least(self, width: int, height: int) -> tuple[float, float]:
        """Return the size to which the image is resized.

        It is the own size of the image if `size` raises an error.
        """
        return self.size(width, height) if max(width, height) <= 200 * min(width, height) else (width, height)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image is resized.

        Args:
            width: Width of the image, in pixels.
            height: Height of the image, in pixels.

        Raises:
            ValueError: One side is over 200 times as long as the other.
        """
        unit, sides = self.unit, (width, height)
        if max(sides) > 200 * min(sides):
            raise ValueError(f"image of {width} × {height} pixels: one side is over 200 times as long as the other")
        new_width, new_height = (round(side / unit) * unit for side in sides)  # 0 if thin, which is corrected below
        if new_width * new_height > self.max_pixels:
            factor = math.sqrt(width * height / self.max_pixels)
            new_width, new_height = (max(unit, math.floor(side / factor / unit) * unit) for side in sides)
        elif new_width * new_height < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (width * height))
            new_width, new_height = (math.ceil(side * factor / unit) * unit for side in sides)
        return new_width, new_height


@dataclass(frozen=True)
class Tiles(ImageTiles):
    """Square tiles and, if there are several, a thumbnail of the whole image.

    The grid of columns and rows has the aspect ratio nearest to the image's. Among equally near grids, a larger one is
    chosen if the image has more than half of its pixels. This is the dynamic tiling of InternVL 1.5 (Chen et al., 2024,
    section 3.3) and of NVLM.

    Args:
        patch: The side of a patch, in pixels.
        merge: A model merges `merge` × `merge` patches into one token.
        side: The side of a tile, in pixels. Its number of whole patches is a multiple of `merge`.
        min_tiles: The least number of tiles, without the thumbnail.
        max_tiles: The greatest.
        thumbnail: Whether several tiles are followed by the whole image as one more.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        ```python
        from PIL import Image
        from task_encoders import Tiles
        Tiles().grid(1280, 720)                              # (4, 2)
        len(Tiles().tiles(Image.new("RGB", (1280, 720))))    # 9
        Tiles(side=440)                                      # ValueError: Tiles: 440 pixels are 31 patches of 14, ...
        ```
    """

    side: int = 448
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_side(self.side)
        if not 1 <= self.min_tiles <= self.max_tiles:
            raise ValueError(f"Tiles: expected 1 ≤ min_tiles ≤ max_tiles, not {self.min_tiles} and {self.max_tiles}")

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """Return the size of each tile and of the thumbnail. All are squares of one size."""
        columns, rows = self.grid(width, height)
        count = columns * rows
        return [(self.side, self.side)] * (count + (self.thumbnail and count > 1))

    def at_least(self, width: int, height: int) -> tuple[float, float]:
        """Return the size of all tiles together."""
        columns, rows = self.grid(width, height)
        return columns * self.side, rows * self.side

    def tiles(self, image: Image.Image | ScaledImage) -> list[Image.Image]:
        """Return the tiles, row by row, and then the thumbnail."""
        columns, rows = self.grid(image.width, image.height)
        tiles = _squares(image.resize((columns * self.side, rows * self.side), BICUBIC), self.side)
        thumbnails = [image.resize((self.side, self.side), BICUBIC)] if self.thumbnail and len(tiles) > 1 else []
        return tiles + thumbnails

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of tiles for an image.

        Args:
            width: Width of the image, in pixels.
            height: Height of the image, in pixels.
        """
        sides = range(1, self.max_tiles + 1)
        all_grids = [(columns, rows) for columns in sides for rows in sides]
        grids = sorted((g for g in all_grids if self.min_tiles <= math.prod(g) <= self.max_tiles), key=math.prod)
        nearest = min(abs(width / height - columns / rows) for columns, rows in grids)
        smallest, *larger = [grid for grid in grids if abs(width / height - grid[0] / grid[1]) == nearest]
        half_filled = [grid for grid in larger if width * height > 0.5 * self.side**2 * math.prod(grid)]
        return half_filled[-1] if half_filled else smallest


@dataclass(frozen=True)
class SplitTiles(ImageTiles):
    """Square tiles of an image, each with a text, and then the whole image.

    The image is resized so that its longer side is `long_side`, and each side is then enlarged to whole tiles. This is
    the splitting of Idefics3 (Laurençon et al., 2024) and SmolVLM, with the texts of these models before the tiles. An
    image of one tile is not split.

    Args:
        patch: The side of a patch, in pixels.
        merge: A model merges `merge` × `merge` patches into one token.
        side: The side of a tile, in pixels. Its number of whole patches is a multiple of `merge`.
        long_side: The longer side of a resized image, in pixels, at most 4096.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        ```python
        from task_encoders import SplitTiles
        tiles = SplitTiles(patch=16, merge=4, side=512, long_side=1024)
        len(tiles.sizes(1280, 720))      # 5
        tiles.texts(1280, 720)[-2:]      # ('<fake_token_around_image><row_2_col_2>', ...
        ```
    """

    side: int = 512
    long_side: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_side(self.side)
        if not 1 <= self.long_side <= 4096:
            raise ValueError(f"SplitTiles: long_side must be 1 to 4096 pixels, not {self.long_side}")

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """Return the size of each tile, and last of the whole image.

        All are squares of one size.
        """
        return [(self.side, self.side)] * len(self.texts(width, height))

    def at_least(self, width: int, height: int) -> tuple[float, float]:
        """Return the size to which the image is resized first."""
        return self._resized(width, height)

    def texts(self, width: int, height: int) -> tuple[str, ...]:
        """Return the text before each tile and before the whole image.

        Each row of tiles is a line.
        """
        new_width, new_height = self._whole_tiles(*self._resized(width, height))
        columns, rows = new_width // self.side, new_height // self.side
        prefix, whole_image = "<fake_token_around_image>", "<fake_token_around_image><global-img>"
        if columns * rows == 1:
            return (whole_image,)
        grid = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
        # a line break before the first tile of each row but the first
        texts = ["\n" * (row > 1 and column == 1) + f"{prefix}<row_{row}_col_{column}>" for row, column in grid]
        return (*texts, f"\n\n{whole_image}")

    def tiles(self, image: Image.Image | ScaledImage) -> list[Image.Image]:
        """Return the tiles, row by row, and then the whole image."""
        size = self._resized(image.width, image.height)
        enlarged = image.resize(size, LANCZOS).resize(self._whole_tiles(*size), LANCZOS)
        tiles = _squares(enlarged, self.side)
        return tiles if len(tiles) == 1 else [*tiles, enlarged.resize((self.side, self.side), LANCZOS)]

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the size in which the longer side is `long_side`, and the other one an even number."""
        aspect = width / height
        short_side = int(self.long_side / aspect) if width >= height else int(self.long_side * aspect)
        short_side = max(short_side + short_side % 2, 1)
        return (self.long_side, short_side) if width >= height else (short_side, self.long_side)

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Round a size up to whole tiles: first the longer side, then the other one by the aspect ratio."""
        aspect = width / height
        if width >= height:
            width = self._round_up(width)
            return width, self._round_up(int(width / aspect))
        height = self._round_up(height)
        return self._round_up(int(height * aspect)), height

    def _round_up(self, pixels: int) -> int:
        return -(-pixels // self.side) * self.side


def _squares(image: Image.Image, side: int) -> list[Image.Image]:
    """Cut an image into squares, row by row."""
    corners = [(left, upper) for upper in range(0, image.height, side) for left in range(0, image.width, side)]
    return [image.crop((left, upper, left + side, upper + side)) for left, upper in corners]


@dataclass(frozen=True)
class Buckets(ImageTiles):
    """One tile, in the bucket shape nearest to the image's aspect ratio.

    All shapes have about the same area. The image is scaled until it covers the shape, and cropped evenly on both sides
    (NovelAI: aspect ratio bucketing, 2022). The shapes have sides from `min_side` to `max_side` in steps of
    `patch * merge`. For each width, the height is the largest one with at most `max_pixels`. With
    `min_side=336, max_side=336` the only shape is the central square, as in CLIP.

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
                f"Buckets: no multiples of {self.unit} from {self.min_side} to {self.max_side} have at most "
                f"{self.max_pixels} pixels. Change max_pixels or the sides"
            )

    def shapes(self) -> list[tuple[int, int]]:
        """Return the width and height of each bucket, the narrowest first."""
        sides = [side for side in range(self.unit, self.max_side + 1, self.unit) if side >= self.min_side]
        shapes: set[tuple[int, int]] = set()
        for side in sides:
            fitting = [other_side for other_side in sides if side * other_side <= self.max_pixels]
            if fitting:
                shapes |= {(side, fitting[-1]), (fitting[-1], side)}
        return sorted(shapes)

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """Return the size of the image's bucket."""
        return [self._shape(width, height)]

    def at_least(self, width: int, height: int) -> tuple[float, float]:
        """Return the size to which the image is scaled."""
        return self._covering(width, height)

    def tiles(self, image: Image.Image | ScaledImage) -> list[Image.Image]:
        """Return the image, scaled and cropped to its bucket."""
        new_width, new_height = self._shape(image.width, image.height)
        covering = self._covering(image.width, image.height)
        left, upper = (covering[0] - new_width) // 2, (covering[1] - new_height) // 2
        # Resizing a box gives slightly other pixels than cropping a resized image, so only thin images do that.
        if max(covering) <= _MOST_ASPECT * min(covering):
            return [image.resize(covering, BICUBIC).crop((left, upper, left + new_width, upper + new_height))]
        x_scale, y_scale = image.width / covering[0], image.height / covering[1]
        right = min(image.width, (left + new_width) * x_scale)
        lower = min(image.height, (upper + new_height) * y_scale)
        return [image.resize((new_width, new_height), BICUBIC, box=(left * x_scale, upper * y_scale, right, lower))]

    def _covering(self, width: int, height: int) -> tuple[int, int]:
        """Return the least size with the image's aspect ratio that covers the shape of its bucket."""
        bucket_width, bucket_height = self._shape(width, height)
        if bucket_width * height <= bucket_height * width:
            return bucket_height * width // height, bucket_height
        return bucket_width, bucket_width * height // width

    def _shape(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the bucket of an image."""
        aspect = math.log(width / height)
        return min(self.shapes(), key=lambda shape: abs(math.log(shape[0] / shape[1]) - aspect))
