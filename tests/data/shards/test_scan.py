"""What a scan says of a shard from which samples may be lost, though it is a tar to its end; and of links in tars."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import savable_pipeline as sp
from savable_pipeline.data.shards.indexing import open_index
from savable_pipeline.data.shards.tar_format import Links, TarIndex
from savable_pipeline.data.stores.tar_store import TARS
from tests.conftest import write_tar


def told(path: Path, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    table = TARS.scan(path.parent, path.name)
    assert not table.entry.fault
    return caplog.text


def test_tar_with_less_than_half_sample_bytes_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"x" * 20_000), ("README", b"r" * 15_000)])
    write_tar(tmp_path / "b.tar", [("k.txt", b"x" * 10_000), ("README", b"r" * 15_000)])
    write_tar(tmp_path / "c.tar", [("k.txt", b"x")])  # a record of zeros, as every small tar has it
    write_tar(tmp_path / "d.tar", [])
    assert told(tmp_path / "a.tar", caplog) == ""
    assert "b.tar: its 1 samples take 10752 of 30720 bytes" in told(tmp_path / "b.tar", caplog)
    assert told(tmp_path / "c.tar", caplog) == ""
    assert "d.tar: its 0 samples take 0 of 10240 bytes" in told(tmp_path / "d.tar", caplog)


def test_zeros_beyond_a_record_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [(f"k{i}.txt", b"x" * 1000) for i in range(100)])
    raw = path.read_bytes()
    path.write_bytes(raw[: 80 * 1536] + bytes(len(raw) - 80 * 1536))
    assert "bytes of zeros at its end, where tars mostly have at most 11264" in told(path, caplog)
    path.write_bytes(raw)
    assert told(path, caplog) == ""
    os.truncate(path, -(-(100 * 1536 + 1024) // 65536) * 65536)  # a record of 128 blocks
    assert told(path, caplog) == ""


def test_samples_with_scattered_members_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = [f"k{i}" for i in range(3)]
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{key}.{extension}", b"x" * 9000) for extension in ("jpg", "txt") for key in keys])
    assert "a.tar: the files of 3 samples do not lie side by side, such as those of 'k0'" in told(path, caplog)
    write_tar(path, [(f"{key}.{extension}", b"x" * 9000) for key in keys for extension in ("jpg", "txt")])
    assert told(path, caplog) == ""
    write_tar(path, [(f"{key}.txt", b"x" * 9000) for key in keys * 2])  # which are samples that come twice
    assert told(path, caplog) == ""


HARD, SYMBOLIC = tarfile.LNKTYPE, tarfile.SYMTYPE
Entry = tuple[str, bytes | tuple[bytes, str]]


def write(path: Path, entries: list[Entry], form: int = tarfile.GNU_FORMAT) -> Path:
    """A tar of files, and of links: kind and target."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content
                tar.addfile(info)
    return path


FEW: list[Entry] = [
    ("a.jpg", b"image a"),
    ("a.txt", b"text"),
    ("b.jpg", b"image b"),
    ("b.txt", (HARD, "a.txt")),
    ("c.jpg", (SYMBOLIC, "a.jpg")),
    ("c.txt", (HARD, "b.txt")),
]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[Path], list[str]]:
    """What is warned of while a reader opens a dataset."""

    def look(path: Path) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            reader = sp.TarShardReader(path, sp.Lane(), shuffle=False, epochs=1)
        assert [sample.key for sample in reader] == ["a", "b"]  # as in webdataset and Energon
        return [record.getMessage() for record in caplog.records]

    return look


def test_a_reader_warns_of_links_when_it_indexes_and_whenever_it_opens(
    tmp_path: Path, warned: Callable[[Path], list[str]]
) -> None:
    write(tmp_path / "d/0.tar", FEW)
    for _ in range(2):
        (text,) = warned(tmp_path / "d")
        assert text.startswith(f"{tmp_path}/d: 3 members are links to other files of their tar, such as b.txt in 0.tar")
        assert "pack the files again with `tar --hard-dereference`, and `--dereference` for symbolic links" in text
    index = TarIndex(tmp_path / "d/.nv-meta/savable.index")
    assert index.links == {0: Links(3, "b.txt")}


def test_suggested_fix_writes_the_bytes_that_links_refer_to(
    tmp_path: Path, warned: Callable[[Path], list[str]]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "d").mkdir()
    (folder / "a.txt").write_text("same")
    (folder / "b.txt").hardlink_to(folder / "a.txt")
    (folder / "b.cls").symlink_to("a.txt")
    cure = ["--hard-dereference", "--dereference"]
    subprocess.run(["tar", "cf", tmp_path / "d/0.tar", *cure, "-C", folder, "a.txt", "b.cls", "b.txt"], check=True)
    assert warned(tmp_path / "d") == []
    found = {sample.key: dict(sample) for sample in sp.open_dataset(tmp_path / "d")}
    assert found == {"a": {"txt": b"same"}, "b": {"cls": b"same", "txt": b"same"}}


def test_counted_links_stay_in_the_index_when_shards_are_added(
    tmp_path: Path, warned: Callable[[Path], list[str]]
) -> None:
    write(tmp_path / "d/0.tar", FEW)
    open_index(tmp_path / "d", ["0.tar"], TARS)
    write(tmp_path / "d/1.tar", [])
    write(tmp_path / "d/-.tar", [])
    assert "3 members are links" in warned(tmp_path / "d")[-1]
    assert TarIndex(tmp_path / "d/.nv-meta/savable.index").links == {1: Links(3, "b.txt")}
