"""Images with alpha lie over a background, in every mode in which alpha comes."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

import savable_pipeline as sp
from savable_pipeline.data.dataset.decoding import converted
from savable_pipeline.tools.preview.image_entries import thumbnail_of_file
from tests.conftest import write_tar

RED = (200, 0, 0)


def half_clear(mode: str) -> Image.Image:
    """4 × 2 pixels, red on the left; on the right clear, with black under it."""
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    image.paste((*RED, 255), (0, 0, 2, 2))
    if mode == "P":
        paletted = image.convert("RGB").quantize(2)
        paletted.info["transparency"] = paletted.getpixel((3, 0))
        return paletted
    if mode == "RGB":
        plain = image.convert("RGB")
        plain.info["transparency"] = (0, 0, 0)
        return plain
    return image.convert(mode)


def sample_of(tmp_path: Any, image: Image.Image) -> sp.Sample:
    data = io.BytesIO()
    image.save(data, "PNG", **({"transparency": image.info["transparency"]} if image.info else {}))
    write_tar(tmp_path / "x.tar", [("k.png", data.getvalue())])
    return next(sp.TarShardReader(tmp_path / "x.tar", sp.Lane()))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
@pytest.mark.parametrize(
    ("background", "right"), [(None, (255, 255, 255)), ((0, 0, 9), (0, 0, 9)), ("lime", (0, 255, 0))]
)
def test_what_is_clear_shows_the_background(tmp_path: Any, mode: str, background: Any, right: Any) -> None:
    sample = sample_of(tmp_path, half_clear(mode))
    found = sample.image() if background is None else sample.image(background=background)
    left = RED if mode != "LA" else (60, 60, 60)
    assert found.mode == "RGB" and [found.getpixel((x, 0)) for x in range(4)] == [left, left, right, right]


def test_a_mode_with_alpha_keeps_it_and_half_clear_is_mixed(tmp_path: Any) -> None:
    sample = sample_of(tmp_path, Image.new("RGBA", (1, 1), (0, 0, 0, 51)))
    assert sample.image(mode="RGBA").getpixel((0, 0)) == (0, 0, 0, 51)
    assert sample.image().getpixel((0, 0)) == (204, 204, 204)
    assert sample.image(mode="L").getpixel((0, 0)) == 204


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "I;16"])
def test_an_image_without_alpha_is_converted_as_before(tmp_path: Any, mode: str) -> None:
    drawn = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
    image = Image.fromarray(drawn.astype(np.uint16) if mode == "I;16" else drawn)
    image = image if mode == "I;16" else image.convert(mode)
    sample = sample_of(tmp_path, image)
    assert sample.image().tobytes() == Image.open(io.BytesIO(sample["png"])).convert("RGB").tobytes()


def test_a_preview_shows_the_same(tmp_path: Any) -> None:
    sample = sample_of(tmp_path, half_clear("RGBA"))
    thumbnail, about = thumbnail_of_file(sample["png"])
    assert about == "4 × 2 PNG RGBA, with alpha, on white"
    shown = Image.open(io.BytesIO(base64.b64decode(thumbnail.uri.partition(",")[2]))).convert("RGB")
    assert shown.tobytes() == sample.image().tobytes()


def test_an_image_that_has_the_mode_already_is_decoded_and_not_copied() -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 2), RED).save(file, "JPEG")
    opened = Image.open(file)
    assert converted(opened, "RGB", "white") is opened
    assert converted(opened, "L", "white").mode == "L"
