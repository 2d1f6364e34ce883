"""`SquareCrop`: square images of one size, cropped at random or centrally.

Random boxes have random sizes and aspect ratios, as in the training of Inception (Szegedy et al., 2014).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from savable_pipeline import Rng, Sample, empty
from task_encoders.parts.sample_parts import Decode, check_decode, named_part

# mean and deviation of red, green and blue in ImageNet, between 0 and 1
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ASPECTS = (3 / 4, 4 / 3)  # the least and the greatest width / height of a random box
_TRIES = 10  # tries to draw a box that fits in the image
_BILINEAR = Image.Resampling.BILINEAR


@dataclass(frozen=True)
class SquareCrop:
    """Crop of a sample's image to a square, at random or centrally.

    Random crops are drawn from `rng` with the distribution of torchvision's `RandomResizedCrop`, and resized with the
    same pixels as its PIL images.

    Args:
        size: Width and height of the result, in pixels.
        augment: True (default) crops at random and mirrors. False takes the central square.
        scale: The least and the greatest area of a random crop, as a fraction of the image's area.
        flip: The probability that a random crop is mirrored.
        mean: The mean of red, green and blue in the training data, between 0 and 1 (default: ImageNet's).
        std: The standard deviation of red, green and blue.
        decode: "scaled" (default) decodes a JPEG at 1/2, 1/4 or 1/8 of its size if the result needs no more pixels.
            "exact" always decodes in full.
        exif: Whether to rotate a photo by its EXIF orientation (default).
        bits: 8 converts images of 16 bits per channel by v >> 8. None (default) rejects them.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        ```python
        from task_encoders import SquareCrop
        crop = SquareCrop(32)
        image = crop.image(next(sp.TarShardReader("shards/", sp.Lane())), sp.Rng(7))
        image.shape, image.dtype              # (torch.Size([3, 32, 32]), torch.uint8)
        crop.normalize(image[None]).dtype     # torch.float32
        ```
    """

    size: int = 224
    augment: bool = True
    scale: tuple[float, float] = (0.5, 1.0)
    flip: float = 0.5
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD
    decode: Decode = "scaled"
    exif: bool = True
    bits: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1 pixel, not {self.size}")
        least, greatest = self.scale
        if not 0 < least <= greatest <= 1 or not 0 <= self.flip <= 1:
            raise ValueError(f"expected 0 < least ≤ greatest ≤ 1 in scale={self.scale} and 0 ≤ flip={self.flip} ≤ 1")
        check_decode(self.decode)

    def image(self, sample: Sample, rng: Rng) -> torch.Tensor | None:
        """Crop the first image of a sample.

        Args:
            sample: A sample, with or without an image.
            rng: The encoder call's random numbers.

        Returns:
            uint8 (3, size, size), or None if the sample has no image.

        Raises:
            OSError: The image is damaged.
            ValueError: The image has more than 8 bits per channel, and `bits` is None.
        """
        part = named_part(sample, None, "image")
        if part is None:
            return None
        return _pixels(self._crop_at_random(sample, part, rng) if self.augment else self._crop_center(sample, part))

    def clip(self, frames: NDArray[np.uint8], rng: Rng) -> torch.Tensor:
        """Crop all frames of a video clip by the same box.

        Args:
            frames: uint8 (n, 3, height, width).
            rng: The encoder call's random numbers.

        Returns:
            uint8 (n, 3, size, size).
        """
        height, width = frames.shape[2:]
        short = min(width, height)
        left, top = (width - short) / 2, (height - short) / 2
        box: tuple[float, float, float, float] = (left, top, left + short, top + short)
        if self.augment:
            box = random_box((width, height), self.scale, rng)
        flip = self.augment and rng.random() < self.flip
        images = [Image.fromarray(_channels_last(frame)) for frame in frames]
        cropped = torch.stack([_pixels(image.resize((self.size, self.size), _BILINEAR, box)) for image in images])
        return cropped.flip(-1) if flip else cropped

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize images: `mean` and `std` of each channel become 0 and 1.

        Args:
            images: uint8 (…, 3, size, size).

        Returns:
            float32 of the same shape.
        """
        return normalized(images, self.mean, self.std)

    def settings(self) -> dict[str, Any]:
        """Return every argument, for `TaskEncoder.settings`."""
        own = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"image_size": own.pop("size"), "crop_scale": own.pop("scale"), **own}

    def _crop_at_random(self, sample: Sample, part: str, rng: Rng) -> Image.Image:
        """Return a random part of an image, resized to the square."""
        size = (self.size, self.size)
        needed = size if self.decode == "scaled" else None
        region = sample.image(
            part,
            mode="RGB",
            bits=self.bits,
            at_least=needed,
            box=lambda *full: random_box(full, self.scale, rng),
            exif=self.exif,
        )
        image = region.resize(size, _BILINEAR, box=region.info["box"])
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < self.flip else image

    def _crop_center(self, sample: Sample, part: str) -> Image.Image:
        """Resize the shorter side to `size` and cut the middle, as torchvision's `Resize` and `CenterCrop` do."""
        resized = (0, 0)

        def needed(width: int, height: int) -> tuple[int, int]:
            """Return the size at which the image is decoded.

            The size to which it is resized afterwards is stored.
            """
            nonlocal resized
            short, long = sorted((width, height))
            long_side = int(self.size * long / short)
            resized = (self.size, long_side) if width <= height else (long_side, self.size)
            return resized if self.decode == "scaled" else (width, height)

        whole = sample.image(part, mode="RGB", bits=self.bits, at_least=needed, exif=self.exif)
        image = whole.resize(resized, _BILINEAR, box=whole.info["box"])
        left, upper = (round((side - self.size) / 2) for side in resized)
        return image.crop((left, upper, left + self.size, upper + self.size))


def _pixels(image: Image.Image) -> torch.Tensor:
    """Convert an RGB image to uint8 (3, height, width)."""
    return torch.from_numpy(np.array(np.asarray(image).transpose(2, 0, 1), order="C"))


def _channels_last(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert uint8 (3, height, width) to (height, width, 3)."""
    return np.ascontiguousarray(frame.transpose(1, 2, 0))


def normalized(pixels: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Normalize uint8 (…, 3, height, width) to float32.

    Each channel's `mean` becomes 0, and its `std` becomes 1.

    In a worker, the result is written directly to the memory shared with the trainer.
    """
    centre, spread = (255 * torch.tensor(values, dtype=torch.float32).view(3, 1, 1) for values in (mean, std))
    return torch.sub(pixels, centre, out=empty(pixels.shape, torch.float32)).div_(spread)


def random_box(size: tuple[int, int], scale: tuple[float, float], rng: Rng) -> tuple[int, int, int, int]:
    """Draw a box within an image of this size, with an aspect ratio from 3:4 to 4:3.

    `scale` is the least and the greatest fraction of the area. The result is (left, upper, right, lower). If ten boxes
    in a row do not fit, the result is the largest central box with such an aspect ratio.
    """
    width, height = size
    least_aspect, most_aspect = _ASPECTS
    for _ in range(_TRIES):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(least_aspect), math.log(most_aspect)))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, upper = rng.integers(width - box_width + 1), rng.integers(height - box_height + 1)
            return left, upper, left + box_width, upper + box_height
    box_width, box_height = min(width, round(height * most_aspect)), min(height, round(width / least_aspect))
    left, upper = (width - box_width) // 2, (height - box_height) // 2
    return left, upper, left + box_width, upper + box_height
