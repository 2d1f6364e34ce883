"""simplejpeg, where it is installed, gives the arrays and the errors of Pillow, and decodes no other images."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from savable_pipeline.data.dataset import decoding as module
from savable_pipeline.data.dataset.decoding import decoded_part, jpeg_pixels
from savable_pipeline.data.shards.part_types import open_image

CHANNELS = {"RGB": 3, "L": 1, "CMYK": 4}


def jpeg(mode: str, width: int, height: int, **how: Any) -> bytes:
    """Noise, enlarged so that all frequencies are in it."""
    size = (height // 4 + 2, width // 4 + 2, CHANNELS[mode])
    noise = np.random.default_rng(width).integers(0, 256, size, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise.squeeze(), mode).resize((width, height)).save(file, "JPEG", **how)
    return file.getvalue()


def by_pillow(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def by_simplejpeg(data: bytes) -> Any:
    return jpeg_pixels(open_image(data), data)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize(
    ("quality", "how"), [(75, {}), (1, {"progressive": True}), (100, {"restart_marker_blocks": 3})], ids=str
)
def test_pixels_are_those_of_pillow_to_the_bit(mode: str, quality: int, subsampling: int, how: dict[str, Any]) -> None:
    for size in ((1, 1), (7, 5), (17, 33), (64, 48), (333, 250)):
        data = jpeg(mode, *size, quality=quality, subsampling=subsampling, **how)
        assert np.array_equal(by_simplejpeg(data), by_pillow(data))
        assert np.array_equal(decoded_part("jpg", data), by_pillow(data))
        assert decoded_part("jpg", data).flags.writeable


def test_a_jpeg_of_red_green_and_blue_has_the_same_pixels_too() -> None:
    data = jpeg("RGB", 40, 30, keep_rgb=True)
    assert np.array_equal(by_simplejpeg(data), by_pillow(data))


def test_damaged_jpegs_become_or_raise_the_same_with_and_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    damaged = [damage(jpeg("RGB", 64, 48, subsampling=draw.choice((0, 2))), draw) for _ in range(100)]
    found = [outcome(data) for data in damaged]
    monkeypatch.setattr(module, "_simplejpeg", lambda: None)
    assert found == [outcome(data) for data in damaged]
    errors = sum(isinstance(each, str) for each in found)
    assert 15 < errors < 85  # of both kinds enough


def damage(data: bytes, draw: random.Random) -> bytes:
    """Some bits turned over, the end cut off, or something behind it."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        changed[draw.randrange(2, len(changed))] ^= 1 << draw.randrange(8)
    cut = draw.choice((len(changed), len(changed), draw.randrange(20, len(changed))))
    return bytes(changed[:cut]) + bytes(draw.randrange(3))


def outcome(data: bytes) -> Any:
    """The pixels, or the error."""
    try:
        return decoded_part("jpg", data).tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", ["CMYK", "cut", "MPO", "PNG"])
def test_what_is_not_a_plain_whole_jpeg_is_left_to_pillow(kind: str) -> None:
    plain = jpeg("RGB", 64, 48)
    file = io.BytesIO()
    if kind in ("MPO", "PNG"):
        more = {"save_all": True, "append_images": [Image.new("RGB", (9, 9))]} if kind == "MPO" else {}
        Image.open(io.BytesIO(plain)).save(file, kind, **more)
    data = {"CMYK": jpeg("CMYK", 64, 48), "cut": plain[:-200]}.get(kind) or file.getvalue()
    assert by_simplejpeg(data) is None


def test_without_it_the_same_arrays_come_from_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg("RGB", 64, 48)
    assert by_simplejpeg(data) is not None
    monkeypatch.setattr(module, "_simplejpeg", lambda: None)
    assert by_simplejpeg(data) is None
    assert np.array_equal(decoded_part("jpg", data), by_pillow(data))
