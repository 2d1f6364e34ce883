"""Images of more than 8 bits a channel: gray ones keep all; 8 bits are made of 16 by v >> 8, and only if asked for.

The oracle is FFmpeg: `ffmpeg -i FILE -pix_fmt gray16le -f rawvideo -` (or rgb48le) has the numbers of the file.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from savable_pipeline.data.media.video import ImageFrames, Video
from savable_pipeline.errors import MediaError
from tests.support.toy_samples import sample

GRAY = np.random.default_rng(7).integers(0, 1 << 16, (6, 5), np.uint16)
COLOURS = np.random.default_rng(8).integers(0, 1 << 16, (6, 5, 3), np.uint16)


def deep_png(values: NDArray[np.uint16], colour: int) -> bytes:
    """A PNG of 16 bits per channel: of gray (0) or colours (2), which Pillow cannot write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = values.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    )


def written(values: NDArray[Any], kind: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind, **settings)
    return file.getvalue()


GRAY_FILES = {
    "png": deep_png(GRAY, 0),
    "tiff": written(GRAY, "TIFF", compression="tiff_lzw"),
    "tif": written(GRAY.astype(">u2"), "TIFF"),
    "pgm": written(GRAY, "PPM"),
}


def by_ffmpeg(data: bytes, pixels: str) -> NDArray[np.uint16]:
    with av.open(io.BytesIO(data)) as file:
        found: NDArray[np.uint16] = next(file.decode(video=0)).to_ndarray(format=pixels)
        return found


@pytest.mark.parametrize("part", GRAY_FILES)
def test_gray_image_of_16_bits_keeps_all_bits(part: str) -> None:
    one, numbers = sample({part: GRAY_FILES[part]}), by_ffmpeg(GRAY_FILES[part], "gray16le")
    assert np.array_equal(numbers, GRAY)
    assert np.array_equal(one.image(), numbers)
    assert np.asarray(one.image()).dtype.byteorder in "=|"
    decoded = one.decoded()[part]
    assert decoded.shape == (6, 5) and np.array_equal(decoded, numbers)
    region = one.image(box=(1, 2, 4, 5))
    assert np.array_equal(region, numbers[2:5, 1:4])


@pytest.mark.parametrize("part", GRAY_FILES)
def test_conversion_of_16_to_8_bits_is_rejected_unless_requested(part: str) -> None:
    one, numbers = sample({part: GRAY_FILES[part]}), by_ffmpeg(GRAY_FILES[part], "gray16le")
    for refused in (lambda: one.image(mode="RGB"), lambda: one.image(mode="L", box=(0, 0, 2, 2))):
        with pytest.raises(ValueError, match=r"16 bits per channel. Pass bits=8 for v >> 8"):
            refused()
    image = one.image(bits=8)
    assert image.mode == "RGB" and np.array_equal(image, np.repeat((numbers >> 8)[..., None], 3, 2))
    assert np.array_equal(one.image(mode="L", bits=8, at_least=(5, 6)), numbers >> 8)
    assert np.array_equal(one.image(mode="F"), numbers.astype(np.float32))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (GRAY / np.float32(65535), "floats, which 8 bits cannot hold"),
        (GRAY.astype(np.int32) + 70_000, "32 bits per channel"),
        (-GRAY.astype(np.int32), "32 bits per channel"),
    ],
)
def test_float_and_32_bit_images_are_never_converted_to_8_bits(values: NDArray[Any], why: str) -> None:
    one = sample(tiff=written(values, "TIFF"))
    assert np.array_equal(one.image(), values) and np.array_equal(one.decoded()["tiff"], values)
    for settings in ({"mode": "RGB"}, {"mode": "L"}, {"bits": 8}, {"mode": "RGB", "bits": 8}):
        with pytest.raises(ValueError, match=why):
            one.image(**settings)


def test_color_images_of_16_bits_are_rejected_without_bits_8() -> None:
    data = deep_png(COLOURS, 2)
    one = sample(png=data)
    for refused in (one.image, one.decoded, lambda: one.image(mode="RGBA")):
        with pytest.raises(ValueError, match="Pass bits=8 for v >> 8"):
            refused()
    assert np.array_equal(one.image(bits=8), by_ffmpeg(data, "rgb48le") >> 8)
    for highest, is_deep in ((65535, True), (1023, True), (255, False), (100, False)):
        values = np.minimum(COLOURS, highest).astype(">u2" if highest > 255 else np.uint8)
        one = sample(ppm=b"P6 5 6 %d\n" % highest + values.tobytes())
        if is_deep:
            with pytest.raises(ValueError, match="colours of 16 bits in PPM, which 8 bits cannot hold"):
                one.image(bits=8)
        else:
            assert one.image().mode == "RGB"


def test_other_bits_than_8_are_a_wrong_argument() -> None:
    with pytest.raises(ValueError, match=r"bits=16\. Pass 8"):
        sample(png=GRAY_FILES["png"]).image(bits=16)


def test_deep_frames_of_a_video_or_of_images_are_rejected() -> None:
    """As depth maps are saved by LeRobot, as gray12le or as PNG of 16 bits."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as made:
        stream = made.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "gray16le"
        made.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64), np.uint16), "gray16le")))
        made.mux(stream.encode())
    file.seek(0)
    with Video(file, "the part") as video, pytest.raises(MediaError, match="gray16le has over 8 bits"):
        video.frames([0.0])
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made_archive:
        made_archive.writestr("000000.png", GRAY_FILES["png"])
    with ImageFrames(archive, "the part") as images, pytest.raises(MediaError, match=r"frame 0 .*16 bits per channel"):
        images.frames([0.0])
