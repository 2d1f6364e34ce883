"""What is compressed is unpacked by pieces: right to the byte, and never far beyond what it may become."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.stores import decompressed as module
from savable_pipeline.data.stores.decompressed import DamagedError, Unpacked, decompressed
from tests.conftest import write_tar
from tests.support.toy_records import LEAF, block, record, write_litdata, write_mds

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}
MIB = 1 << 20
LARGE = bytes(100 * MIB)  # of which zstd makes 32 MiB at a time
BOUND = 80 * MIB


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Return whether Python's memory grew by no more within this block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 3 * 1024 + 5])
def test_compressed_bytes_round_trip(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, piece in (("_PIECE", 1024), ("_ZST_STEP", 100)):  # of a mebibyte and so on
        monkeypatch.setattr(module, name, piece)
    for data in (bytes(size), random.Random(size).randbytes(size)):
        packed = PACK[kind](data)
        assert decompressed(packed, kind) == decompressed(packed, kind, size=size) == data
        assert decompressed(packed + PACK[kind](b"more"), kind) == data + b"more"
        for cut in {1, len(packed) // 2, len(packed) - 1}:
            with pytest.raises(DamagedError):
                decompressed(packed[:cut], kind, size=size)


@pytest.mark.parametrize("kind", PACK)
def test_decompression_bomb_is_rejected_before_it_uses_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, bound = (100 * MIB, BOUND) if kind == "zst" else (30 * MIB, 20 * MIB)
    packed = PACK[kind](b"1\n" + bytes(size))  # a short line, and a long one
    for promised, most in ((500, 1 << 30), (None, MIB)):
        with at_most(bound), pytest.raises(DamagedError, match="when decompressed"):
            decompressed(packed, kind, most, promised)
    with at_most(bound), pytest.raises(DamagedError, match="a line of more than 100 bytes"):
        Unpacked(io.BytesIO(packed), kind, line_bytes=100).readall()
    monkeypatch.setattr(module, "_PIECE", 1024)
    lines = b"".join(b"%09d\n" % i for i in range(2000))
    assert Unpacked(io.BytesIO(PACK[kind](lines)), kind, line_bytes=100).readall() == lines


def test_decompression_is_limited_by_the_indexed_size(tmp_path: Path) -> None:
    source = write_mds(tmp_path / "in", {"text": "str"}, [[LARGE]], packed="zstd")
    index = json.loads((source / "index.json").read_text())
    index["shards"][0]["raw_data"]["bytes"] = 500
    (source / "index.json").write_text(json.dumps(index))
    data = sp.open_dataset(source)
    with at_most(BOUND), pytest.raises(sp.ShardError, match="more than 500 bytes when decompressed, expected 500"):
        data[0].json()
    reader = custom.MdsReader(source, sp.Lane(), epochs=1, on_error="skip")
    with at_most(BOUND):
        assert [sample.json() for sample in sp.Encode(reader, sp.Decoded(), on_error="skip")] == []


def unpacked_cases(folder: Path) -> dict[str, tuple[Path, Callable[[sp.Sample], Any], type[Exception]]]:
    """Samples of a mebibyte: in a record by itself, in a part in gz, and in arrays."""
    litdata = {"compression": "zstd", "compression_level": "sample"}
    write_litdata(folder / "litdata", ["bytes"], LEAF, [[bytes(MIB)]], **litdata)
    write_mds(folder / "mds", {"data": "bytes"}, [[bytes(MIB)]], packed="bz2")
    archive = io.BytesIO()
    np.savez_compressed(archive, a=np.zeros(MIB, np.uint8))
    (folder / "tars").mkdir()
    parts = [("a.npz", archive.getvalue()), ("a.json.gz", gzip.compress(json.dumps("x" * MIB).encode()))]
    write_tar(folder / "tars" / "a.tar", parts)
    return {
        "litdata": (folder / "litdata", lambda sample: sample["bin"], sp.ShardError),
        "mds": (folder / "mds", lambda sample: sample["bin"], sp.ShardError),
        "json.gz": (folder / "tars", lambda sample: sample.json("json.gz"), ValueError),
        "npz": (folder / "tars", lambda sample: sample.decoded()["npz"]["a"], ValueError),
    }


READERS: dict[str, Any] = {"litdata": custom.LitDataReader, "mds": custom.MdsReader, "tars": sp.TarShardReader}


@pytest.mark.parametrize("case", ["litdata", "mds", "json.gz", "npz"])
def test_option_limits_the_decompressed_size(tmp_path: Path, case: str) -> None:
    folder, value_of, error = unpacked_cases(tmp_path)[case]
    reader, name = READERS[folder.name], sp.Lane()
    for most in (MIB // 2, 2 * MIB):
        samples = [sp.open_dataset(folder, unpacked_bytes=most)[0], next(reader(folder, name, unpacked_bytes=most))]
        if case == "npz":  # the bytes of a pickled sample are read when it is pickled
            samples.append(pickle.loads(pickle.dumps(samples[0])))
        for sample in samples:
            if most > MIB:
                assert len(value_of(sample)) == MIB
                continue
            with pytest.raises(error, match="Pass a larger unpacked_bytes"):
                value_of(sample)


def test_uncompressed_shards_have_no_such_limit(tmp_path: Path) -> None:
    archive = io.BytesIO()
    np.savez(archive, a=np.zeros(MIB, np.uint8))
    write_tar(tmp_path / "a.tar", [("a.npz", archive.getvalue())])
    assert len(sp.open_dataset(tmp_path, unpacked_bytes=100)[0].decoded()["npz"]["a"]) == MIB
    write_mds(tmp_path / "mds", {"data": "bytes"}, [[bytes(MIB)]])
    assert len(sp.open_dataset(tmp_path / "mds", unpacked_bytes=100)[0]["bin"]) == MIB


def test_conversion_limits_the_decompressed_size(tmp_path: Path) -> None:
    source = write_mds(tmp_path / "in", {"data": "bytes"}, [[bytes(MIB)]], packed="gz")
    with pytest.raises(ValueError, match="Pass a larger unpacked_bytes"):
        sp.convert(source, tmp_path / "out", unpacked_bytes=MIB // 2)
    assert sp.convert(source, tmp_path / "out").samples == 1
    line = json.dumps({"text": "x" * MIB}).encode()
    for name, data in (
        ("a.jsonl.gz", line + b"\n"),
        ("a.json.gz", b"[\n" + line + b"]"),
        ("a.csv.gz", b"text\n" + line),
    ):
        (tmp_path / name).write_bytes(gzip.compress(data))
        with pytest.raises(ValueError, match="Pass a larger unpacked_bytes"):
            sp.convert(tmp_path / name, tmp_path / f"{name} out", unpacked_bytes=MIB // 2)
    for name in ("a.jsonl.gz", "a.json.gz"):
        assert sp.convert(tmp_path / name, tmp_path / f"{name} out").samples == 1


def test_too_large_record_is_rejected_alone(tmp_path: Path) -> None:
    rows = [record([b"a"]), record([LARGE]), record([b"c"])]
    source = write_litdata(
        tmp_path / "in", ["bytes"], LEAF, [[b"a"]] * 3, compression="zstd", compression_level="sample"
    )
    (source / "chunk-0-0.bin").write_bytes(block([zstandard.compress(row) for row in rows]))
    reader = custom.LitDataReader(source, sp.Lane(), epochs=1, unpacked_bytes=MIB, shuffle=False, on_error="skip")
    with at_most(BOUND):
        encoded = sp.Encode(reader, sp.Decoded(), on_error="skip")
        assert [item["bin"] for item in encoded] == [b"a", b"c"]
    assert sp.convert(source, tmp_path / "out", unpacked_bytes=MIB).samples == 2
