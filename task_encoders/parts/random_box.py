"""Random boxes in an image, of any size and nearly any aspect, as Inception was trained (Szegedy et al., 2014)."""

from __future__ import annotations

import math

from savable_pipeline import Rng

_ASPECTS = (3 / 4, 4 / 3)  # the least and the greatest width / height
_TRIES = 10


def random_box(size: tuple[int, int], scale: tuple[float, float], rng: Rng) -> tuple[int, int, int, int]:
    """A box within an image of this width and height, at an aspect from 3:4 to 4:3; `scale`: its share of the area.

    Where ten in turn do not fit, it is the largest central box of such an aspect. What is drawn has the number 2 in
    `SquareCrop.draws`.
    """
    width, height = size
    for _ in range(_TRIES):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(_ASPECTS[0]), math.log(_ASPECTS[1])))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            left, upper = rng.integers(width - across + 1), rng.integers(height - down + 1)
            return left, upper, left + across, upper + down
    across, down = min(width, round(height * _ASPECTS[1])), min(height, round(width / _ASPECTS[0]))
    left, upper = (width - across) // 2, (height - down) // 2
    return left, upper, left + across, upper + down
