"""Indexes and states that somebody forged, checksums and all: an error that says so, or the right answer."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from savable_pipeline.data.shards.index import PER_SHARD, Header, aligned, check_of
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.shards.tar_format import TarColumns, TarIndex
from savable_pipeline.data.stores.tar_store import TARS
from tests.conftest import write_tar
from tests.support.draws import scaled_examples
from tests.support.toy_faults import NumberEncoder
from tests.support.values_and_refs import values_and_refs

EDITS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of samples of unlike parts, indexed."""
    root = tmp_path_factory.mktemp("indexed")
    write_tar(root / "a.tar", [("k0.txt", b"one"), ("k0.json", b"{}"), ("k1.txt", b"x" * 600)])
    write_tar(root / "b.tar", [("k0.json", b"[]"), ("k1.json", b"3")])
    sp.TarShardReader(root, sp.Lane())
    return root


def with_checksum(raw: bytes) -> bytes:
    """The checksum of the header and the shards made right again."""
    length, end = int.from_bytes(raw[16:24], "little"), len(raw)
    with contextlib.suppress(ValueError):
        header = msgspec.msgpack.decode(raw[24 : 24 + length], type=Header)
        end = min(aligned(aligned(24 + length) + 8 * PER_SHARD * header.shards + header.names), len(raw))
    return raw[:8] + xxh3_64_intdigest(raw[16:end]).to_bytes(8, "little") + raw[16:]


@scaled_examples(50)
@given(EDITS, st.integers(0, 200))
def test_forged_index_is_detected_or_harmless(indexed: Path, edits: list[tuple[int, int]], cut: int) -> None:
    raw = bytearray((indexed / INDEX_NAME).read_bytes())
    for at, value in edits:
        raw[16 + at % (len(raw) - 16)] = value
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "data")
        shutil.copytree(indexed, root)
        (root / INDEX_NAME).write_bytes(with_checksum(bytes(raw))[: len(raw) - cut * (cut > 150)])
        with contextlib.suppress(sp.ShardError):
            for sample in sp.TarShardReader(root, sp.Lane(), epochs=1, shuffle=False, on_error="skip"):
                with contextlib.suppress(sp.ShardError, KeyError):
                    assert all(len(data) < 20_000 for data in sample.values())


def test_index_with_outside_offsets_or_huge_sizes_reads_nothing(indexed: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(indexed, root)
    secret = tmp_path / "secret.tar"
    write_tar(secret, [("k0.json", b'"secret"')])
    raw = (root / INDEX_NAME).read_bytes().replace(b"\xa5a.tar", b"\xa5../se", 1)
    (root / INDEX_NAME).write_bytes(with_checksum(raw))
    samples = sp.TarShardReader(root, sp.Lane(), epochs=1, shuffle=False, on_error="skip")
    assert {sample.shard for sample in samples} == {"a.tar", "b.tar"}


@scaled_examples(50)
@given(
    st.recursive(
        st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1), st.binary(max_size=30), st.text(max_size=5)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
        max_leaves=6,
    ),
    st.sampled_from(["refs", "part", "samples", "errors", "avoided", "epoch", "position"]),
)
def test_a_state_with_any_value_anywhere_is_restored_or_rejected(indexed: Path, value: object, field: str) -> None:
    def build() -> sp.Encode:
        return sp.Encode(sp.TarShardReader(indexed, sp.Lane()), NumberEncoder(), on_error="skip")

    stage = build()
    state = stage.save_state()
    (state["source"] if field in state["source"] else state)[field] = value
    with contextlib.suppress(sp.SavableError, msgspec.ValidationError):
        after = build()
        after.restore_state(state)
        values_and_refs(after, 1)


def test_index_of_the_fixture_is_complete(indexed: Path) -> None:
    index = TarIndex(indexed / INDEX_NAME)
    assert all(map(index.is_whole, range(2)))


@pytest.mark.parametrize("field", ["starts", "layout_of", "sizes"])
@pytest.mark.parametrize("value", [1, 7, 2**31])
def test_forged_rows_with_valid_checksums_are_detected_or_read(tmp_path: Path, field: str, value: int) -> None:
    """All samples have two members, in two layouts: these do not fit, point elsewhere, or happen to be right."""
    write_tar(tmp_path / "a.tar", [("k0.a", b"123"), ("k0.b", b"12"), ("k1.c", b"1234"), ("k1.d", b"1")])
    sp.TarShardReader(tmp_path, sp.Lane())
    table = TARS.scan(tmp_path, "a.tar")
    kind = "<u4" if field == "layout_of" else "<u8"
    rows = np.frombuffer(getattr(TarColumns.of(table), field), kind).copy()
    rows[-1] = value
    index = TarIndex(tmp_path / INDEX_NAME)
    before = (tmp_path / INDEX_NAME).read_bytes()
    old, new = (
        np.asarray(getattr(index, field)).tobytes(),
        rows.astype(np.asarray(getattr(index, field)).dtype).tobytes(),
    )
    arrays = {name: np.asarray(getattr(index, name)) for name in ("starts", "layout_of", "sizes")}
    check, forged = (
        check_of(*{**arrays, field: np.frombuffer(raw, arrays[field].dtype)}.values()) for raw in (old, new)
    )
    assert before.count(old) == 1 and packed(check) in before
    (tmp_path / INDEX_NAME).write_bytes(with_checksum(before.replace(old, new).replace(packed(check), packed(forged))))
    possible = value == 1 or (value == 7 and field != "layout_of")  # there are two layouts, and 10,240 bytes
    assert TarIndex(tmp_path / INDEX_NAME).is_whole(0) == possible
    for sample in sp.TarShardReader(tmp_path, sp.Lane(), epochs=1, shuffle=False, on_error="skip"):
        with contextlib.suppress(sp.ShardError):
            assert all(len(data) < 20_000 for data in sample.values())


def packed(number: int) -> bytes:
    return number.to_bytes(8, "little")
