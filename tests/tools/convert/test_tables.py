"""JSON arrays, tables and compressed records: the samples that they become."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, run_conversion
from savable_pipeline.tools.convert.options import MANIFEST
from tests.support.toy_files import SMALL, file_hashes, reject_reasons, tar_files, write_captioned_images, write_lines

LLAVA = [
    {"id": "1", "image": "000.jpg", "conversations": [{"from": "human", "value": "<image>\né?"}]},
    {"id": "2", "conversations": []},
    {"id": "3", "image": "b/001.jpg", "conversations": []},
]


@pytest.mark.parametrize("indent", [None, 1])
def test_each_object_of_a_json_array_becomes_a_sample(tmp_path: Path, indent: int | None) -> None:
    source = write_captioned_images(tmp_path / "in", 2) / "llava.json"
    text = json.dumps(LLAVA, indent=indent, ensure_ascii=False)
    source.write_text(f"\ufeff {text}\n")
    assert run_conversion(source, tmp_path / "out", Options(key_field="id")).samples == 3
    files = tar_files(tmp_path / "out")
    assert list(files) == ["1.jpg", "1.json", "2.json", "3.jpg", "3.json"]
    assert [json.loads(files[f"{i}.json"]) for i in (1, 2, 3)] == LLAVA
    assert files["1.json"].decode() in text, "byte for byte"
    assert files["3.jpg"] == (tmp_path / "in/b/001.jpg").read_bytes()


def test_keys_of_records_are_row_numbers_without_blank_lines(tmp_path: Path) -> None:
    for name, lines in (("a", '{"n": 1}\n\n  \t\n{"n": 2}\n'), ("b", '\n\n{"n": 3}\n\n\n{"n": 4}')):
        (tmp_path / f"in/{name}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / f"in/{name}.jsonl").write_text(lines)
    run_conversion(tmp_path / "in", tmp_path / "out", Options())
    source, shards = sp.open_dataset(tmp_path / "in"), sp.open_dataset(tmp_path / "out")
    assert [each.key for each in source] == ["a.jsonl:0", "a.jsonl:1", "b.jsonl:0", "b.jsonl:1"]
    assert [each.key for each in shards] == ["000000001", "000000002", "000000003", "000000004"]
    assert [each.json() for each in shards] == [each.json() for each in source] == [{"n": n} for n in (1, 2, 3, 4)]


def test_bad_elements_are_rejected_by_number_and_a_truncated_array_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_text('[{"a": 1}, [2], {"image": "gone.jpg"}, {"a": 4}]')
    assert run_conversion(source, tmp_path / "out", SMALL).samples == 2
    assert reject_reasons(tmp_path / "out") == {"a.json:2": "not a JSON object", "a.json:3": "missing file"}
    source.write_text('[{"a": 1}, {"a"')
    with pytest.raises(ValueError, match=r"a\.json: not a whole list of objects"):
        run_conversion(source, tmp_path / "cut", SMALL)


@pytest.mark.parametrize("name", ["m.jsonl.gz", "m.jsonl.bz2", "m.jsonl.xz", "m.jsonl.zst", "m.json.gz"])
def test_compressed_records_convert_to_the_same_shards(tmp_path: Path, name: str) -> None:
    plain = write_lines(
        write_captioned_images(tmp_path / "in", 4) / "m.jsonl", *({"image": "000.jpg", "n": i} for i in range(7))
    )
    if ".json." in name:
        plain = tmp_path / "in/m.json"
        plain.write_text(json.dumps([{"image": "000.jpg", "n": i} for i in range(7)]))
    packers = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    if name.endswith(".zst"):
        packers[".zst"] = pytest.importorskip("zstandard").compress
    packed = tmp_path / "in" / name
    packed.write_bytes(packers[packed.suffix](plain.read_bytes()))
    run_conversion(plain, tmp_path / "one", SMALL)
    run_conversion(packed, tmp_path / "two", SMALL)
    one, two = file_hashes(tmp_path / "one"), file_hashes(tmp_path / "two")
    assert one.pop(MANIFEST) != two.pop(MANIFEST), "which names the source"
    assert one == two
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged"):
        run_conversion(packed, tmp_path / "cut", SMALL)
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize("name", ["m.jsonl", "m.json", "m.csv"])
def test_unnamed_compression_converts_to_the_same_shards(tmp_path: Path, name: str) -> None:
    plain = tmp_path / name
    lines = "".join(f'{{"n": "{i}"}}\n' for i in range(7))
    plain.write_text("n\n" + "".join(f"{i}\n" for i in range(7)) if name == "m.csv" else lines)
    run_conversion(plain, tmp_path / "one", SMALL)
    for number, compress in enumerate((gzip.compress, bz2.compress, lzma.compress, zstandard.compress)):
        packed = tmp_path / str(number) / name
        packed.parent.mkdir()
        packed.write_bytes(compress(plain.read_bytes()))
        assert run_conversion(packed, tmp_path / f"two{number}", SMALL).samples == 7
        assert tar_files(tmp_path / "one") == tar_files(tmp_path / f"two{number}")


@pytest.mark.parametrize("name", ["m.jsonl", "m.json", "m.csv"])
def test_text_in_utf_16_is_an_error_that_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes('{"n": 1}\n{"n": 2}\n'.encode("utf-16"))
    with pytest.raises(ValueError, match=rf"{name}: .*text in UTF-16, .*`iconv -f UTF-16 -t UTF-8 {name} > NEW`"):
        run_conversion(tmp_path / name, tmp_path / "out", SMALL)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", 'file_name,caption,n\n000.jpg,"a, ""cat""\n",\n\nb/001.jpg,é,2\n'),
        ("t.tsv", 'file_name\tcaption\tn\n000.jpg\t"a, ""cat""\n"\t\nb/001.jpg\té\t2\n'),
        ("t.csv", '\ufefffile_name;caption;n\r\n000.jpg;"a, ""cat""\n";\r\nb/001.jpg;é;2\r\n'),
    ],
)
def test_a_row_of_a_table_is_a_sample_with_the_files_it_names(tmp_path: Path, name: str, text: str) -> None:
    (write_captioned_images(tmp_path / "in", 2) / name).write_text(text, newline="")
    assert run_conversion(tmp_path / "in" / name, tmp_path / "out", SMALL).rejected == []
    files = tar_files(tmp_path / "out")
    assert list(files) == ["000000001.jpg", "000000001.json", "000000002.jpg", "000000002.json"]
    assert json.loads(files["000000001.json"]) == {"file_name": "000.jpg", "caption": 'a, "cat"\n', "n": None}
    assert files["000000002.jpg"] == (tmp_path / "in/b/001.jpg").read_bytes()


def test_path_columns_are_detected(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 3) / "t.csv"
    source.write_text("left,right,url\n000.jpg,b/001.jpg,http://x/y.jpg\n000.jpg,gone.jpg,http://x/z.jpg\n")
    run_conversion(source, tmp_path / "out", SMALL)
    assert list(tar_files(tmp_path / "out")) == ["000000001.jpg", "000000001.json", "000000001.right.jpg"]
    assert reject_reasons(tmp_path / "out") == {"t.csv:3": "missing file"}


@pytest.mark.parametrize("first", [",a note", "gone.jpg,a note", "http://x/y.jpg,a note"])
def test_unusual_first_row_hides_no_column(tmp_path: Path, first: str) -> None:
    source = write_captioned_images(tmp_path / "in", 3) / "t.csv"
    source.write_text(f"picture,text\n{first}\n000.jpg,b\nb/001.jpg,c\nb/c.d/002.jpg,d\n")
    run_conversion(source, tmp_path / "out", SMALL)
    assert [name for name in tar_files(tmp_path / "out") if name.endswith("jpg")] == [
        f"00000000{i}.jpg" for i in (2, 3, 4)
    ]


def test_columns_of_equal_file_types_have_separate_parts(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 3, **{"p.png": b"x"}) / "t.csv"
    source.write_text("left,right\n000.jpg,p.png\n000.jpg,b/001.jpg\n")
    assert run_conversion(source, tmp_path / "out", Options(check_images=False)).rejected == []
    assert "000000002.right.jpg" in tar_files(tmp_path / "out")


def test_a_column_of_text_that_names_a_few_files_is_a_warning(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 3) / "t.csv"
    source.write_text("image,text\n000.jpg,000.txt\n000.jpg,a\n000.jpg,b\n")
    report = run_conversion(source, tmp_path / "out", SMALL)
    assert report.samples == 3 and list(tar_files(tmp_path / "out"))[:2] == ["000000001.jpg", "000000001.json"]
    assert [line for line in report.warnings if "'text'" in line] == [
        "t.csv: the column 'text' names 1 file in 3 rows and is taken for text; if it names files, give --file-field "
        "image --file-field text"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a first line with column names"),
        (b"a,a\n1,2\n", r"2 columns are named 'a'\. Give each its own name"),
        (b",\n1,2\n", "expected a first line with column names"),
        ("a,b\n1,2\n".encode("utf-16"), "text in UTF-16, where UTF-8 is read; `iconv"),
        (b"a,b\n", "no row below the column names"),
        (b"a\n\n1\n\xff\n" + b"2\n" * 9000, r"t\.csv:4: cannot be read as a table in UTF-8: it holds the byte 0xff"),
        (b'a\n1\n"x\n2\n', r"t\.csv:3: cannot be read as a table in UTF-8: unexpected end of data"),
    ],
)
def test_invalid_table_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run_conversion(tmp_path / "t.csv", tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("cell", "settings"), [("000.jpg", SMALL), ("https://host/0.jpg", Options(file_fields=[]))])
def test_table_without_a_header_is_an_error(tmp_path: Path, cell: str, settings: Options) -> None:
    source = write_captioned_images(tmp_path / "in", 2) / "m.csv"
    source.write_text(f"{cell},a cat\n{cell.replace('0', '1')},a dog\n")
    with pytest.raises(ValueError, match=rf"m\.csv: the first line has {cell!r}, not column names"):
        run_conversion(source, tmp_path / "out", settings)


def test_rows_of_another_length_are_rejected_and_long_cells_are_not(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f'a,b\n1,"2\n"\n1\n\n1,2,3\n{"x" * 200_000},4\n')
    report = run_conversion(tmp_path / "t.csv", tmp_path / "out", SMALL)
    assert list(tar_files(tmp_path / "out")) == ["000000001.json", "000000004.json"]
    assert [(reject.file, reject.reason, reject.detail) for reject in report.rejected] == [
        ("t.csv:4", "not as wide as the header", "1 cell, where it has 2 columns"),
        ("t.csv:6", "not as wide as the header", "3 cells, where it has 2 columns"),
    ]


def test_duplicate_key_in_a_table_is_reported_by_lines(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('a,b\n1,"2\n"\n2,3\n1,4\n')
    (reject,) = run_conversion(tmp_path / "t.csv", tmp_path / "out", Options(key_field="a")).rejected
    assert (reject.file, reject.detail) == ("t.csv:5", "'1' is the key of a record before it")


def test_table_whose_rows_all_have_a_wrong_width_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1\n2\n")
    assert len(run_conversion(tmp_path / "t.csv", tmp_path / "out", SMALL).rejected) == 2


def test_images_named_by_many_records_warn_with_the_factor(tmp_path: Path) -> None:
    write_captioned_images(tmp_path / "in", 2)
    lines = [{"image": name} for name in ("000.jpg", "000.jpg", "000.jpg", "b/001.jpg")]
    report = run_conversion(write_lines(tmp_path / "in/m.jsonl", *lines), tmp_path / "out", SMALL)
    assert "4 uses of 2 files" in report.warnings[0] and "2.0 times" in report.warnings[0]
    report = run_conversion(write_lines(tmp_path / "in/n.jsonl", *lines[2:]), tmp_path / "two", SMALL)
    assert not any("uses of" in warning for warning in report.warnings)


def test_missing_files_of_a_table_suggest_the_folder_option(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 2) / "m.csv"
    source.write_text("image,caption\nelsewhere/0.jpg,a cat\nelsewhere/1.jpg,a dog\n")
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "--files-from FOLDER says where the files are" in " ".join(result.output.split())
