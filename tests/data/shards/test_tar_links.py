"""Links in tars: counted in the index and told with the cure, and what they lead to, by their kind and their place."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import savable_pipeline as sp
from savable_pipeline.data.shards import index_writer
from savable_pipeline.data.shards.index_file import Header, Links
from savable_pipeline.data.shards.indexing import open_index
from savable_pipeline.data.shards.scan import TARS
from savable_pipeline.data.shards.tar_index import TarIndex
from savable_pipeline.data.shards.tar_links import linked_samples

HARD, SYMBOLIC = tarfile.LNKTYPE, tarfile.SYMTYPE
FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}
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


def linked(path: Path) -> tuple[dict[str, dict[str, bytes]], list[tuple[str, str]]]:
    """The samples with what links lead to, and the links that are no part."""
    with path.open("rb") as file:
        extents, lost = linked_samples(path.name, file.fileno())
        found = {
            extent.key: {
                extension: os.pread(file.fileno(), member.size, member.payload)
                for extension, member in zip(extent.extensions, extent.members, strict=True)
            }
            for extent in extents
        }
    return found, [(member.name, reason) for member, reason in lost]


FEW: list[Entry] = [
    ("a.jpg", b"image a"),
    ("a.txt", b"text"),
    ("b.jpg", b"image b"),
    ("b.txt", (HARD, "a.txt")),
    ("c.jpg", (SYMBOLIC, "a.jpg")),
    ("c.txt", (HARD, "b.txt")),
]
WHOLE = {
    "a": {"jpg": b"image a", "txt": b"text"},
    "b": {"jpg": b"image b", "txt": b"text"},
    "c": {"jpg": b"image a", "txt": b"text"},
}


@pytest.mark.parametrize("form", FORMATS)
def test_links_lead_to_files_over_other_links_in_all_formats(tmp_path: Path, form: str) -> None:
    assert linked(write(tmp_path / "a.tar", FEW, FORMATS[form])) == (WHOLE, [])


@pytest.mark.parametrize("form", ["gnu", "pax"])
@pytest.mark.parametrize("kind", [HARD, SYMBOLIC])
def test_targets_of_any_length_are_found(tmp_path: Path, form: str, kind: bytes) -> None:
    folder = "folder-of-a-long-name/" * 9
    target = f"{folder}a.txt" if kind == HARD else "a.txt"
    path = write(tmp_path / "a.tar", [(f"{folder}a.txt", b"x"), (f"{folder}b.txt", (kind, target))], FORMATS[form])
    assert linked(path)[0] == {f"{folder}a": {"txt": b"x"}, f"{folder}b": {"txt": b"x"}}


def test_targets_are_found_however_they_are_spelled(tmp_path: Path) -> None:
    entries: list[Entry] = [
        ("./s/1.jpg", (SYMBOLIC, "../blobs/f00")),  # as in the cache of the HF hub
        ("./s/2.jpg", (HARD, "/blobs/f00")),
        ("./blobs/f00", b"blob"),
    ]
    assert linked(write(tmp_path / "a.tar", entries)) == ({"./s/1": {"jpg": b"blob"}, "./s/2": {"jpg": b"blob"}}, [])


def test_of_two_files_of_one_name_the_one_before_the_link_is_meant(tmp_path: Path) -> None:
    entries: list[Entry] = [
        ("a.txt", b"first"),
        ("b.txt", (HARD, "a.txt")),
        ("c.jpg", b"image"),
        ("a.txt", b"second"),
        ("d.txt", (HARD, "a.txt")),
    ]
    found = linked(write(tmp_path / "a.tar", entries))[0]
    assert (found["b"], found["d"]) == ({"txt": b"first"}, {"txt": b"second"})


def test_links_that_lead_nowhere_in_a_circle_or_to_a_name_that_is_taken_are_no_parts(tmp_path: Path) -> None:
    entries: list[Entry] = [
        ("a.txt", b"text"),
        ("a.jpg", (SYMBOLIC, "gone.jpg")),
        ("b.txt", (SYMBOLIC, "c.txt")),
        ("c.txt", (SYMBOLIC, "b.txt")),
        ("d.txt", (SYMBOLIC, "d.txt")),
        ("e.txt", (SYMBOLIC, "../../etc/passwd")),
        ("a.txt", (HARD, "a.txt")),
        ("__meta__/x.txt", (HARD, "a.txt")),
        ("plain", (HARD, "a.txt")),
    ]
    nowhere, several = "it leads to no file of the tar", "twice in its sample"
    found, lost = linked(write(tmp_path / "a.tar", entries))
    assert found == {"a": {"txt": b"text"}}
    names = ["a.jpg", "b.txt", "c.txt", "d.txt", "e.txt"]
    assert lost == [*((name, nowhere) for name in names), ("a.txt", several)]


def test_a_link_between_the_files_of_a_sample_does_not_tear_it(tmp_path: Path) -> None:
    entries: list[Entry] = [
        ("b.txt", (SYMBOLIC, "a.txt")),
        ("a.jpg", b"i"),
        ("b.cls", (HARD, "a.jpg")),
        ("a.txt", b"t"),
        ("b.jpg", b"j"),
    ]
    path = write(tmp_path / "a.tar", entries)
    assert linked(path)[0] == {"b": {"txt": b"t", "cls": b"i", "jpg": b"j"}, "a": {"jpg": b"i", "txt": b"t"}}


def test_what_gnu_tar_writes_of_two_names_of_one_file_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("same")
    (folder / "b.txt").hardlink_to(folder / "a.txt")
    (folder / "c.txt").symlink_to("a.txt")
    subprocess.run(["tar", "cf", tmp_path / "a.tar", "-C", folder, "."], check=True)
    assert {key: parts["txt"] for key, parts in linked(tmp_path / "a.tar")[0].items()} == dict.fromkeys(
        ["./a", "./b", "./c"], b"same"
    )


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
        assert f"`savable convert {tmp_path}/d DST`" in text
    index = TarIndex(tmp_path / "d/.nv-meta/savable.index")
    assert (index.links, index.links_known) == ({0: Links(3, "b.txt")}, True)


def test_links_are_kept_when_shards_are_added(tmp_path: Path, warned: Callable[[Path], list[str]]) -> None:
    write(tmp_path / "d/0.tar", FEW)
    open_index(tmp_path / "d", ["0.tar"], TARS)
    write(tmp_path / "d/1.tar", [])
    write(tmp_path / "d/-.tar", [])
    assert "3 members are links" in warned(tmp_path / "d")[-1]
    assert TarIndex(tmp_path / "d/.nv-meta/savable.index").links == {1: Links(3, "b.txt")}


def test_an_index_of_an_earlier_release_is_read_as_it_is_and_says_nothing_of_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[Path], list[str]]
) -> None:
    write(tmp_path / "d/0.tar", FEW)

    def earlier(*fields: object) -> object:
        return [msgspec.to_builtins(Header(*fields))[:7]][0]  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(index_writer, "Header", earlier)
        open_index(tmp_path / "d", ["0.tar"], TARS)
    path = tmp_path / "d/.nv-meta/savable.index"
    before = path.read_bytes()
    assert warned(tmp_path / "d") == []
    assert path.read_bytes() == before
    assert (TarIndex(path).links, TarIndex(path).links_known) == ({}, False)
