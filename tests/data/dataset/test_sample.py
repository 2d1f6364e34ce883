"""A sample: a mapping from extension to bytes, read when asked for, decoded when told; its media in their place."""

from __future__ import annotations

import builtins
import copy
import errno
import gc
import io
import json
import pickle
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from PIL import EpsImagePlugin, Image, UnidentifiedImageError

import savable_pipeline as sp
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF, Ref
from savable_pipeline.data.dataset.sample import Sample, decoded_json
from savable_pipeline.data.shards.part_types import IMAGE_PARTS, decode_error
from savable_pipeline.errors import MediaError, RemoteError
from tests.conftest import write_tar
from tests.support.media_files import audio_bytes, frame_number, video_bytes
from tests.support.toy_samples import sample as sample_of


def png(mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (3, 2), 0 if mode != "RGB" else (10, 20, 30)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    members = [("k.PNG", png()), ("k.json", b'{"a": [1, "\xc3\xa9"]}'), ("k.seg.txt", b"no"), ("k.txt", "é".encode())]
    write_tar(tmp_path / "a.tar", [("before.txt", b"1"), *members])
    return open_any(tmp_path).open_samples(np.array([(1, 2)], REF))[0]


def test_sample_is_a_mapping_from_extension_to_bytes(sample: Sample) -> None:
    assert isinstance(sample, Mapping)
    assert list(sample) == sample.keys() == ["PNG", "json", "seg.txt", "txt"]
    assert len(sample) == 4
    assert sample["txt"] == "é".encode()
    assert sample.values() == [sample[extension] for extension in sample]
    assert dict(sample) == dict(sample.items())


def test_part_lookup_ignores_case(sample: Sample) -> None:
    assert sample["png"] == sample["PNG"] == sample["Png"] == png()
    assert sample["SEG.txt"] == b"no"
    assert "png" in sample and "TXT" in sample and "jpg" not in sample


def test_exact_match_wins_among_parts_that_differ_in_case(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"small"), ("k.TXT", b"large")])
    sample = open_any(tmp_path).open_samples(np.array([(0, 0)], REF))[0]
    assert (sample["txt"], sample["TXT"]) == (b"small", b"large")


def test_missing_part_is_a_key_error_that_lists_the_parts(sample: Sample) -> None:
    with pytest.raises(KeyError, match=r"no part 'jpg'; the sample has PNG, json, seg\.txt, txt"):
        sample["jpg"]
    assert sample.get("jpg") is None
    assert sample.get("jpg", b"x") == b"x"
    assert sample.get("TXT") == "é".encode()


def test_usual_parts_are_decoded(sample: Sample) -> None:
    assert sample.json() == {"a": [1, "é"]}
    assert sample.text() == "é"
    assert sample.text("seg.txt") == "no"
    image = sample.image()
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (3, 2), (10, 20, 30))
    assert sample.image("png", mode="L").mode == "L"


@pytest.mark.parametrize("extension", IMAGE_PARTS)
def test_every_image_part_is_found_and_decoded(tmp_path: Path, extension: str) -> None:
    write_tar(tmp_path / "a.tar", [(f"k.{extension}", image_file(extension))])
    sample = open_any(tmp_path).open_samples(np.array([(0, 0)], REF))[0]
    assert sample.image(mode="L").size == (3, 2)
    assert not decode_error(extension, sample[extension])
    assert decode_error(extension, sample[extension][:8]).startswith("unreadable image")


def image_file(extension: str) -> bytes:
    """A grey or black-and-white image of 3 by 2 pixels, in the format of this extension."""
    file = io.BytesIO()
    kind = {"jpg": "jpeg", "tif": "tiff", "pgm": "ppm", "pbm": "ppm"}.get(extension, extension)
    Image.new("1" if extension == "pbm" else "L", (3, 2)).save(file, kind)
    return file.getvalue()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n"


