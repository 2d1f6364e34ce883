"""A photo is turned as EXIF says, wherever it is decoded or measured: as `ImageOps.exif_transpose` turns all of it."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import savable_pipeline as sp
from savable_pipeline.data.dataset import decoding, media_indexing
from savable_pipeline.data.media import media_table
from savable_pipeline.data.media.media_info import MediaInfo
from tests.support.shards import write_tar
from tests.support.toy_samples import sample

ORIENTATION = 0x0112
KINDS = ("jpg", "png", "webp", "tiff")
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "tiff": "TIFF"}
ALL = [
    (kind, orientation) for kind in KINDS for orientation in (range(9) if kind == "jpg" else (0, 3, 5, 8))
]  # 0: none
WIDTH, HEIGHT = 45, 27


def photo(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Another colour everywhere."""
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(
        np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], -1).astype(np.uint8)
    )


def file_of(kind: str, orientation: int, image: Image.Image | None = None, **more: Any) -> bytes:
    """An image file with this orientation; 0: without one."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[ORIENTATION] = orientation
    said: dict[str, Any] = {"exif": exif} if orientation else {}
    (image or photo()).save(file, FORMATS[kind], **said, **more)
    return file.getvalue()


def oracle(data: bytes, mode: str = "RGB") -> Image.Image:
    """What Pillow makes of the whole."""
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).convert(mode)


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def late_exif(orientation: int) -> bytes:
    """A PNG with its EXIF behind the pixels, as some programs write it."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return file_of("png", 0)[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + chunk(b"IEND", b"")


def by_xmp(orientation: int) -> bytes:
    """A JPEG of which XMP says it."""
    xmp = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="{orientation}"/></x:xmpmeta>'
    return file_of("jpg", 0, xmp=xmp.encode())


FILES = {
    **{f"{orientation}.{kind}": file_of(kind, orientation) for kind, orientation in ALL},
    **{f"{orientation}.late.png": late_exif(orientation) for orientation in (3, 6)},
    **{f"{orientation}.xmp.jpg": by_xmp(orientation) for orientation in (2, 8)},
    "6.packed.tiff": file_of("tiff", 6, compression="tiff_lzw"),
    "7.grey.jpg": file_of("jpg", 7, photo().convert("L")),
    "5.palette.png": file_of("png", 5, photo().quantize(8)),
    "8.clear.webp": file_of("webp", 8, photo().convert("RGBA")),
}


def one(name: str) -> sp.Sample:
    """A sample with this file alone."""
    return sample({name.rpartition(".")[2]: FILES[name]})


@pytest.mark.parametrize("name", FILES)
def test_orientation_equals_pillows_with_and_without_simplejpeg(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, wanted = one(name), oracle(FILES[name])
    found, info = part.image(), part.media()
    assert (found.size, found.mode) == ((info.width, info.height), "RGB") == (wanted.size, "RGB")
    assert found.tobytes() == wanted.tobytes()
    assert part.image(mode="L").tobytes() == oracle(FILES[name], "L").tobytes()
    assert ImageOps.exif_transpose(found).tobytes() == wanted.tobytes()  # who turns it himself turns it once
    for _ in range(2):
        pixels = part.decoded()[name.rpartition(".")[2]]
        assert np.array_equal(pixels, np.asarray(wanted))
        assert pixels.flags.writeable and pixels.flags.c_contiguous
        monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)


@pytest.mark.parametrize("name", FILES)
def test_exif_false_does_not_rotate(name: str) -> None:
    part = one(name)
    plain = oracle(file_of(name.rpartition(".")[2], 0)) if name.count(".") == 1 else None
    for found in (part.image(exif=False), Image.fromarray(part.decoded(exif=False)[name.rpartition(".")[2]])):
        assert found.size == (WIDTH, HEIGHT)
        if plain is not None:
            assert found.tobytes() == plain.tobytes()
    cut = part.image(exif=False, box=(3, 4, 20, 21))
    assert cut.tobytes() == part.image(exif=False).crop((3, 4, 20, 21)).tobytes()


