"""Compressed tars, whose samples `savable convert` writes into shards of its size."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, find_files, run_conversion
from tests.conftest import write_tar
from tests.support.toy_files import file_hashes, reject_reasons


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder of five tars of two samples each, compressed in four ways."""
    source = tmp_path / "in"
    kinds: dict[str, Any] = {
        "a.tar.gz": gzip,
        "b/c.tgz": gzip,
        "d.tar.bz2": bz2,
        "e.tar.xz": lzma,
        "f.tar.zst": zstandard,
    }
    for i, (name, kind) in enumerate(kinds.items()):
        write_tar(tmp_path / "plain.tar", [(f"k{2 * i + n}.txt", b"text %d" % (2 * i + n)) for n in range(2)])
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(kind.compress((tmp_path / "plain.tar").read_bytes()))
    return source


def texts(root: Path) -> list[str]:
    return [sample.text() for sample in sp.TarShardReader(root, sp.Lane(), shuffle=False, epochs=1)]


def test_compressed_tars_are_rejected_by_the_reader_and_read_after_a_conversion(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(sp.ShardError, match="run `savable convert`"):
        sp.TarShardReader(packed / "a.tar.gz", sp.Lane())
    told: list[Any] = []
    report = run_conversion(packed, tmp_path / "out", Options(), progress=lambda *numbers: told.append(numbers))
    assert (report.samples, report.shards, report.rejected) == (10, 1, [])
    assert told[0] == (0, 5, 0) and told[-1][:2] == (5, 5)
    assert [path.name for path in (tmp_path / "out").rglob("*.tar")] == ["000000.tar"]
    assert texts(tmp_path / "out") == [f"text {i}" for i in range(10)]
    train = sp.TarShardReader(tmp_path / "out", sp.Lane(), split="train", epochs=1)
    assert train.population == 10
    before = file_hashes(tmp_path / "out")
    run_conversion(packed, tmp_path / "out", Options())  # there is nothing left to do
    assert file_hashes(tmp_path / "out") == before


def test_single_tar_is_repacked(packed: Path, tmp_path: Path) -> None:
    assert run_conversion(packed / "d.tar.bz2", tmp_path / "out", Options()).samples == 2
    assert texts(tmp_path / "out") == ["text 4", "text 5"]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_compressed_tar_named_like_a_plain_one_is_reported_and_converted(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    folder = tmp_path / "in"
    for name, first in (("a.tar", 0), ("b.tar", 2)):
        write_tar(folder / name, [(f"k{first + n}.txt", b"text %d" % (first + n)) for n in range(2)])
    (folder / "b.tar").write_bytes(compress((folder / "b.tar").read_bytes()))
    told = "a compressed tar cannot be read at an offset. Re-pack it by `savable convert`"
    with pytest.raises(sp.ShardError, match=f"b.tar: {told}"):
        sp.TarShardReader(folder, sp.Lane())
    for command, code in (("info", 2), ("check", 1), ("preview", 2)):
        more = ["-o", str(tmp_path / "page.html")] if command == "preview" else []
        result = CliRunner().invoke(app, [command, str(folder / "b.tar"), *more], catch_exceptions=False)
        assert result.exit_code == code and told in " ".join(result.output.split()), result.output
    for source, target, count in ((folder, "all", 4), (folder / "b.tar", "one", 2)):
        result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / target)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert len(texts(tmp_path / target)) == count


def test_a_plain_tar_whose_first_name_looks_compressed_is_plain(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("BZh9.txt", b"text 0")])
    assert not find_files(tmp_path / "a.tar").packed and texts(tmp_path / "a.tar") == ["text 0"]
    shutil.copy(tmp_path / "a.tar", tmp_path / "b.tar.gz")  # as a server leaves it that unpacks what it sends
    assert run_conversion(tmp_path / "b.tar.gz", tmp_path / "out", Options()).samples == 1