def test_damaged_jpeg_is_reported_like_by_a_full_decode() -> None:
    draw = random.Random(0)
    told = []
    for trial in range(90):
        file = io.BytesIO()
        noise = Image.frombytes("RGB", (24, 24), draw.randbytes(24 * 24 * 3)).resize((70 + trial % 9, 50))
        noise.save(file, "JPEG", quality=draw.choice([30, 95]), progressive=bool(trial % 2))
        damaged = bytearray(file.getvalue())
        if trial % 3:
            del damaged[draw.randrange(len(damaged)) :]
        for _ in range(draw.randrange(5)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        whole = ""
        try:
            with Image.open(io.BytesIO(damaged)) as image:
                image.load()
        except Exception as error:  # of any type, for damaged data
            whole = str(error)
        told.append(decode_error("jpg", bytes(damaged)))
        assert bool(told[-1]) == bool(whole), (trial, whole)
    assert 30 < sum(map(bool, told)) < 75


@pytest.mark.parametrize("extension", ["jpg", "png", "eps", "bin"])
def test_postscript_never_reaches_another_program(
    tmp_path: Path, extension: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: reached.append(extension))
    write_tar(tmp_path / "a.tar", [(f"k.{extension}", POSTSCRIPT)])
    sample = open_any(tmp_path).open_samples(np.array([(0, 0)], REF))[0]
    with pytest.raises(UnidentifiedImageError, match=r"69 bytes: not an image of JPEG, PNG, "):
        sample.image(extension)
    assert decode_error("jpg", POSTSCRIPT) == "unreadable image: not JPEG, PNG, WebP, GIF, BMP, TIFF or PPM"
    assert not reached


def test_image_bomb_of_a_few_kilobytes_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program has switched Pillow's limit off."""
    file = io.BytesIO()
    Image.new("1", (14_000, 13_000)).save(file, "png")
    write_tar(tmp_path / "a.tar", [("k.png", file.getvalue())])
    sample = open_any(tmp_path).open_samples(np.array([(0, 0)], REF))[0]
    for limit in (Image.MAX_IMAGE_PIXELS, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(Image.DecompressionBombError):
            sample.image()
        assert decode_error("png", sample["png"]).startswith("unreadable image: ")


def test_a_part_of_another_format_is_decoded_when_it_is_named(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("L", (3, 2)).save(file, "tga")
    write_tar(tmp_path / "a.tar", [("k.tga", file.getvalue())])
    sample = open_any(tmp_path).open_samples(np.array([(0, 0)], REF))[0]
    assert sample.image("tga", mode="L").size == (3, 2)


def test_sample_without_a_usual_part_is_a_key_error_that_names_it(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.bin", b"")])
    sample = open_any(tmp_path).open_samples(np.array([(0, 0)], REF))[0]
    for decode in (sample.image, sample.text):
        with pytest.raises(KeyError, match=r"sample 'k' of a\.tar has none of .*; it has \['bin'\]"):
            decode()
    with pytest.raises(KeyError, match="no part 'json'"):
        sample.json()


def test_sample_repr_names_its_origin(sample: Sample) -> None:
    assert (sample.key, sample.shard, sample.offset) == ("k", "a.tar", 1024)
    assert sample.ref == Ref(sample.ref.source, epoch=2, index=1, part=0)
    assert repr(sample) == "Sample('k', ['PNG', 'json', 'seg.txt', 'txt'], shard='a.tar', epoch=2, index=1)"


@pytest.mark.parametrize("copied", [lambda sample: pickle.loads(pickle.dumps(sample)), copy.deepcopy])
def test_a_pickled_sample_is_detached_from_its_shard(sample: Sample, tmp_path: Path, copied: object) -> None:
    before = [sample.key, sample.shard, sample.offset, sample.ref, dict(sample), repr(sample)]
    detached = copied(sample)  # type: ignore[operator]
    (tmp_path / "a.tar").unlink()
    assert [detached.key, detached.shard, detached.offset, detached.ref, dict(detached), repr(detached)] == before
    assert detached["Txt"] == "é".encode()
    with pytest.raises(KeyError, match="the sample has PNG"):
        detached["jpg"]
    assert dict(pickle.loads(pickle.dumps(detached))) == dict(detached)


def test_parts_are_read_lazily(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"1")])
    dataset = open_any(tmp_path)
    sample = dataset.open_samples(np.array([(0, 0)], REF))[0]
    assert list(sample) == ["txt"] and "txt" in sample and sample.ref.index == 0
    assert not dataset.store.files
    assert sample["txt"] == b"1"
    assert dataset.store.files


def test_a_ref_of_a_buffer_takes_twelve_bytes() -> None:
    assert REF.itemsize == 12
    assert np.array([(1, 2)], REF).tobytes() == (1).to_bytes(8, "little") + (2).to_bytes(4, "little")


JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
)
ODD_JSON = [
    b"-0", b"-0.0", b"1e5", b"1E400", b"5e-324", b"18446744073709551616", b"1" * 400, b"1" * 5000,
    b"9007199254740993.0", b"123456789012345678901234567890.5", b"[NaN, -Infinity]", b"01", b"1.", b"+1", b"1 2",
    b"[1,]", b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\xff"', b'"a\nb"', b"\xef\xbb\xbf{}", '{"a": 1}'.encode("utf-16"),
    b'{"a": 1, "b": 2, "a": 3}', b"", b" ", b'{"a" : [ 1, 2.50, null]} \n', b"[" * 100_000,
]  # fmt: skip


def decoded(decode: Any, raw: bytes) -> Any:
    """What comes of it, with types, the order of keys and the bits of floats told apart; or the kind of error."""
    try:
        return repr(decode(raw))
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("raw", ODD_JSON, ids=[repr(raw[:20]) for raw in ODD_JSON])
def test_odd_json_is_decoded_or_rejected_like_by_python(raw: bytes) -> None:
    assert decoded(decoded_json, raw) == decoded(json.loads, raw)


@settings(max_examples=settings.default.max_examples // 4)
@given(JSON, strategies.booleans())
def test_json_is_decoded_like_by_python(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert decoded(decoded_json, raw) == decoded(json.loads, raw)


@settings(max_examples=settings.default.max_examples // 3)
@given(strategies.from_regex(rb"-?[0-9]{1,25}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True))
def test_numbers_are_decoded_like_by_python(raw: bytes) -> None:
    assert decoded(decoded_json, raw) == decoded(json.loads, raw)


@pytest.fixture
def film(tmp_path: Path) -> sp.Sample:
    parts = {"mp4": video_bytes(30, audio="aac"), "flac": audio_bytes(1.0), "bad.mp4": b"no video", "txt": b"a"}
    write_tar(tmp_path / "0.tar", [(f"s0.{name}", data) for name, data in parts.items()])
    return next(sp.TarShardReader(tmp_path, sp.Lane(), shuffle=False))


def test_video_and_audio_are_found_by_extension(film: sp.Sample) -> None:
    assert [frame_number(frame) for frame in film.video().frames_by_index([7, 3])] == [7, 3]
    assert film.audio().codec == "flac" and film.audio("mp4").codec == "aac"
    assert np.abs(film.audio().samples()).max() > 0.4


def test_part_that_is_not_media_is_reported_with_its_sample_and_shard(film: sp.Sample) -> None:
    with pytest.raises(MediaError, match=r"part 'bad.mp4' of sample 's0' of 0.tar: "):
        film.video("bad.mp4")
    with pytest.raises(KeyError, match="absent"):
        film.read_from(sp.Sample.__reduce__(film)[1][0]).video("absent")  # a pickled one opens its parts too


@pytest.mark.parametrize(
    ("part", "data", "get"),
    [
        ("json", b'{"a": ', sp.Sample.json),
        ("txt", b"caf\xe9", sp.Sample.text),
        ("png", b"no image", sp.Sample.image),
        ("npy", b"\x93NUMPY cut", lambda sample: sample.array("npy")),
        ("json.gz", b"no gzip", lambda sample: sample.json("json.gz")),
    ],
)
def test_error_of_decoding_has_a_note_that_names_part_and_sample(
    tmp_path: Path, part: str, data: bytes, get: Callable[[sp.Sample], Any]
) -> None:
    write_tar(tmp_path / "0.tar", [(f"s0.{part}", data)])
    with pytest.raises(Exception) as caught:
        get(sp.open_dataset(tmp_path)[0])
    assert caught.value.__notes__ == [f"in part {part!r} of sample 's0' of 0.tar"]


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "of the disk"), KeyError("absent"), RemoteError("no server")])
def test_error_of_reading_a_part_is_raised_as_it_is_without_reading_the_key(fault: Exception) -> None:
    origin = MagicMock(unpacked_bytes=1 << 20, **{"read.side_effect": fault})
    for get in (sp.Sample.json, sp.Sample.text, sp.Sample.image):
        with pytest.raises(type(fault)) as caught:
            get(sp.Sample(origin, 0, 0, 0, 0), "json")
        assert caught.value is fault and not hasattr(fault, "__notes__")
    origin.key.assert_not_called()


def test_many_clips_leave_no_file_open(film: sp.Sample) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for n in range(30):
        film.video().frames([n % 20 / 10], size=(16, 16))
        film.audio("mp4").samples(0.5, 1.0, rate=8000)
    gc.collect()
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 1  # the shard itself


def test_without_pyav_the_message_says_what_to_install(film: sp.Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "av":
            raise ImportError("No module named 'av'")
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for open_part in (film.video, film.audio):
        with pytest.raises(ImportError, match=r"pip install av"):
            open_part()
    assert film.text() == "a"


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<i8", ">f4", "u1", "<f2", "?"])
def test_array_of_an_npy_part_equals_numpys(dtype: str, order: Literal["C", "F"]) -> None:
    values = np.asarray(np.arange(12).reshape(3, 4) % 2, dtype, order=order)
    file = io.BytesIO()
    np.save(file, values)
    found = sample_of({"npy": file.getvalue(), "x.NPY": file.getvalue()})
    for name in ("npy", "x.NPY"):
        array = found.array(name)
        assert array.dtype == values.dtype and array.flags.writeable and np.array_equal(array, values)


def test_array_of_an_npy_of_objects_is_rejected_and_other_bytes_are_raw() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="npy file of Python objects, which are never unpickled"):
        sample_of(npy=file.getvalue()).array("npy")
    assert sample_of(npy=b"raw").array("npy").tobytes() == b"raw"
