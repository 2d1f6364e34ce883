"""What a source is taken for, by its marks; and what is refused, with what to do."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, find_files, run_conversion
from tests.conftest import write_tar
from tests.data.test_layouts import LAYOUTS, Layout
from tests.support.toy_files import SMALL, tar_files, write_captioned_images

LIST = b'[\n {"a": 1}]'
HTTP = b"url\nhttp://x/a.jpg\n"


def files(folder: Path, *names: str, **contents: bytes) -> Path:
    for name, content in {**dict.fromkeys(names, b"x"), **contents}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "format", "packed"),
    [
        ("a.jsonl", b"{}\n", "jsonl", 0),
        ("a.ndjson.gz", b"", "jsonl", 1),
        ("a.json", b"\xef\xbb\xbf" + LIST, "json", 0),
        ("a.json.gz", gzip.compress(LIST, mtime=0), "json", 1),
        ("a.json.gz", gzip.compress(b'{"a": 1}\n{"a": 2}\n', mtime=0), "jsonl", 1),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "jsonl", 0),
        ("a.csv", b"", "csv", 0),
        ("a.tsv.xz", b"", "csv", 1),
        ("a.tar", b"", "tar", 0),
        ("a.tar", gzip.compress(b"", mtime=0), "tar", 1),
        ("a.tgz", b"", "tar", 1),
        ("a.parquet", b"", "parquet", 0),
        ("a.arrow", b"", "arrow", 0),
    ],
)
def test_file_is_recognized_by_name_and_first_bytes(
    tmp_path: Path, name: str, content: bytes, format: str, packed: int
) -> None:
    files(tmp_path, **{name: content})
    found = find_files(tmp_path / name)
    assert (found.form.name, len(found.packed)) == (format, packed)


@pytest.mark.parametrize("layout", [pytest.param(each, id=each.name) for each in LAYOUTS])
def test_layout_has_the_format_that_it_is_read_with(tmp_path: Path, layout: Layout) -> None:
    root = tmp_path / "data"
    root.mkdir()
    layout.write(root)
    if layout.name == "compressed tars":  # which only a conversion reads
        assert len(find_files(root).packed) == 1
    elif error := "cut no recordings" if layout.name == "Kaldi with segments" else layout.error:
        with pytest.raises(ValueError, match=error):
            find_files(root)
    else:
        assert find_files(root).form.name == layout.kind


def test_compressed_files_in_a_folder_of_plain_ones_are_converted_if_they_are_named(tmp_path: Path) -> None:
    files(tmp_path, "a.tar.gz", "c.tar", "d.TAR", "README.md")
    assert find_files(tmp_path).packed == ()  # reading skips them with a warning
    assert [each.name for each in find_files(f"{tmp_path}/*.[tT]*").packed] == ["a.tar.gz", "c.tar", "d.TAR"]


def test_compressed_files_in_a_folder_of_plain_ones_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = files(tmp_path / "in", **{"a.jsonl": b"{}\n", "b.jsonl.gz": gzip.compress(b"{}\n{}\n")})
    assert run_conversion(source, tmp_path / "out", SMALL).samples == len(sp.open_dataset(source)) == 1
    assert (
        "1 compressed jsonl files are skipped. Unpack them, or name them in `savable convert`, such as" in caplog.text
    )


def test_recognized_format_is_printed_and_can_be_set(tmp_path: Path) -> None:
    source = files(tmp_path / "in", "a.jpg", **{"rows.parquet": b""})
    arguments = ["convert", str(source), str(tmp_path / "out"), "--no-check-images"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2 and 'Pass format="parquet" or format="folder"' in refused.stderr
    told = CliRunner().invoke(app, [*arguments, "--format", "folder"])
    assert told.exit_code == 0 and told.stderr.startswith(f"reading {source}: format folder\n")
    told = CliRunner().invoke(app, [*arguments, "--format", "files"])
    assert told.exit_code == 2 and "no format 'files'. Use one of tar, mds" in told.stderr


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_records_that_name_urls_are_rejected_before_anything_is_written(tmp_path: Path, name: str) -> None:
    files(tmp_path, **{"a.jsonl": b'{"image": "https://x/a.jpg"}\n', "a.csv": HTTP})
    with pytest.raises(ValueError, match=r"URLs, not files.* with img2dataset"):
        run_conversion(tmp_path / name, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()
    assert run_conversion(tmp_path / name, tmp_path / "out", Options(file_fields=())).samples == 1
    assert b"http" in tar_files(tmp_path / "out")[f"00000000{1 + 0}.json"]
    with pytest.raises(ValueError, match=r"a Path cannot hold a URL. Pass it as a str"):
        find_files(Path("s3://bucket/data"))


def test_source_url_is_recognized(tmp_path: Path) -> None:
    files(tmp_path, **{"a.jsonl": b'[1]\n{"image": "https://x/a.jpg"}\n'})
    with pytest.raises(ValueError, match=r"such as the field 'image' names 'https://x/a\.jpg'. Download"):
        run_conversion(tmp_path / "a.jsonl", tmp_path / "out", SMALL)


def test_tars_are_read_unchanged_with_a_message(tmp_path: Path) -> None:
    write_tar(tmp_path / "in/a.tar", [("k.txt", b"x")])
    with pytest.raises(ValueError, match=r"tars need no conversion\. Read them by sp\.read.* --reshard"):
        run_conversion(tmp_path / "in", tmp_path / "out", SMALL)
    with pytest.raises(ValueError, match="has the format folder: --reshard is only for tars"):
        run_conversion(write_captioned_images(tmp_path / "files", 2), tmp_path / "out", SMALL, reshard=True)
    (tmp_path / "in/a.tar").rename(tmp_path / "in/a.tar.gz")
    assert run_conversion(tmp_path / "in", tmp_path / "out", SMALL, reshard=True).samples == 1
