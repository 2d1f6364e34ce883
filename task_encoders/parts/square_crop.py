"""`SquareCrop`: images of one square size, cropped at random or in the centre."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torchvision.transforms import v2

from savable_pipeline import IMAGE_PARTS, Sample, empty

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet: red, green, blue, between 0 and 1


@dataclass(frozen=True)
class SquareCrop:
    """One square image of a sample, cropped at random or in the centre.

    Random crops draw from torch's global generator, as torchvision's transforms do: an encoder sets its `global_rng` to
    that of its crop.

    Args:
        size: Width and height of the result, in pixels.
        augment: Crop at random and mirror; if False, take the central square.
        scale: The least and the greatest share of the image's area in a random crop.
        flip: The probability that a random crop is mirrored.
        mean: The mean of red, green and blue in the training data, between 0 and 1; that of ImageNet.
        std: Their standard deviation.

    Raises:
        ValueError: `size` is less than 1.

    Example:
        ```python
        from task_encoders import SquareCrop
        crop = SquareCrop(32, augment=False)
        image = crop.image(next(sp.TarShardReader("shards/", sp.Lane())))
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

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the size of an image is at least 1 pixel, not {self.size}")

    @property
    def global_rng(self) -> bool | tuple[str, ...]:
        """The global generators that a crop draws from."""
        return ("torch",) if self.augment else False

    def image(self, sample: Sample) -> torch.Tensor | None:
        """Crop the first image of a sample.

        Args:
            sample: A sample, with an image part or without.

        Returns:
            uint8 (3, size, size), or None if the sample has no image.

        Raises:
            OSError: The image is damaged.
        """
        part = next((known for known in IMAGE_PARTS if known in sample), None)
        return None if part is None else self._transform(sample.image(part))

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize images: `mean` and `std` of each channel become 0 and 1.

        Args:
            images: uint8 (n, 3, size, size).

        Returns:
            float32 of the same shape.
        """
        return normalized(images, self.mean, self.std)

    def settings(self) -> dict[str, Any]:
        """Every argument, for `TaskEncoder.settings`."""
        own = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"image_size": own.pop("size"), "crop_scale": own.pop("scale"), **own}

    @cached_property
    def _transform(self) -> v2.Compose:
        augmented = [v2.RandomResizedCrop(self.size, scale=self.scale), v2.RandomHorizontalFlip(self.flip)]
        central = [v2.Resize(self.size), v2.CenterCrop(self.size)]
        return v2.Compose([*(augmented if self.augment else central), v2.PILToTensor()])


def normalized(pixels: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Normalize uint8 (n, 3, height, width) to float32: the `mean` and `std` of each channel become 0 and 1.

    In a worker the result is written directly into the memory that the trainer reads.
    """
    centre, spread = (255 * torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return torch.sub(pixels, centre, out=empty(pixels.shape, torch.float32)).div_(spread)
