"""Links in tars: counted in the index and told with the cure."""

from __future__ import annotations

import io
import logging
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import savable_pipeline as sp
from savable_pipeline.data.shards.indexing import open_index
from savable_pipeline.data.shards.tar_format import TARS, Links, TarIndex

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


def test_what_the_cure_writes_has_the_bytes_that_links_lead_to(
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


def test_links_are_kept_when_shards_are_added(tmp_path: Path, warned: Callable[[Path], list[str]]) -> None:
    write(tmp_path / "d/0.tar", FEW)
    open_index(tmp_path / "d", ["0.tar"], TARS)
    write(tmp_path / "d/1.tar", [])
    write(tmp_path / "d/-.tar", [])
    assert "3 members are links" in warned(tmp_path / "d")[-1]
    assert TarIndex(tmp_path / "d/.nv-meta/savable.index").links == {1: Links(3, "b.txt")}