@pytest.mark.parametrize("name", FILES)
def test_boxes_refer_to_the_rotated_image(name: str) -> None:
    part, whole = one(name), oracle(FILES[name])
    asked = []
    found = part.image(box=lambda *full: asked.append(full) or (2, 5, 20.5, 26))  # type: ignore[func-returns-value]
    assert asked == [whole.size]
    assert found.tobytes() == whole.crop((2, 5, 21, 26)).tobytes()
    assert found.info["box"] == (0, 0, 18.5, 21)
    width, height = whole.size
    assert part.image(box=(0, 0, *whole.size)).tobytes() == whole.tobytes()
    with pytest.raises(ValueError, match=rf"exceeds the image of {width} × {height} pixels"):
        part.image(box=(0, 0, width + 1, height))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(1001, 701), (800, 640)])
def test_scaled_photo_is_rotated_after_scaling(orientation: int, size: tuple[int, int]) -> None:
    data = file_of("jpg", orientation, photo(*size))
    part, (width, height) = sample(jpg=data), oracle(data).size
    asked = []
    found = part.image(at_least=lambda *full: asked.append(full) or (full[0] / 4, full[1] / 4))  # type: ignore[func-returns-value]
    assert asked == [(width, height)]
    with Image.open(io.BytesIO(data)) as scaled:
        scaled.draft("RGB", (size[0] // 4, size[1] // 4))
        assert found.tobytes() == ImageOps.exif_transpose(scaled).tobytes()
    left, upper, right, lower = found.info["box"]
    assert (right - left, lower - upper) == (width / 4, height / 4)
    assert {left, found.width - right} | {upper, found.height - lower} <= {0, 0.75}  # where the last pixels are halves
    cut = part.image(at_least=(20, 15), box=(101, 61, 502, 363))
    near, exact = (
        np.asarray(each.resize((20, 15), Image.Resampling.BILINEAR, box=each.info.get("box", (101, 61, 502, 363))))
        for each in (cut, oracle(data))
    )
    assert cut.width * cut.height < 60 * 60
    assert np.abs(near.astype(float) - exact).mean() < 4


def test_media_table_has_rotated_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = enumerate(FILES.items())
    write_tar(tmp_path / "0.tar", [(f"s{i:02d}.{name.rpartition('.')[2]}", data) for i, (name, data) in numbered])
    read = [each.media() for each in sp.open_dataset(tmp_path)]
    _, faults = media_indexing.index_media(tmp_path)
    assert not faults.count
    monkeypatch.setattr(media_table, "media_info", None)  # no header is read now
    found = [each.media() for each in sp.open_dataset(tmp_path)]
    assert found == read == [MediaInfo(width=w, height=h) for w, h in (oracle(data).size for data in FILES.values())]


def test_media_table_of_unrotated_sizes_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was made before photos were turned."""
    write_tar(tmp_path / "0.tar", [("a.jpg", file_of("jpg", 6))])
    with monkeypatch.context() as earlier:
        for module in (media_indexing, media_table):
            earlier.setattr(module, "KIND", "media")
        media_indexing.index_media(tmp_path)
    with pytest.raises(sp.ShardError, match=r"is of media files, .*Run `savable index --media`, or remove"):
        sp.open_dataset(tmp_path)[0].media()
    media_indexing.index_media(tmp_path)
    assert sp.open_dataset(tmp_path)[0].media().width == HEIGHT


def test_image_with_unreadable_exif_is_not_rotated() -> None:
    for exif in (b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0garbage!"):
        file = io.BytesIO()
        photo().save(file, "JPEG", exif=exif)
        assert sample(jpg=file.getvalue()).image().size == (WIDTH, HEIGHT)
    odd = file_of("jpg", 9)  # there is none of this number
    assert sample(jpg=odd).image().size == (WIDTH, HEIGHT)
