"""A sample: a mapping from extension to bytes, read when asked for, decoded when told."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from PIL import Image

from savable_pipeline.dataset import Dataset
from savable_pipeline.sample import REF, Ref, Sample, decoded_json
from tests.conftest import write_tar


def png(mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (3, 2), 0 if mode != "RGB" else (10, 20, 30)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    members = [("k.PNG", png()), ("k.json", b'{"a": [1, "\xc3\xa9"]}'), ("k.seg.txt", b"no"), ("k.txt", "é".encode())]
    write_tar(tmp_path / "a.tar", [("before.txt", b"1"), *members])
    return Dataset(tmp_path).samples(np.array([(1, 2)], REF))[0]


def test_it_is_a_mapping_from_extension_to_bytes(sample: Sample) -> None:
    assert isinstance(sample, Mapping)
    assert list(sample) == sample.keys() == ["PNG", "json", "seg.txt", "txt"]
    assert len(sample) == 4
    assert sample["txt"] == "é".encode()
    assert sample.values() == [sample[extension] for extension in sample]
    assert dict(sample) == dict(sample.items())


def test_look_up_minds_no_case(sample: Sample) -> None:
    assert sample["png"] == sample["PNG"] == sample["Png"] == png()
    assert sample["SEG.txt"] == b"no"
    assert "png" in sample and "TXT" in sample and "jpg" not in sample


def test_of_parts_that_differ_in_case_only_the_exact_one_is_found(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"small"), ("k.TXT", b"large")])
    sample = Dataset(tmp_path).samples(np.array([(0, 0)], REF))[0]
    assert (sample["txt"], sample["TXT"]) == (b"small", b"large")


def test_a_missing_part_is_a_key_error_that_lists_what_there_is(sample: Sample) -> None:
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


def test_no_usual_part_is_a_key_error_that_names_the_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.bin", b"")])
    sample = Dataset(tmp_path).samples(np.array([(0, 0)], REF))[0]
    for decode in (sample.image, sample.text):
        with pytest.raises(KeyError, match=r"sample 'k' of a\.tar has none of .*; it has \['bin'\]"):
            decode()
    with pytest.raises(KeyError, match="no part 'json'"):
        sample.json()


def test_it_says_where_it_comes_from(sample: Sample) -> None:
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


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"1")])
    dataset = Dataset(tmp_path)
    sample = dataset.samples(np.array([(0, 0)], REF))[0]
    assert list(sample) == ["txt"] and "txt" in sample and sample.ref.index == 0
    assert not dataset._handles
    assert sample["txt"] == b"1"
    assert dataset._handles


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
def test_odd_json_is_decoded_or_refused_as_by_pythons_own_decoder(raw: bytes) -> None:
    assert decoded(decoded_json, raw) == decoded(json.loads, raw)


@settings(max_examples=300, deadline=None)
@given(JSON, strategies.booleans())
def test_json_is_decoded_as_by_pythons_own_decoder(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert decoded(decoded_json, raw) == decoded(json.loads, raw)


@settings(max_examples=500, deadline=None)
@given(strategies.from_regex(rb"-?[0-9]{1,25}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True))
def test_a_number_is_decoded_as_by_pythons_own_decoder(raw: bytes) -> None:
    assert decoded(decoded_json, raw) == decoded(json.loads, raw)
