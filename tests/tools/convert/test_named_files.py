"""Rows that name files without their bytes: taken from one folder, refused by column without it, none from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, Report, run_conversion
from tests.support.toy_files import reject_reasons
from tests.support.toy_samples import plain_png

MEDIA = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def png(i: int) -> bytes:
    return plain_png(2, 2 + i)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Six pictures, as the rows name them."""
    folder = tmp_path / "pictures/cats"
    folder.mkdir(parents=True)
    for i in range(6):
        (folder / f"{i}.png").write_bytes(png(i))
    return tmp_path / "pictures"


def write(path: Path, images: list[Any], kind: Any = MEDIA) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pa.table({"image": pa.array(images, kind), "caption": [f"c{i}" for i in range(len(images))]})
    if path.suffix == ".parquet":
        pq.write_table(rows, path, row_group_size=4)
    else:
        with pa.ipc.new_stream(path, rows.schema) as stream:
            stream.write_table(rows, max_chunksize=4)
    return path


def named(*paths: Any) -> list[Any]:
    return [{"bytes": None, "path": str(path)} for path in paths]


def with_bytes(*paths: Any) -> list[Any]:
    return [{"bytes": png(i), "path": str(path)} for i, path in enumerate(paths)]


def tars(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.rglob("*.tar"))]


def taken(source: Path, target: Path, files: Path, **options: Any) -> Report:
    return run_conversion(source, target, Options(**options), files_from=files, workers=1)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_without_their_folder_rows_that_name_files_are_an_error_by_column(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, [*named(*range(5)), *with_bytes("5.png")])
    with pytest.raises(
        ValueError, match=r"rows of the column 'image' have a path and no bytes. Pass --files-from FOLDER"
    ):
        run_conversion(source, tmp_path / "out", Options())
    assert not (tmp_path / "out").exists()
    assert run_conversion(source, tmp_path / "captions", Options(only=("caption",))).samples == 6


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("absolute", [False, True])
def test_with_their_folder_named_files_equal_inline_bytes(
    tmp_path: Path, pictures: Path, name: str, absolute: bool
) -> None:
    paths = [(pictures if absolute else Path()) / f"cats/{i}.png" for i in range(6)]
    report = taken(write(tmp_path / "named" / name, named(*paths)), tmp_path / "out", pictures, shard_samples=4)
    assert (report.samples, report.rejected, report.nulls) == (6, [], {})
    run_conversion(write(tmp_path / "whole" / name, with_bytes(*paths)), tmp_path / "other", Options(shard_samples=4))
    assert tars(tmp_path / "out") == tars(tmp_path / "other")
    assert sp.open_dataset(tmp_path / "out")[5]["png"] == png(5)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_image_lists_are_the_same_parts_in_place_and_converted(tmp_path: Path, pictures: Path, name: str) -> None:
    paths = [f"cats/{i}.png" for i in range(6)]
    images, files = with_bytes(*paths), named(*paths)
    whole = write(tmp_path / "whole" / name, [images[:2], [], images[2:]], pa.list_(MEDIA))
    run_conversion(whole, tmp_path / "out", Options())
    there, here = sp.open_dataset(whole), sp.open_dataset(tmp_path / "out")
    assert [dict(sample) for sample in there] == [dict(sample) for sample in here]
    assert sorted(here[2]) == ["0.png", "1.png", "2.png", "3.png", "caption"]
    taken(write(tmp_path / "named" / name, [files[:2], [], files[2:]], pa.list_(MEDIA)), tmp_path / "named", pictures)
    assert tars(tmp_path / "named") == tars(tmp_path / "out")


