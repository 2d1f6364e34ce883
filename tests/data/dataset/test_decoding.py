"""Parts decoded by their extension: what each becomes, and what is refused.

simplejpeg, where it is installed, gives the arrays and the errors of Pillow, and decodes no other images. Images with
alpha lie over a background, in every mode in which alpha comes.
"""

from __future__ import annotations

import base64
import gzip
import io
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

import savable_pipeline as sp
from savable_pipeline.data.dataset import decoding as module
from savable_pipeline.data.dataset.decoding import convert_image, decode_part, decompress_part, jpeg_pixels
from savable_pipeline.data.shards.part_types import open_image
from savable_pipeline.tools.preview.image_entries import thumbnail_of_file
from tests.conftest import write_tar
from tests.support.toy_samples import plain_png, sample


def saved(array: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


def test_text_starts_after_a_byte_order_mark() -> None:
    """As Python's own "utf-8-sig" reads it; a mark further on is a character."""
    text = "\ufeffgrößer \ufeff."
    marked = sample(txt=text.encode("utf-8-sig"), srt="1\n".encode("utf-8-sig"), json="[1]".encode("utf-8-sig"))
    assert marked.text() == text and sample(txt=text.encode()).text() == text[1:] == "größer \ufeff."
    assert (marked.decoded()["txt"], marked.text("srt"), marked.json()) == (text, "1\n", [1])
    assert marked["txt"].startswith(b"\xef\xbb\xbf")


def test_each_part_is_decoded_by_the_last_word_of_its_extension() -> None:
    archive = io.BytesIO()
    np.savez_compressed(archive, a=np.arange(3), b=np.eye(2))
    parts = {
        "json": b'{"id": [1, null]}',
        "txt": "größer".encode(),
        "seg.PNG": plain_png(3, 2, shade=9),
        "latent.npy": saved(np.arange(6, dtype=np.float16).reshape(2, 3)),
        "more.npz": archive.getvalue(),
        "pkl": pickle.dumps([1]),
        "mp3": b"\x00\xff",
    }
    found = sample(parts).decoded()
    assert list(found) == ["__key__", *parts]
    assert (found["__key__"], found["json"], found["txt"]) == ("a", {"id": [1, None]}, "größer")
    assert found["seg.PNG"].tolist() == [[[9, 9, 9]] * 3] * 2
    assert found["seg.PNG"].flags.writeable
    assert found["latent.npy"].dtype == np.float16
    assert found["latent.npy"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert {name: array.tolist() for name, array in found["more.npz"].items()} == {
        "a": [0, 1, 2],
        "b": [[1, 0], [0, 1]],
    }
    assert (found["pkl"], found["mp3"]) == (parts["pkl"], parts["mp3"])  # bytes: never unpickled


@settings(max_examples=settings.default.max_examples // 5)
@given(hnp.arrays(st.sampled_from(["<i8", ">f4", "?", "<U3", "u1,<f8"]), hnp.array_shapes(min_dims=0, min_side=0)))
def test_arrays_equal_those_numpy_reads(array: Any) -> None:
    for raw in (saved(array), saved(np.asfortranarray(array))):
        found, expected = decode_part("npy", raw), np.load(io.BytesIO(raw))
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()
        assert found.shape == expected.shape
        assert found.flags.writeable


class Trap:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def test_object_arrays_are_rejected_and_not_unpickled() -> None:
    raw = saved(np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects, which are never unpickled"):
        decode_part("npy", raw)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.npy", raw)
    with pytest.raises(ValueError, match="Python objects"):
        decode_part("npz", archive.getvalue())


def test_array_header_with_too_large_a_shape_allocates_nothing() -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})
    with pytest.raises(ValueError, match=r"8 bytes for shape \(1125899906842624,\) of float64"):
        decode_part("npy", header.getvalue() + bytes(8))


def test_archive_that_decompresses_to_too_much_is_rejected() -> None:
    archive = io.BytesIO()
    np.savez_compressed(archive, a=np.zeros(2000))
    with pytest.raises(ValueError, match="more than 10,000"):
        decode_part("npz", archive.getvalue(), 10_000)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archive_of_a_non_streaming_compression_is_rejected(kind: int) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", kind) as file:
        file.writestr("a.npy", saved(np.zeros(2000)))
    with pytest.raises(ValueError, match="npz file with overlapping arrays or unknown compression"):
        decode_part("npz", archive.getvalue())


@pytest.mark.parametrize(("extension", "data"), [("json", b"{"), ("txt", b"\xff"), ("png", b"x"), ("npy", b"x")])
def test_malformed_parts_are_errors(extension: str, data: bytes) -> None:
    with pytest.raises((ValueError, OSError)):
        decode_part(extension, data)


def test_default_encoder_returns_lists_with_none_for_missing_parts() -> None:
    encoder, rng = sp.Decoded(), sp.Rng(0)
    items = [encoder.encode(sample({"txt": "a"}), rng), encoder.encode(sample({"txt": "b", "json": {"x": 1}}), rng)]
    assert encoder.batch(items, rng) == {"__key__": ["a", "a"], "txt": ["a", "b"], "json": [None, {"x": 1}]}


def test_compressed_part_is_read_as_text_or_json_by_its_extension(tmp_path: Path) -> None:
    packed = gzip.compress("ü".encode()) + gzip.compress(b"!")
    parts = [("a.txt.gz", packed), ("a.JSON.GZ", gzip.compress(b'{"id": 1}')), ("a.cut.gz", packed[:-9])]
    write_tar(tmp_path / "a.tar", [*parts, ("a.no.gz", b"text")])
    sample = next(sp.TarShardReader(tmp_path, sp.Lane()))
    assert (sample.text("txt.gz"), sample.json("json.gz"), sample["txt.gz"]) == ("ü!", {"id": 1}, packed)
    for part, told in (
        ("cut.gz", "cannot be decompressed: its compressed data are cut short"),
        ("no.gz", "cannot be decompressed"),
    ):
        with pytest.raises(ValueError, match=f"the part {part} {told}"):
            sample.text(part)


def test_compressed_part_is_limited_in_size() -> None:
    assert len(decompress_part("txt.gz", gzip.compress(bytes(600)) + gzip.compress(bytes(400)), 1000)) == 1000
    with pytest.raises(ValueError, match=r"txt\.gz cannot be decompressed: more than 1000 bytes when decompressed"):
        decompress_part("txt.gz", gzip.compress(bytes(600)) + gzip.compress(bytes(401)), 1000)


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
def test_pixels_equal_pillows_bit_for_bit(mode: str, quality: int, subsampling: int, how: dict[str, Any]) -> None:
    for size in ((1, 1), (7, 5), (17, 33), (64, 48), (333, 250)):
        data = jpeg(mode, *size, quality=quality, subsampling=subsampling, **how)
        assert np.array_equal(by_simplejpeg(data), by_pillow(data))
        assert np.array_equal(decode_part("jpg", data), by_pillow(data))
        assert decode_part("jpg", data).flags.writeable


def test_jpeg_stored_as_rgb_has_pillows_pixels() -> None:
    data = jpeg("RGB", 40, 30, keep_rgb=True)
    assert np.array_equal(by_simplejpeg(data), by_pillow(data))


def test_damaged_jpegs_decode_or_raise_equally_with_and_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
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
        return decode_part("jpg", data).tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", ["CMYK", "cut", "MPO", "PNG"])
def test_only_plain_complete_jpegs_use_simplejpeg(kind: str) -> None:
    plain = jpeg("RGB", 64, 48)
    file = io.BytesIO()
    if kind in ("MPO", "PNG"):
        more = {"save_all": True, "append_images": [Image.new("RGB", (9, 9))]} if kind == "MPO" else {}
        Image.open(io.BytesIO(plain)).save(file, kind, **more)
    data = {"CMYK": jpeg("CMYK", 64, 48), "cut": plain[:-200]}.get(kind) or file.getvalue()
    assert by_simplejpeg(data) is None


def test_without_simplejpeg_pillow_returns_equal_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg("RGB", 64, 48)
    assert by_simplejpeg(data) is not None
    monkeypatch.setattr(module, "_simplejpeg", lambda: None)
    assert by_simplejpeg(data) is None
    assert np.array_equal(decode_part("jpg", data), by_pillow(data))


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
def test_transparent_pixels_show_the_background(tmp_path: Any, mode: str, background: Any, right: Any) -> None:
    sample = sample_of(tmp_path, half_clear(mode))
    found = sample.image() if background is None else sample.image(background=background)
    left = RED if mode != "LA" else (60, 60, 60)
    assert found.mode == "RGB" and [found.getpixel((x, 0)) for x in range(4)] == [left, left, right, right]


def test_alpha_modes_keep_alpha_and_translucent_pixels_are_blended(tmp_path: Any) -> None:
    sample = sample_of(tmp_path, Image.new("RGBA", (1, 1), (0, 0, 0, 51)))
    assert sample.image(mode="RGBA").getpixel((0, 0)) == (0, 0, 0, 51)
    assert sample.image().getpixel((0, 0)) == (204, 204, 204)
    assert sample.image(mode="L").getpixel((0, 0)) == 204


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_an_image_without_alpha_is_converted_as_before(tmp_path: Any, mode: str) -> None:
    drawn = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
    sample = sample_of(tmp_path, Image.fromarray(drawn).convert(mode))
    assert sample.image().tobytes() == Image.open(io.BytesIO(sample["png"])).convert("RGB").tobytes()


def test_preview_shows_the_same_background(tmp_path: Any) -> None:
    sample = sample_of(tmp_path, half_clear("RGBA"))
    thumbnail, about = thumbnail_of_file(sample["png"])
    assert about == "4 × 2 PNG RGBA, with alpha, on white"
    shown = Image.open(io.BytesIO(base64.b64decode(thumbnail.uri.partition(",")[2]))).convert("RGB")
    assert shown.tobytes() == sample.image().tobytes()


def test_an_image_that_has_the_mode_already_is_decoded_and_not_copied() -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 2), RED).save(file, "JPEG")
    opened = Image.open(file)
    assert convert_image(opened, "RGB", "white") is opened
    assert convert_image(opened, "L", "white").mode == "L"
