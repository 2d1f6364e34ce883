"""The picture of two images that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from savable_pipeline.stages.batch_difference import find_difference
from savable_pipeline.tools.verify.segment import draw_difference


def drawn_difference(path: Path, expected: Any, found: Any) -> Any:
    """Draw the difference of two arrays, and return the image."""
    difference = find_difference({"image": expected}, {"image": found})
    assert difference is not None
    if not draw_difference(difference, path):
        return None
    with Image.open(path) as image:
        return np.asarray(image)


def test_image_shows_expected_found_and_their_difference(tmp_path: Path) -> None:
    expected = torch.full((2, 3, 4, 5), 10, dtype=torch.uint8)
    found = expected.clone()
    found[1, :, 2, 3] = 14
    shown = drawn_difference(tmp_path / "a.png", expected, found)
    assert shown.shape == (4, 5 + 4 + 5 + 4 + 5, 3)
    assert (shown[:, :5] == 10).all() and (shown[:, 5:9] == 255).all()
    assert shown[2, 9 + 3].tolist() == [14, 14, 14] and (shown[:, 9:14] == 10).sum() == 3 * (4 * 5 - 1)
    assert shown[2, 18 + 3].tolist() == [255, 255, 255] and (shown[:, 18:] == 0).sum() == 3 * (4 * 5 - 1)


def test_floats_are_scaled_to_the_range_of_both_and_gray_is_shown(tmp_path: Path) -> None:
    expected = np.full((5, 5, 1), -1.0)
    found = expected.copy()
    found[0, 0] = 3.0
    shown = drawn_difference(tmp_path / "a.png", expected, found)
    assert shown[0, 0].tolist() == [0, 0, 0] and shown[0, 5 + 4].tolist() == [255, 255, 255]
    assert (
        drawn_difference(tmp_path / "b.png", *(torch.tensor(x).to(torch.bfloat16) for x in (expected, found)))
        is not None
    )


@pytest.mark.parametrize("shape", [(5,), (5, 7), (2, 2, 2), (3, 2, 9), (2, 5, 6, 7)])
def test_array_that_is_not_an_image_is_not_drawn(tmp_path: Path, shape: tuple[int, ...]) -> None:
    assert drawn_difference(tmp_path / "a.png", torch.zeros(shape), torch.ones(shape)) is None
    assert not (tmp_path / "a.png").exists()
    assert drawn_difference(tmp_path / "a.png", torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)) is None
