"""Token files: documents and windows, read as they lie; an `.idx` that lies is found."""

from __future__ import annotations

import errno
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.byte_source import opened
from savable_pipeline.data.stores import token_store
from savable_pipeline.data.stores.opening import open_store
from savable_pipeline.data.stores.token_store import read_token_table
from savable_pipeline.testing import assert_exact_resume

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9], list(range(10, 30))]


def write_bin(path: Path, documents: list[list[int]], dtype: str = "uint16", code: int = 8) -> None:
    """A `.bin` and its `.idx`, as Megatron-LM writes them."""
    np.array([token for each in documents for token in each], dtype).tofile(path)
    lengths = np.array([len(each) for each in documents], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    firsts = np.arange(len(documents) + 1).astype("<i8")
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + firsts.tobytes())


def test_documents_of_a_bin_are_samples(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", DOCUMENTS)
    store = open_store(tmp_path, format="tokens")
    assert [store.array(0, row, "tokens").tolist() for row in range(5)] == DOCUMENTS
    assert store.array(0, 0, "tokens").dtype == np.uint16
    assert (store.offset(0, 3), store.key(0, 3), store.sizes(0, 3)) == (4, "a.bin:3", {"tokens": 10})
    with pytest.raises(KeyError, match="no part 'txt'; the sample has tokens"):
        store.read(0, 0, "txt")


def test_windows_cross_documents_and_may_overlap(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", DOCUMENTS, "int32", 4)
    store = open_store(tmp_path, format="tokens", length=9, stride=8)
    assert [store.array(0, row, "tokens").tolist() for row in range(store.entries[0].samples)] == [
        [*range(1, 10)],
        [*range(9, 18)],
        [*range(17, 26)],
    ]


@pytest.mark.parametrize("tokens", [8, 9, 16, 17, 23, 24, 25])
def test_windows_are_whole_and_a_short_remainder_is_not_a_sample(tmp_path: Path, tokens: int) -> None:
    np.save(tmp_path / "a.npy", np.arange(tokens, dtype=np.uint16))
    windows = sp.read(tmp_path / "a.npy", length=9, stride=8, shuffle=False) if tokens > 8 else ()
    found = [sample.array("tokens").tolist() for sample in windows]
    assert found == [[*range(begin, begin + 9)] for begin in range(0, tokens - 8, 8)]


def test_flat_files_use_the_dtype_argument_or_that_of_npy(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint32).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", np.arange(12, dtype=np.int64).reshape(4, 3))
    store = open_store(tmp_path, format="tokens", length=3, dtype="uint32")
    assert [entry.samples for entry in store.entries] == [3, 4]
    assert store.array(0, 2, "tokens").tolist() == [6, 7, 8] and store.array(1, 3, "tokens").tolist() == [9, 10, 11]
    rows = open_store(tmp_path / "b.npy", format="tokens")
    assert rows.array(0, 1, "tokens").tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match=r"without \.idx\. Pass dtype="):
        open_store(tmp_path, format="tokens", length=3)
    with pytest.raises(ValueError, match=r"has no documents\. Pass length="):
        open_store(tmp_path, format="tokens", dtype="uint32")


def test_flat_file_truncated_within_a_token_is_reported_or_read_with_skip(tmp_path: Path) -> None:
    for name in "ab":
        np.arange(10, dtype=np.uint32).tofile(tmp_path / f"{name}.bin")
    os.truncate(tmp_path / "a.bin", 39)
    with pytest.raises(sp.ShardError, match=r"a\.bin: 39 bytes are no whole number of uint32\. Copy it again, or pass"):
        custom.TokenReader(tmp_path, sp.Lane(), length=3, dtype="uint32")
    reader = custom.TokenReader(tmp_path, sp.Lane(), length=3, dtype="uint32", epochs=1, shuffle=False, on_error="skip")
    assert [sample.array("tokens")[0] for sample in reader] == [0, 3, 6] * 2
    assert reader.counts["skipped/rest of a damaged or missing shard"] == 1


@pytest.mark.parametrize("header", [b"{'descr': (", b"{'shape': 1", b"\xff\xfe", b""])
def test_damaged_array_header_is_reported(tmp_path: Path, header: bytes) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    raw = bytearray((tmp_path / "a.npy").read_bytes())
    raw[10:127] = header.ljust(117)
    (tmp_path / "a.npy").write_bytes(raw)
    with pytest.raises(
        sp.ShardError, match=r"a\.npy: not an \.npy file, or its header is damaged: .*\. Write it again"
    ):
        open_store(tmp_path, format="tokens", length=2)


def damage_pointer(idx: bytearray) -> None:
    struct.pack_into("<q", idx, 34 + 4 * 5 + 8 * 3, 1 << 40)


def damage_length(idx: bytearray) -> None:
    struct.pack_into("<i", idx, 34 + 4, -7)


def damage_firsts(idx: bytearray) -> None:
    struct.pack_into("<q", idx, 34 + 12 * 5 + 8, 99)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (damage_pointer, "sequence 3 starts at byte 1099511627776"),
        (damage_length, "a sequence of -7 tokens"),
        (damage_firsts, "its documents do not cover its 5 sequences"),
        (lambda idx: struct.pack_into("<Q", idx, 18, 1 << 60), "bytes, but its header says"),
        (lambda idx: idx.__setitem__(0, 0), "is not a Megatron index"),
        (lambda idx: idx.__delitem__(slice(50, None)), "bytes, but its header says"),
    ],
)
def test_wrong_idx_is_an_error_that_names_it(tmp_path: Path, damage: object, fault: str) -> None:
    write_bin(tmp_path / "a.bin", DOCUMENTS)
    idx = bytearray((tmp_path / "a.idx").read_bytes())
    damage(idx)  # type: ignore[operator]
    (tmp_path / "a.idx").write_bytes(idx)
    with pytest.raises(sp.ShardError, match=rf"a\.bin: a\.idx.*{fault}"):
        open_store(tmp_path, format="tokens")


