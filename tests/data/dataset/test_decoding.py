"""Parts decoded by their extension: what each becomes, and what is refused."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import savable_pipeline as sp
from savable_pipeline.data.dataset.decoding import decoded_part, unpacked
from tests.conftest import write_tar
from tests.support.toy_samples import plain_png, sample


def saved(array: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


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
def test_arrays_are_as_numpy_reads_them(array: Any) -> None:
    for raw in (saved(array), saved(np.asfortranarray(array))):
        found, expected = decoded_part("npy", raw), np.load(io.BytesIO(raw))
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()
        assert found.shape == expected.shape
        assert found.flags.writeable


class Trap:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def test_objects_are_refused_and_not_unpickled() -> None:
    raw = saved(np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects, which are never unpickled"):
        decoded_part("npy", raw)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.npy", raw)
    with pytest.raises(ValueError, match="Python objects"):
        decoded_part("npz", archive.getvalue())


def test_an_array_that_announces_more_than_is_there_allocates_nothing() -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})
    with pytest.raises(ValueError, match=r"8 bytes, where \(1125899906842624,\) of float64 was announced"):
        decoded_part("npy", header.getvalue() + bytes(8))


def test_an_archive_that_inflates_to_too_much_is_refused() -> None:
    archive = io.BytesIO()
    np.savez_compressed(archive, a=np.zeros(2000))
    with pytest.raises(ValueError, match="at most 10,000 are read"):
        decoded_part("npz", archive.getvalue(), 10_000)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_of_a_compression_that_inflates_all_at_once_is_refused(kind: int) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", kind) as file:
        file.writestr("a.npy", saved(np.zeros(2000)))
    with pytest.raises(ValueError, match="an npz file that NumPy does not write: of another compression"):
        decoded_part("npz", archive.getvalue())


@pytest.mark.parametrize(("extension", "data"), [("json", b"{"), ("txt", b"\xff"), ("png", b"x"), ("npy", b"x")])
def test_malformed_parts_are_errors(extension: str, data: bytes) -> None:
    with pytest.raises((ValueError, OSError)):
        decoded_part(extension, data)


def test_the_default_encoder_gives_lists_with_none_for_what_is_missing() -> None:
    encoder, rng = sp.Decoded(), sp.Rng(0)
    items = [encoder.encode(sample({"txt": "a"}), rng), encoder.encode(sample({"txt": "b", "json": {"x": 1}}), rng)]
    assert encoder.batch(items, rng) == {"__key__": ["a", "a"], "txt": ["a", "b"], "json": [None, {"x": 1}]}


def test_a_compressed_part_is_read_as_text_and_json_by_its_ending(tmp_path: Path) -> None:
    packed = gzip.compress("ü".encode()) + gzip.compress(b"!")
    parts = [("a.txt.gz", packed), ("a.JSON.GZ", gzip.compress(b'{"id": 1}')), ("a.cut.gz", packed[:-9])]
    write_tar(tmp_path / "a.tar", [*parts, ("a.no.gz", b"text")])
    sample = next(sp.TarShardReader(tmp_path, sp.Lane()))
    assert (sample.text("txt.gz"), sample.json("json.gz"), sample["txt.gz"]) == ("ü!", {"id": 1}, packed)
    for part, told in (("cut.gz", "cannot be decompressed: it ends within"), ("no.gz", "cannot be decompressed")):
        with pytest.raises(ValueError, match=f"the part {part} {told}"):
            sample.text(part)


def test_a_compressed_part_is_never_larger_than_it_may_be() -> None:
    assert len(unpacked("txt.gz", gzip.compress(bytes(600)) + gzip.compress(bytes(400)), 1000)) == 1000
    with pytest.raises(ValueError, match=r"txt\.gz cannot be decompressed: more than 1000 bytes when decompressed"):
        unpacked("txt.gz", gzip.compress(bytes(600)) + gzip.compress(bytes(401)), 1000)