def test_path_out_of_the_folder_is_rejected_by_name(tmp_path: Path, pictures: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png(0))
    (pictures / "link.png").symlink_to(tmp_path / "secret.png")
    (pictures / "out").symlink_to(tmp_path)
    (pictures / "inside.png").symlink_to("cats/1.png")
    rows = [
        "../secret.png",
        "cats/../../secret.png",
        tmp_path / "secret.png",
        "link.png",
        "out/secret.png",
        "https://host/0.png",
        "hf://datasets/a/b/0.png",
        "gone.png",
        "cats",
        "cats.d/",
        "nul\0.png",
        "inside.png",
    ]
    report = taken(write(tmp_path / "a.parquet", named(*rows)), tmp_path / "out", pictures)
    assert report.samples == 1
    outside, url = "outside the folder of the files", "a URL, not a file"
    expected = [outside] * 5 + [url] * 2 + ["missing file", "no extension", "no extension", "missing file"]
    assert list(reject_reasons(tmp_path / "out").values()) == expected


def test_link_changed_to_lead_out_is_rejected_when_read(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from savable_pipeline.tools.convert import conversion

    prepare = conversion.prepare_source
    source = write(tmp_path / "a.parquet", named("cats/0.png"))
    (tmp_path / "secret.png").write_bytes(png(0))

    def replaced(*args: Any) -> Any:
        (pictures / "cats/0.png").unlink()
        (pictures / "cats/0.png").symlink_to(tmp_path / "secret.png")
        return prepare(*args)

    monkeypatch.setattr(conversion, "prepare_source", replaced)
    (reject,) = taken(source, tmp_path / "out", pictures).rejected
    assert reject.reason == "outside the folder of the files"


def test_exchanged_folder_is_detected(tmp_path: Path, pictures: Path) -> None:
    source = write(tmp_path / "a.parquet", named("cats/0.png", "cats/1.png"))
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside/0.png").write_bytes(png(0))
    (tmp_path / "aside/1.png").write_bytes(png(1)[:-1] + b"x")
    taken(source, tmp_path / "out", pictures)
    assert taken(source, tmp_path / "out", pictures).samples == 2  # again: all is there
    (pictures / "cats").rename(tmp_path / "before")
    (tmp_path / "aside").rename(pictures / "cats")
    with pytest.raises(sp.SavableError, match=r"1 files changed at the same size.*\n.*1\.png"):
        taken(source, tmp_path / "out", pictures)


def test_nothing_rejected_is_printed_only_if_every_value_was_converted(tmp_path: Path, pictures: Path) -> None:
    def said(images: list[Any], *more: str) -> str:
        source = write(tmp_path / "a.parquet", images)
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        return CliRunner().invoke(app, ["convert", str(source), str(target), *more]).output

    whole = with_bytes("0.png", "1.png")
    assert "nothing rejected" in said(whole)
    text = said([*whole, None, {"bytes": None, "path": None}])
    assert "null, and so no part: image in 2 samples" in text
    assert "no sample rejected" in text
    assert "nothing rejected" not in text
    assert "nothing rejected" in said([*whole, None], "--only", "caption")
    assert "image in 1 sample" in said([*whole, None], "--only", "caption,png")
    assert "nothing rejected" in said(named("cats/0.png"), "--files-from", str(pictures))
    assert "no row names a file without its bytes: --files-from is not needed" in said(
        whole, "--files-from", str(pictures)
    )
    assert "no such folder. Pass the one with the files" in said(whole, "--files-from", str(tmp_path / "gone"))


def test_info_and_check_count_nulls_and_empty_parts_and_name_the_command(tmp_path: Path) -> None:
    rows = [*with_bytes("0.png"), None, *named("gone/2.png"), {"bytes": b"", "path": "3.raw"}]
    source = write(tmp_path / "a.parquet", rows)
    told = "the column 'image': 1 of 4 rows have a path and no bytes"
    for command, code in (("info", 0), ("check", 1)):
        result = CliRunner().invoke(app, [command, str(source)])
        text = " ".join(result.output.split())
        assert result.exit_code == code
        for words in (
            told,
            "null: image in 1 sample",
            "empty: raw in 1 sample",
            f"convert {source} DST --files-from FOLDER",
        ):
            assert words in text, (command, words)


def test_preview_shows_errors_of_a_row(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", named("0.png"))
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["preview", str(source), "-o", str(page)]).exit_code == 0
    assert "1 of 1 rows have a path and no bytes" in page.read_text()