def test_an_idx_that_is_rewritten_after_it_was_indexed_is_an_error(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", DOCUMENTS)
    store = open_store(tmp_path, format="tokens")
    idx = bytearray((tmp_path / "a.idx").read_bytes())
    damage_length(idx)
    (tmp_path / "a.idx").write_bytes(idx)
    with pytest.raises(sp.ShardError, match=r"or its \.idx was rewritten"):
        store.read(0, 0, "tokens")


def lay_firsts(idx: Path, *firsts: int) -> None:
    """The documents of an `.idx`, written into it; when it was written looks as before."""
    stat, raw = idx.stat(), bytearray(idx.read_bytes())
    raw[-8 * len(firsts) :] = np.array(firsts, "<i8").tobytes()
    idx.write_bytes(raw)
    os.utime(idx, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_files_rewritten_to_equal_size_are_an_error_and_reindexed_by_the_next_run(
    tmp_path: Path,
) -> None:
    write_bin(tmp_path / "a.bin", DOCUMENTS)
    with sp.SavableLoader(partial(token_pipeline, tmp_path), seed=0, lanes=1) as loader:
        state = loader.state_dict()
    for rewrite, expected in [
        (lambda: np.arange(100, 129, dtype="uint16").tofile(tmp_path / "a.bin"), [100, 101, 102]),
        (lambda: lay_firsts(tmp_path / "a.idx", 0, 2, 2, 3, 4, 5), [100, 101, 102, 103]),
    ]:
        before = open_store(tmp_path, format="tokens")
        time.sleep(0.02)  # a tick of the clock that stamps files
        rewrite()
        with pytest.raises(sp.ShardError, match=r"or its \.idx was rewritten") as error:
            before.read(0, 0, "tokens")
        assert error.value.reason == "changed shard"
        after = open_store(tmp_path, format="tokens")
        assert after.array(0, 0, "tokens").tolist() == expected
        assert after.entries[0].digest != before.entries[0].digest
        resumed = sp.SavableLoader(partial(token_pipeline, tmp_path), seed=0, lanes=1)
        with resumed, pytest.raises(sp.CheckpointMismatchError, match=r"a\.bin"):
            resumed.load_state_dict(state)


def test_replacing_idx_with_an_old_date_is_detected(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", DOCUMENTS)
    assert open_store(tmp_path, format="tokens").array(0, 0, "tokens").tolist() == [1, 2, 3]
    time.sleep(0.02)  # a tick of the clock that stamps files
    lay_firsts(tmp_path / "a.idx", 0, 2, 2, 3, 4, 5)
    assert open_store(tmp_path, format="tokens").array(0, 0, "tokens").tolist() == [1, 2, 3, 4]


def test_added_or_removed_idx_is_detected(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", DOCUMENTS)
    (tmp_path / "a.idx").rename(tmp_path / "elsewhere")
    assert open_store(tmp_path, format="tokens", length=2, dtype="uint16").entries[0].samples == 14
    time.sleep(0.02)
    (tmp_path / "elsewhere").rename(tmp_path / "a.idx")
    assert open_store(tmp_path, format="tokens").entries[0].samples == 5
    (tmp_path / "a.idx").unlink()
    with pytest.raises(ValueError, match=r"without \.idx\. Pass dtype=, their type"):
        open_store(tmp_path, format="tokens")


def test_running_out_of_descriptors_does_not_blame_the_idx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_none(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    write_bin(tmp_path / "a.bin", DOCUMENTS)
    store = open_store(tmp_path, format="tokens")
    monkeypatch.setattr(token_store, "read_documents", read_none)
    with pytest.raises(sp.SavableError, match="Close files, or raise") as error:
        store.read(0, 0, "tokens")
    assert not isinstance(error.value, sp.ShardError)


def test_an_array_of_objects_is_rejected_and_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    with pytest.raises(sp.ShardError, match="array of object"):
        open_store(tmp_path, format="tokens", length=1)


class Tokens(sp.TaskEncoder):
    """An item is the list of tokens."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> list[int]:
        return [int(token) for token in sample.array("tokens")]

    def batch(self, items: list[list[int]], rng: sp.Rng) -> list[list[int]]:
        return items


def token_pipeline(folder: Path, lane: sp.Lane) -> custom.Stage:
    items = sp.Encode(sp.ShuffleBuffer(custom.TokenReader(folder, lane), size=4), Tokens())
    return sp.Batcher(items, size=2)


def test_run_over_documents_resumes_exactly(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", DOCUMENTS * 3)
    write_bin(tmp_path / "b.bin", DOCUMENTS)
    assert assert_exact_resume(partial(token_pipeline, tmp_path), lanes=2, steps=8, chains=1) > 8


def test_headerless_arrays_use_the_dtype_argument(tmp_path: Path) -> None:
    for name in ("a.npy", "b.npy"):
        np.arange(30, dtype=np.uint16).tofile(tmp_path / name)
    samples = list(custom.TokenReader(tmp_path, sp.Lane(), length=10, dtype="uint16", shuffle=False, epochs=1))
    assert [sample.array("tokens").tolist() for sample in samples] == [list(range(n, n + 10)) for n in (0, 10, 20)] * 2
    with pytest.raises(
        sp.ShardError, match=r"a\.npy: no header of NumPy: .*bare numbers, as OLMo-core .*\. Pass dtype="
    ):
        custom.TokenReader(tmp_path, sp.Lane(), length=10)
    with pytest.raises(sp.ShardError, match=r"a\.npy: 60 bytes are no whole number of uint64"):
        custom.TokenReader(tmp_path, sp.Lane(), length=5, dtype="uint64")


def test_array_that_lost_its_header_is_not_read_as_numbers(tmp_path: Path) -> None:
    for name in ("a.npy", "b.npy"):
        np.save(tmp_path / name, np.arange(30, dtype=np.uint16))
    (tmp_path / "b.npy").write_bytes(bytes(16) + (tmp_path / "b.npy").read_bytes()[16:])
    for dtype in (None, "uint16"):
        with pytest.raises(sp.ShardError, match=r"b\.npy: no header of NumPy"):
            custom.TokenReader(tmp_path, sp.Lane(), length=10, dtype=dtype)
        reader = custom.TokenReader(tmp_path, sp.Lane(), length=10, dtype=dtype, epochs=1, on_error="skip")
        assert [sample.shard for sample in reader] == ["a.npy"] * 3
        assert reader.counts["skipped/rest of a damaged or missing shard"] == 1


def test_two_threads_never_parse_headers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ast` of some releases of Python raises SystemError then: files behind a URL are scanned by threads."""
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.int32))
    parse, inside, most = np.lib.format.read_array_header_1_0, [0], [0]

    def counted(head: BinaryIO) -> object:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1
        return parse(head)

    def scan(_: int) -> object:
        with opened(tmp_path / "a.npy") as file:
            return read_token_table(file, "a.npy")

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", counted)
    with ThreadPoolExecutor(4) as threads:
        tables = list(threads.map(scan, range(8)))
    assert most == [1] and all(table == tables[0] for table in tables)
