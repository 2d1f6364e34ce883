"""`draw_difference`: two images that should be equal, and their difference, side by side in a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from savable_pipeline.stages.batch_difference import Difference

_GAP = 4  # white columns between two images
_MIN_SIDE = 4  # pixels: smaller arrays are taken for no images


def draw_difference(difference: Difference, path: Path) -> bool:
    """Write a PNG of the expected image, the found one and their absolute difference; False if they are no images.

    An image is a tensor or array (channels, height, width) or (height, width, channels) with 1, 3 or 4 channels, or one
    row of a batch of such. Floats are scaled from black at the least value of both images to white at the greatest, the
    difference so that its greatest value is white.
    """
    if difference.parts is None:
        return False
    pair = [_image(part, difference.row) for part in difference.parts]
    if pair[0] is None or pair[1] is None or pair[0].shape != pair[1].shape:
        return False
    expected, found = (np.nan_to_num(image.astype(np.float64)) for image in pair if image is not None)
    apart = np.abs(expected - found)
    low, high = (0.0, 255.0) if pair[0].dtype == np.uint8 else _range(np.stack([expected, found]))
    shown = [_bytes(expected, low, high), _bytes(found, low, high), _bytes(apart, 0.0, float(apart.max()))]
    gap = np.full((expected.shape[0], _GAP, 3), 255, np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate([shown[0], gap, shown[1], gap, shown[2]], axis=1)).save(path, "PNG")
    return True


def _image(part: Any, row: int | None) -> NDArray[Any] | None:
    """The image as an array (height, width, channels); None if `part` is no image."""
    if not hasattr(part, "shape"):
        return None
    if len(part.shape) == 4 and row is not None:
        part = part[row]
    if len(part.shape) != 3:
        return None
    if not isinstance(part, np.ndarray):
        part = part.detach().cpu()
        part = (part.float() if part.is_floating_point() else part).numpy()
    array = np.asarray(part)
    if array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.shape[-1] not in (1, 3, 4) or min(array.shape[:2]) < _MIN_SIDE or array.dtype.kind not in "fiu":
        return None
    return array[..., :3]


def _range(images: NDArray[np.float64]) -> tuple[float, float]:
    return float(images.min()), float(images.max())


def _bytes(image: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """The image as uint8 (height, width, 3), with `low` as black and `high` as white."""
    scaled = (image - low) * (255.0 / (high - low)) if high > low else np.zeros_like(image)
    return np.broadcast_to(np.clip(np.rint(scaled), 0, 255).astype(np.uint8), (*image.shape[:2], 3))
