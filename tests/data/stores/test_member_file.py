"""`sample.open`: a part of a tar as a file over the shard itself, checked as `read` is."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.files import close_down_to
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.stores import shard_files
from savable_pipeline.data.stores.shard_files import ShardFiles
from tests.support.shards import write_tar

NOISE = random.Random(0).randbytes(300_000)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write_tar(tmp_path / "a.tar", [("k.txt", b"before"), ("k.BIN", NOISE), ("k.none", b""), ("l.bin", b"behind")])
    return tmp_path / "a.tar"


def first_sample(path: Path) -> Sample:
    return open_any(path).open_samples(np.array([(0, 0)], REF))[0]


def test_member_file_reads_and_seeks_like_a_file(shard: Path) -> None:
    draw, same = random.Random(1), io.BytesIO(NOISE)
    with first_sample(shard).open("bin") as file:
        for _ in range(2_000):
            if draw.random() < 0.5:
                offset, whence = draw.choice([(draw.randrange(350_000), 0), (-draw.randrange(300_000), 2), (0, 1)])
                assert file.seek(offset, whence) == same.seek(offset, whence)
            size = draw.choice([-1, 0, 1, 7, 4_096, 70_000, 400_000])
            assert file.read(size) == same.read(size)
            assert file.tell() == same.tell()


def test_small_read_reads_little_of_the_shard(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, read = list[int](), ShardFiles.read
    monkeypatch.setattr(ShardFiles, "read", lambda *given: (sizes.append(given[-1]), read(*given))[1])
    with first_sample(shard).open("bin") as file:
        assert sizes == []
        file.seek(200_000)
        assert file.read(5) == NOISE[200_000:200_005]
    assert 0 < sum(sizes) <= 1 << 16


def test_member_file_is_read_only_and_ends_with_its_part(shard: Path) -> None:
    sample = first_sample(shard)
    with sample.open("bin") as file:
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")
        with pytest.raises(OSError):  # no descriptor: it is the whole shard's
            file.fileno()
        with pytest.raises(ValueError, match="a file begins at byte 0"):
            file.seek(-1 << 20, os.SEEK_CUR)
        assert (file.seek(len(NOISE) + 9), file.read(), file.read(4)) == (len(NOISE) + 9, b"", b"")
    assert sample.open("none").read() == b""
    with pytest.raises(KeyError, match="no part 'jpg'; the sample has txt, BIN, none"):
        sample.open("jpg")


def test_two_files_of_one_part_have_a_position_each(shard: Path) -> None:
    sample = first_sample(shard)
    with sample.open("bin") as one, sample.open("bin") as other:
        assert (one.read(10), other.read(4), one.read(10)) == (NOISE[:10], NOISE[:4], NOISE[10:20])


def test_zipfile_reads_a_member_file(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as into:
        into.writestr("inside", NOISE)
    write_tar(tmp_path / "a.tar", [("k.zip", archive.getvalue())])
    assert zipfile.ZipFile(first_sample(tmp_path).open("zip")).read("inside") == NOISE


def test_member_file_works_after_its_shard_was_closed_and_after_a_fork(shard: Path) -> None:
    with first_sample(shard).open("bin") as file:
        file.seek(150_000)
        close_down_to(0)
        if not (child := os.fork()):
            os._exit(0 if file.read(100_000) == NOISE[150_000:250_000] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert file.read(100_000) == NOISE[150_000:250_000]  # the child's position is its own


def test_truncated_shard_raises_like_read(shard: Path) -> None:
    with first_sample(shard).open("bin") as file:
        file.read(10)
        os.truncate(shard, 150_000)
        with pytest.raises(sp.ShardError, match=r"a\.tar: \d+ bytes at byte \d+ are missing") as caught:
            file.read()
        assert caught.value.reason == "changed shard"


def test_replaced_or_overwritten_shard_raises_like_read(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_CHECK_S", 0.0)
    sample, raw = first_sample(shard), shard.read_bytes()
    with sample.open("bin") as file:
        file.read(10)
        sample.origin.verify(0)  # type: ignore[attr-defined]
        time.sleep(0.02)  # a tick of the clock that stamps files
        with shard.open("r+b") as over:
            over.write(raw)
        with pytest.raises(sp.ShardError, match="it was overwritten while this run read it"):
            sample.origin.verify(1)  # type: ignore[attr-defined]
        shard.unlink()
        shard.write_bytes(raw)
        close_down_to(0)
        file.seek(0)
        with pytest.raises(sp.ShardError, match="it was replaced while this run read it"):
            file.read(200_000)


def test_a_compressed_column_is_read_whole(tmp_path: Path) -> None:
    pq.write_table(pa.table({"raw": [NOISE]}), tmp_path / "a.parquet", compression="zstd")
    with next(custom.ParquetReader(tmp_path, sp.Lane())).open("raw") as file:
        assert (file.seek(299_990), file.read()) == (299_990, NOISE[-10:])


def test_parts_of_joined_and_copied_samples_can_be_opened(shard: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "b.tar", [("k.raw", NOISE)])
    joined = next(custom.Join(sp.TarShardReader(shard, sp.Lane(), shuffle=False), {"other": tmp_path / "b.tar"}))
    for sample in (joined, pickle.loads(pickle.dumps(joined)), copy.deepcopy(joined)):
        assert sample.open("bin").read() == sample.open("other.raw").read() == NOISE