def test_suffixes_in_capitals_are_recognized(packed: Path, tmp_path: Path) -> None:
    (packed / "a.tar.gz").rename(packed / "a.TAR.GZ")
    (packed / "b/c.tgz").rename(packed / "b/c.TGZ")
    (packed / "d.tar.bz2").rename(packed / "d.Tar.Bz2")
    (packed / "f.tar.zst").rename(packed / "f.TAR.Zst")
    assert run_conversion(packed, tmp_path / "out", Options()).samples == 10
    assert texts(tmp_path / "out") == [f"text {i}" for i in range(10)]
    assert run_conversion(packed / "a.TAR.GZ", tmp_path / "one", Options()).samples == 2


def test_plain_tars_are_converted_with_compressed_ones_if_both_are_named(packed: Path, tmp_path: Path) -> None:
    write_tar(packed / "h.tar", [("k10.txt", b"text 10")])
    assert run_conversion(f"{packed}/*.*", tmp_path / "out", Options()).samples == 9
    assert run_conversion(packed, tmp_path / "plain", Options(), reshard=True).samples == len(texts(packed)) == 1


def test_settings_apply_to_compressed_tars_as_to_plain_ones(packed: Path, tmp_path: Path) -> None:
    options = Options(shard_samples=3, split=(("a", "0.5"), ("b", "0.5")))
    assert run_conversion(packed, tmp_path / "out", options, keys=[f"k{i}" for i in range(8)]).samples == 8
    assert max(len(texts(path)) for path in (tmp_path / "out").glob("*.tar")) == 3
    report = run_conversion(packed, tmp_path / "small", Options(shard_samples=3), workers=2)
    assert [path.name for path in sorted((tmp_path / "small").glob("*.tar"))] == [f"{i:06d}.tar" for i in range(4)]
    assert sorted(texts(tmp_path / "small")) == [f"text {i}" for i in range(10)] and report.shards == 4
    with pytest.raises(ValueError, match="key= does not apply to tar files"):
        run_conversion(packed, tmp_path / "wrong", Options(key_field="id"))


def test_compressed_tar_that_changes_during_conversion_is_an_error(packed: Path, tmp_path: Path) -> None:
    raw, later = (packed / "f.tar.zst").read_bytes(), packed / "f.tar.zst"
    with pytest.raises(
        SavableError, match=r"f\.tar\.zst: another file than at the start: it changed during the conversion"
    ):
        run_conversion(packed, tmp_path / "out", Options(), progress=lambda *_: later.write_bytes(raw[::-1]))


def test_damaged_tars_are_skipped_and_reported(packed: Path, tmp_path: Path) -> None:
    whole = (packed / "a.tar.gz").read_bytes()
    (packed / "a.tar.gz").write_bytes(whole[:-20])
    (packed / "d.tar.bz2").write_bytes(b"no bz2")
    (packed / "e.tar.xz").write_bytes(lzma.compress(b"no tar" * 1000))
    (packed / "g.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    report = run_conversion(packed, tmp_path / "out", Options())
    assert report.samples == 4
    found = {Path(name).name: reason for name, reason in reject_reasons(tmp_path / "out").items()}
    assert found == dict.fromkeys(["a.tar.gz", "d.tar.bz2", "e.tar.xz", "g.tar.zst"], "damaged tar")
    assert texts(tmp_path / "out") == ["text 2", "text 3", "text 8", "text 9"]


def test_other_tars_in_the_same_folder_are_rejected(packed: Path, tmp_path: Path) -> None:
    run_conversion(packed, tmp_path / "out", Options())
    with pytest.raises(SavableError, match="has another conversion"):
        run_conversion(packed / "a.tar.gz", tmp_path / "out", Options())
    with pytest.raises(ValueError, match="must not contain each other"):
        run_conversion(packed, packed / "out", Options())


def test_kill_between_a_shard_and_its_offsets_loses_nothing(packed: Path, tmp_path: Path) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    run_conversion(packed, tmp_path / "calm", Options())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("savable_pipeline.tools.convert.finish.tar_idx", killed)
        run_conversion(packed, tmp_path / "out", Options())
    run_conversion(packed, tmp_path / "out", Options())
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "calm")
