"""`sp.ShardWriter`: what it writes, who may write where, and what a kill leaves behind."""

from __future__ import annotations

import errno
import io
import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.data.shards.index import Format
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import run_conversion
from savable_pipeline.tools.convert.shard_series import ShardFile
from tests.conftest import write_tar
from tests.support.processes import run_until_killed
from tests.support.toy_files import SMALL, file_hashes, tar_files, write_captioned_images

Sample = dict[str, Any]


def samples(number: int) -> list[Sample]:
    return [{"__key__": f"{i:04d}", "txt": f"no. {i}", "json": {"n": i}, "bin": b"x" * 700} for i in range(number)]


def write(folder: Path, given: list[Sample], **settings: Any) -> int:
    """Write those that are not safe yet."""
    with sp.ShardWriter(folder, **settings) as writer:
        for sample in given[writer.written :]:
            writer.write(sample)
    return writer.written


def keys(folder: Path) -> list[str]:
    return [sample.key for sample in sp.TarShardReader(folder, sp.Lane(), shuffle=False, epochs=1)]


def test_each_value_type_is_written_as_documented(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    given = {"jpg": bytearray(b"a"), "txt": "ü", "cls": 7, "json": {"ä": [1]}, "npy": array}
    write(tmp_path, [{"__key__": "é/1", **given, "__url__": "left out"}])
    files = tar_files(tmp_path)
    assert np.array_equal(np.load(io.BytesIO(files.pop("é/1.npy"))), array)
    assert files == {"é/1.cls": b"7", "é/1.jpg": b"a", "é/1.json": '{"ä": [1]}'.encode(), "é/1.txt": "ü".encode()}


def test_written_shards_equal_converted_ones_and_webdataset_reads_them(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 7)
    run_conversion(source, tmp_path / "one", SMALL)
    paths = sorted(str(path.relative_to(source))[:-4] for path in source.rglob("*.jpg"))
    given = [{"__key__": k, **{e: (source / f"{k}.{e}").read_bytes() for e in ("txt", "jpg")}} for k in paths]
    assert write(tmp_path / "two", given, max_samples=3) == 7
    one, two = file_hashes(tmp_path / "one"), file_hashes(tmp_path / "two")
    alike = [name for name in one if "convert" not in name and "rejected" not in name and "hashes" not in name]
    assert {name: two[name] for name in alike} == {name: one[name] for name in alike}
    assert ".nv-meta/savable.index" in alike and ".nv-meta/dataset.yaml" in alike and len(alike) == 3 + 3 + 4
    read = wds.WebDataset(sorted(map(str, (tmp_path / "two").glob("*.tar"))), shardshuffle=False)
    assert [item["__key__"] for item in read] == paths


@pytest.mark.parametrize(("most", "shards"), [(1, 30), (10_240, 15), (25_000, 6)])
def test_shard_size_is_limited(tmp_path: Path, most: int, shards: int) -> None:
    write(tmp_path, samples(30), max_bytes=most)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.tar")]
    assert (len(sizes), max(sizes)) == (shards, max(10_240, most // 10_240 * 10_240))


@pytest.mark.parametrize("step", [19, pytest.param(5, marks=pytest.mark.long)])
def test_killed_writer_resumes_to_the_same_bytes(tmp_path: Path, step: int) -> None:
    write(tmp_path / "calm", samples(10), max_samples=3)
    target, killed = tmp_path / "out", 0
    for event in count(3, step):
        if not run_until_killed(lambda: write(target, samples(10), max_samples=3), tmp_path, event):
            break
        killed += 1
        finished = len(list(target.glob("*.tar")))
        with sp.ShardWriter(target, max_samples=3) as writer:
            assert writer.written == min(10, 3 * finished)
            for sample in samples(10)[writer.written :]:
                writer.write(sample)
        assert file_hashes(target) == file_hashes(tmp_path / "calm"), event
        shutil.rmtree(target)
    assert killed > 90 // step


def test_parts_are_joined_without_reading_the_shards_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in (2, 0, 1):
        assert write(tmp_path / "out", samples(30)[i::3], max_samples=4, part=(i, 3)) == 10
    monkeypatch.setattr(Format, "scan", lambda *_: 1 / 0)
    told = CliRunner().invoke(app, ["index", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert sorted(keys(tmp_path / "out")) == [sample["__key__"] for sample in samples(30)]
    assert json.loads((tmp_path / "out/.nv-meta/.info.json").read_text())["shard_counts"] == {
        f"0000{i}-of-00003-00000{k}.tar": (4, 4, 2)[k] for i in range(3) for k in range(3)
    }
    assert not list((tmp_path / "out/.nv-meta/savable.writer").glob("*.index"))
    assert write(tmp_path / "out", samples(30)[1::3], max_samples=4, part=(1, 3)) == 10, "what is there is counted"


def test_saved_table_of_a_changed_shard_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, samples(3), part=(0, 2))
    write_tar(tmp_path / "00000-of-00002-000000.tar", [("other.txt", b"x")])
    assert keys(tmp_path) == ["other"]
    with pytest.raises(sp.SavableError, match="changed since it was written: another size"):
        (tmp_path / "00000-of-00002-000000.tar").write_bytes(b"")
        sp.ShardWriter(tmp_path, part=(0, 2))


def test_an_error_leaves_the_last_shard_unwritten_and_the_rest_safe(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), sp.ShardWriter(tmp_path, max_samples=2) as writer:
        for sample in samples(5):
            writer.write(sample)
        raise ZeroDivisionError
    assert writer.written == 4 and sorted(p.name for p in tmp_path.glob("*.tar")) == ["000000.tar", "000001.tar"]
    with pytest.raises(ValueError, match=r"was left by an error. Open another to continue"):
        writer.write(samples(1)[0])
    assert write(tmp_path, samples(5), max_samples=2) == 5 and len(keys(tmp_path)) == 5


def test_full_disk_is_one_clear_error_and_the_next_writer_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ShardFile.add

    def full(shard: ShardFile, key: str, parts: dict[str, bytes]) -> None:
        if key == "0005":
            raise OSError(errno.ENOSPC, "No space left on device")
        add(shard, key, parts)

    with monkeypatch.context() as patched:
        patched.setattr(ShardFile, "add", full)
        with pytest.raises(sp.SavableError, match="disk or quota is full"):
            write(tmp_path / "out", samples(9), max_samples=2)
    assert write(tmp_path / "out", samples(9), max_samples=2) == 9
    write(tmp_path / "calm", samples(9), max_samples=2)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "calm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bytes": 1_000}, "max_bytes=256000000, max_samples=None, part=None, here max_bytes=1000"),
        ({"part": (0, 2)}, "was started with other settings"),
    ],
)
def test_other_settings_are_rejected(tmp_path: Path, settings: Sample, message: str) -> None:
    write(tmp_path, samples(2))
    with pytest.raises(sp.SavableError, match=message):
        sp.ShardWriter(tmp_path, **settings)


