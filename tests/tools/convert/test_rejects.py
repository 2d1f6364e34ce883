"""`savable_pipeline.tools.convert`: what is rejected, with which reason, and that all the rest is written."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import savable_pipeline as sp
from savable_pipeline.tools.convert import Options, find_files, run_conversion
from tests.support.toy_files import SMALL, jpeg, reject_reasons, tar_files, write_captioned_images, write_lines

UNREADABLE, TAR_NAME = "unreadable image", "name that a tar cannot carry"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.jpg", b"no image", UNREADABLE),
        ("x.jpg", jpeg(3, side=256)[:-400], UNREADABLE),
        ("000.seg.PNG", jpeg(3)[:90], UNREADABLE),
        ("x.jpg", b"", "empty file"),
        ("x.json", b"{", "malformed JSON"),
        ("notes", b"x", "no extension"),
        ("x.", b"x", TAR_NAME),
        ("x._hidden", b"x", TAR_NAME),
        ("__meta__/x.txt", b"x", "named like metadata (__name__ or ._name)"),
        ("x\n.txt", b"x", TAR_NAME),
        ("x\udcff.txt", b"x", TAR_NAME),
        ("000.TXT", b"x", "two parts with one extension"),
        ("old.tar", b"x", "already a shard"),
    ],
)
def test_a_bad_file_of_a_folder_is_rejected_with_its_reason(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    source = find_files(write_captioned_images(tmp_path / "in", 4, **{name: content}), "folder")
    report = run_conversion(source, tmp_path / "out", SMALL)
    rejected = [reason] * (2 if name == "000.TXT" else 1)  # both files of one name
    assert [reject.reason for reject in report.rejected] == rejected
    assert list(reject_reasons(tmp_path / "out").values()) == rejected
    assert report.samples == (3 if name.startswith("000.") else 4)
    assert len(tar_files(tmp_path / "out")) == 2 * report.samples


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "malformed JSON"),
        (b"\xff{}", "malformed JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b"[1]", "not a JSON object"),
        ({}, "no key"),
        ({"id": None}, "no key"),
        ({"id": True}, "no key"),
        ({"id": "first"}, "duplicate key"),
        ({"id": "a.b"}, TAR_NAME),
        ({"id": "../a"}, TAR_NAME),
        ({"id": "/a"}, TAR_NAME),
        ({"id": "a/"}, TAR_NAME),
        ({"id": "./a"}, TAR_NAME),
        ({"id": "__a__/b"}, TAR_NAME),
        ({"id": "x", "image": 3}, "not a file's name"),
        ({"id": "x", "image": "gone.jpg"}, "missing file"),
        ({"id": "x", "image": "gone\x00.jpg"}, "missing file"),
        ({"id": "x", "image": "long" * 5000 + ".jpg"}, "missing file"),
        ({"id": "x", "image": "b"}, "no extension"),
        ({"id": "x", "image": "folder.d"}, "not a regular file"),
        ({"id": "x", "image": "../in/000.jpg"}, "outside the source"),
        ({"id": "x", "image": "/etc/host.conf"}, "outside the source"),
        ({"id": "x", "image": "link.txt"}, "outside the source"),
        ({"id": "x", "image": "empty.jpg"}, "empty file"),
        ({"id": "x", "image": "bad.jpg"}, UNREADABLE),
        ({"id": "x", "image": "000.jpg", "video": "b/001.jpg"}, "two parts with one extension"),
        ({"id": "x", "file": "x.json"}, "two parts with one extension"),
    ],
)
def test_a_bad_line_of_a_jsonl_is_rejected_with_its_reason(tmp_path: Path, line: Any, reason: str) -> None:
    write_captioned_images(
        tmp_path / "in", 2, **{"empty.jpg": b"", "bad.jpg": b"x", "x.json": b"{}", "folder.d/x.txt": b""}
    )
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "in/link.txt").symlink_to(tmp_path / "secret.txt")
    source = write_lines(tmp_path / "in/meta.jsonl", {"id": "first"}, line, {"id": "last"})
    report = run_conversion(source, tmp_path / "out", Options(key_field="id"))
    assert reject_reasons(tmp_path / "out") == {"bad.jpg" if reason == UNREADABLE else "meta.jsonl:2": reason}
    assert report.samples == 2
    assert list(tar_files(tmp_path / "out")) == ["first.json", "last.json"]


@pytest.mark.parametrize("workers", [1, 2])
def test_repeated_keys_of_other_ranges_are_rejected(tmp_path: Path, workers: int) -> None:
    source = write_lines(tmp_path / "in.jsonl", *({"id": f"{i % 25:02d}", "n": i} for i in range(60)))
    options = Options(key_field="id", shard_samples=3)
    report = run_conversion(source, tmp_path / "out", options, workers=workers)
    assert [reject.file for reject in report.rejected] == [f"in.jsonl:{i + 1}" for i in range(25, 60)]
    assert {reject.reason for reject in report.rejected} == {"duplicate key"}
    assert sorted(sample.json()["n"] for sample in sp.open_dataset(tmp_path / "out")) == [*range(25)]


def test_files_outside_the_source_are_accepted_with_an_option(tmp_path: Path) -> None:
    (write_captioned_images(tmp_path / "in", 1) / "link.txt").symlink_to(tmp_path / "words.txt")
    (tmp_path / "words.txt").write_text("words")
    source = write_lines(tmp_path / "in/meta.jsonl", {"file": "../words.txt"}, {"file": "link.txt"})
    options = Options(allow_outside=True)
    run_conversion(source, tmp_path / "one", options)
    run_conversion(find_files(tmp_path / "in", "folder"), tmp_path / "two", options)
    assert list(tar_files(tmp_path / "one").values()).count(b"words") == 2
    assert tar_files(tmp_path / "two")["link.txt"] == b"words"


def test_links_and_special_files_of_a_folder_are_followed_or_rejected(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 3)
    (tmp_path / "secret.txt").write_text("secret")
    (source / "inside.txt").symlink_to("000.txt")
    (source / "again").symlink_to("b")
    (source / "outside.txt").symlink_to("../secret.txt")
    (source / "b/loop").symlink_to("..")
    (source / "nowhere.txt").symlink_to("gone")
    os.mkfifo(source / "pipe.txt")
    run_conversion(source, tmp_path / "out", SMALL)
    assert {"inside.txt", "again/001.jpg"} <= set(tar_files(tmp_path / "out"))
    assert reject_reasons(tmp_path / "out") == {
        "outside.txt": "outside the source",
        "again/loop": "link to a folder above it",
        "b/loop": "link to a folder above it",
        "nowhere.txt": "missing file",
        "pipe.txt": "not a regular file",
    }


def test_empty_text_is_valid_and_hidden_files_are_only_counted(tmp_path: Path) -> None:
    extra = {"x.txt": b"", ".git/config.txt": b"x", ".DS_Store": b"", "a/.x.jpg": b"", "Thumbs.db": b"x"}
    report = run_conversion(write_captioned_images(tmp_path / "in", 1, **extra), tmp_path / "out", SMALL)
    assert (report.samples, report.rejected, report.hidden) == (2, [], 4)


def test_images_are_not_checked_with_an_option(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 2, **{"bad.jpg": b"no image"})
    report = run_conversion(source, tmp_path / "out", Options(check_images=False))
    assert report.samples == 3 and report.rejected == []


def test_shard_without_a_valid_sample_is_not_written(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 9, **{f"00{i}.jpg": b"bad" for i in (0, 3, 6)})
    report = run_conversion(source, tmp_path / "out", SMALL)
    assert (report.samples, report.shards) == (6, 2)
    assert [path.name for path in sorted((tmp_path / "out").glob("*.tar"))] == ["000000.tar", "000001.tar"]


def test_source_without_a_valid_sample_has_a_report_and_no_dataset(tmp_path: Path) -> None:
    report = run_conversion(
        write_captioned_images(tmp_path / "in", 0, notes=b"x", **{"x.jpg": b"x"}), tmp_path / "out", SMALL
    )
    assert (report.samples, report.shards, len(report.rejected)) == (0, 0, 2)
    assert sorted(path.name for path in (tmp_path / "out/.nv-meta").iterdir()) == [
        "savable.convert.json",
        "savable.hashes",
        "savable.rejected.jsonl",
    ]
    assert run_conversion(tmp_path / "in", tmp_path / "out", SMALL) == report


def test_reasons_are_the_same_each_time_and_large_images_draw_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)  # an image of 64 pixels warns, one of 256 is an error
    Image.new("L", (16, 16)).save(write_captioned_images(tmp_path / "in", 1, **{"x.jpg": b"GIF89a"}) / "huge.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = run_conversion(tmp_path / "in", tmp_path / "one", SMALL)
    assert [reject.file for reject in first.rejected] == ["huge.png", "x.jpg"]
    assert not any("0x" in reject.detail for reject in first.rejected)


def test_file_named_like_metadata_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (folder / "__phello__").mkdir(parents=True)
    (folder / "__phello__" / "spam.py").write_text("skip")
    (folder / "a.txt").write_text("a")
    report = run_conversion(folder, tmp_path / "shards", Options())
    assert [(reject.file, reject.reason) for reject in report.rejected] == [
        ("__phello__/spam.py", "named like metadata (__name__ or ._name)")
    ]