def test_foreign_folders_are_rejected_and_unchanged(tmp_path: Path) -> None:
    write_tar(tmp_path / "tars/a.tar", [("k.txt", b"x")])
    run_conversion(write_captioned_images(tmp_path / "in", 2), tmp_path / "converted", SMALL)
    before = file_hashes(tmp_path)
    for name in ("tars", "converted"):
        with pytest.raises(sp.SavableError, match="of another origin"):
            sp.ShardWriter(tmp_path / name)
    assert file_hashes(tmp_path) == before
    with sp.ShardWriter(tmp_path / "out", max_samples=2), pytest.raises(sp.SavableError, match="another writer is at"):
        sp.ShardWriter(tmp_path / "out", max_samples=2)
    write(tmp_path / "out", samples(4), max_samples=2)
    (tmp_path / "out/000000.tar").unlink()
    with pytest.raises(sp.SavableError, match=r"000000\.tar is gone, but later shards are there"):
        sp.ShardWriter(tmp_path / "out", max_samples=2)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"txt": "x"}, "a sample needs a '__key__'"),
        ({"__key__": "a"}, "needs parts"),
        ({"__key__": "a.b", "txt": "x"}, "name that a tar cannot carry"),
        ({"__key__": "a", "txt": "x", "TXT": "x"}, "whose names differ in more than case"),
        ({"__key__": "0000", "txt": "x"}, "two samples in a row have the key '0000'"),
        ({"__key__": "a", "json": {"x": float("nan")}}, "cannot be JSON"),
        ({"__key__": "a", "json": {"x": b""}}, "cannot be JSON"),
        ({"__key__": "a", "npy": np.array([None])}, "has the type ndarray"),
        ({"__key__": "a", "jpg": object()}, "has the type object. Pass bytes"),
        ({"__key__": "a", "cls": True}, "has the type bool"),
    ],
)
def test_invalid_sample_is_an_error_that_names_it(tmp_path: Path, sample: Sample, message: str) -> None:
    with sp.ShardWriter(tmp_path) as writer:
        writer.write(samples(1)[0])
        with pytest.raises((ValueError, TypeError), match=message):
            writer.write(sample)
    assert keys(tmp_path) == ["0000"]


@pytest.mark.parametrize("settings", [{"max_bytes": 0}, {"max_samples": 0}, {"part": (2, 2)}, {"part": (-1, 2)}])
def test_invalid_writer_settings_are_rejected(tmp_path: Path, settings: Sample) -> None:
    with pytest.raises(ValueError):
        sp.ShardWriter(tmp_path, **settings)


def test_loop_that_would_write_samples_twice_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, samples(5), max_samples=2)
    with sp.ShardWriter(tmp_path, max_samples=2) as writer:
        with pytest.raises(ValueError, match=r"'0000' is the first of 5 .*writer\.written"):
            writer.write(samples(1)[0])
        writer.write({"__key__": "another", "txt": "goes on"})
    assert keys(tmp_path) == ["0000", "0001", "0002", "0003", "0004", "another"]
    with sp.ShardWriter(tmp_path, max_samples=2) as writer:
        writer.write({"__key__": "later", "txt": "goes on"})
        writer.write({"__key__": "0000", "txt": "is not the first of this loop"})
