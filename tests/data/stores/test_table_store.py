"""CSV files and JSON arrays, read in place: what plain csv and json give, as it is converted, and with changes told."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.info import dataset_info
from savable_pipeline.data.stores import jsonl
from savable_pipeline.errors import ShardError
from savable_pipeline.testing import assert_exact_resume
from tests.support.draws import scaled_examples
from tests.support.toy_files import write_captioned_images

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\ufeff"), max_size=9)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=3))


def read(data: bytes, separator: str) -> list[dict[str, str | None]]:
    """The rows that Python's csv reads."""
    header, *rows = [row for row in csv.reader(io.StringIO(data.decode(), newline=""), delimiter=separator) if row]
    return [dict(zip(header, (cell or None for cell in row), strict=True)) for row in rows]


@scaled_examples(20)
@given(
    rows=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=8),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    separator=st.sampled_from(",\t;"),
    blanks=st.integers(0, 2),
    last=st.booleans(),
)
def test_rows_equal_those_of_pythons_csv_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    ending: str,
    separator: str,
    blanks: int,
    last: bool,
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator, lineterminator=ending + blanks * ending, quoting=csv.QUOTE_ALL)
    writer.writerows([("name", "other"), *rows])
    data = text.getvalue().encode() if last else text.getvalue().encode().rstrip(b"\r\n")
    path = tmp_path_factory.mktemp("in") / ("a.tsv" if separator == "\t" else "a.csv")
    path.write_bytes(data)
    samples = sp.open_dataset(path, file_fields=())
    expected = read(data, separator)
    assert len(samples) == len(expected)
    assert [samples[i].json() for i in reversed(range(len(samples)))] == expected[::-1]


@scaled_examples(12)
@given(
    values=st.lists(st.dictionaries(TEXTS.filter(lambda name: name not in FIELDS), VALUES), min_size=1, max_size=8),
    indent=st.none() | st.integers(0, 2),
    marked=st.booleans(),
)
def test_elements_equal_those_of_json_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, Any]], indent: int | None, marked: bool
) -> None:
    path = tmp_path_factory.mktemp("in") / "a.json"
    text = json.dumps(values, indent=indent, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" * marked + f" {text}\n".encode("utf-8", "replace"))
    expected = json.loads(path.read_bytes().decode("utf-8-sig"))
    samples = sp.open_dataset(path)
    assert [samples[i].json() for i in reversed(range(len(samples)))] == expected[::-1]


FIELDS = ("image", "audio", "video", "file", "file_name")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = write_captioned_images(tmp_path / "in", 6)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.jpg"))
    rows = [{"image": name, "caption": f'a "{i}",\nb'} for i, name in enumerate(names * 4)]
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "caption"])
        writer.writeheader()
        writer.writerows(rows)
    (folder / "t.json").write_text(json.dumps(rows))
    (folder / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", ["t.csv", "t.json", "t.jsonl"])
def test_parts_equal_those_of_a_conversion(photos: Path, tmp_path: Path, name: str) -> None:
    sp.convert(photos / name, tmp_path / "out")
    given: dict[str, Any] = {"file_fields": ["image"]} if name == "t.jsonl" else {}
    inside, written = sp.open_dataset(photos / name, **given), sp.open_dataset(tmp_path / "out")
    assert len(inside) == len(written) == 24
    for one, other in zip(inside, written, strict=True):
        assert list(one) == list(other) == ["jpg", "json"]
        assert {part: one[part] for part in one} == {part: other[part] for part in other}
    assert (inside[3].key, inside[3].image().size) == (f"{name}:3", written[3].image().size)


def captions(path: Path, lane: sp.Lane) -> sp.BatchStage:
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(custom.JsonReader(path, lane), size=5), Captions()), size=3)


class Captions(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> tuple[str, bytes, float]:
        return sample.json()["caption"], sample["jpg"], rng.random()


def test_run_over_tables_resumes_exactly(photos: Path) -> None:
    assert assert_exact_resume(partial(captions, photos / "t.json"), seed=3, lanes=2, steps=6, chains=1)


def test_columns_and_folders_of_files_can_be_named(photos: Path, tmp_path: Path) -> None:
    rows = "left,right,n\n000.jpg,b/001.jpg,1\n"
    (tmp_path / "away.csv").write_text(rows)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/away.csv").write_text(rows)
    with pytest.raises(ShardError, match=r"row 0, at byte .*: missing file: the field 'left' names '000\.jpg'"):
        sp.open_dataset(tmp_path / "elsewhere/away.csv", file_fields=["left"])[0].json("jpg")
    for settings_of, parts in (
        ({"file_fields": ["left=a", "right=b"]}, ["a.jpg", "b.jpg", "json"]),
        ({}, ["jpg", "json", "right.jpg"]),
        ({"file_fields": ()}, ["json"]),
    ):
        sample = sp.open_dataset(tmp_path / "away.csv", files_from=photos, **settings_of)[0]  # type: ignore[arg-type]
        assert list(sample) == parts, settings_of
    assert sp.open_dataset(tmp_path / "away.csv", key="n")["1"].json()["right"] == "b/001.jpg"
    assert [list(sample) for sample in sp.read(tmp_path / "away.csv", files_from=photos).take(1)]


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("../secret.jpg", "outside the source"),
        ("/etc/hostname.jpg", "outside the source"),
        ("link/secret.jpg", "outside the source"),
        ("gone.jpg", "missing file"),
        ("http://x/y.jpg", "a URL, not a file"),
        ("b", "no extension"),
    ],
)
def test_a_row_opens_nothing_outside_its_folder(photos: Path, tmp_path: Path, cell: str, told: str) -> None:
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (photos / "link").symlink_to(tmp_path)
    (photos / "bad.csv").write_text(f"image,n\n000.jpg,1\n{cell},2\n")
    samples = sp.open_dataset(photos / "bad.csv")
    assert samples[0]["jpg"] and samples[1].json() == {"image": cell, "n": "2"}
    with pytest.raises(ShardError) as error:
        list(samples[1])
    assert error.value.reason == told


def test_table_or_file_changed_during_a_run_is_an_error(photos: Path) -> None:
    samples = sp.open_dataset(photos / "t.csv")
    first = samples[0]["jpg"]
    later = time.time() + 5  # as if it were written later on
    indexed_ns = samples.dataset.store.found.index_path.stat().st_mtime_ns  # type: ignore[attr-defined]
    while (photos / "000.jpg").stat().st_ctime_ns <= indexed_ns:  # until the file system's clock has gone on
        (photos / "000.jpg").write_bytes(first[:-1] + b"x")
    os.utime(photos / "000.jpg", (later, later))
    with pytest.raises(ShardError, match=r"000\.jpg: written since .*t\.csv, which names it, was indexed"):
        next(sample["jpg"] for sample in samples if sample.json()["image"] == "000.jpg")
    os.utime(photos / "000.jpg", (1, 1))
    assert sp.open_dataset(photos / "t.csv")[0]["jpg"]
    raw = (photos / "t.csv").read_bytes()
    (photos / "t.csv").write_bytes(raw[:-2])
    with pytest.raises(ShardError, match=r"t\.csv: \d+ bytes, but \d+ when indexed"):
        sp.open_dataset(photos / "t.jsonl", file_fields=["image"])
        samples.dataset.store.files.clear()  # type: ignore[attr-defined]
        samples[1].json()
    assert len(sp.open_dataset(photos / "t.csv")) == 24


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "a,a\n1,2\n", "2 columns are named 'a'"),
        ("a.csv", 'a,b\n1,"2\n', "a.csv:2: cannot be read as a table"),
        ("a.csv", "a,b\n", "no row below the column names"),
        ("a.json", '[{"n": 1}, {"n"', "not a whole list of objects"),
        ("a.json", '{"n": 1}', "not a whole list of objects"),
        (
            "a.json",
            '{"version": 1, "n": [1], "data": [{"n": 1}]}',
            r"got `object`\. Write the list in its field 'data' alone",
        ),
    ],
)
def test_invalid_table_is_an_error_with_its_position(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ShardError, match=told):
        sp.open_dataset(tmp_path / name)


def test_row_of_another_width_is_an_error_of_this_row_only(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n4,5\n")
    samples = sp.open_dataset(tmp_path / "a.csv")
    assert [samples[0].json(), samples[2].json()] == [{"a": "1", "b": "2"}, {"a": "4", "b": "5"}]
    with pytest.raises(ShardError, match="row 1, at byte 8: not as wide as the header: 1 cell, where it has 2 columns"):
        samples[1].json()
    kept = sp.read(tmp_path / "a.csv", shuffle=False, on_error="skip").map(lambda sample: sample.json()).take(2)
    assert [each["a"] for each in kept] == ["1", "4"]


def test_only_jsonl_lines_have_a_length_limit(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 20)
    row = {"text": "a" * 30}
    for name, text in {"a.jsonl": json.dumps(row), "a.json": json.dumps([row]), "a.csv": "text\n" + "a" * 30}.items():
        (tmp_path / name).write_text(text + "\n")
    assert [sp.open_dataset(tmp_path / name)[0].json()["text"] for name in ("a.json", "a.csv")] == ["a" * 30] * 2
    with pytest.raises(sp.ShardError, match=r"a\.jsonl: .*a line of 43"):
        sp.open_dataset(tmp_path / "a.jsonl")[0].json()


def test_folder_of_only_tables_is_one_dataset(tmp_path: Path) -> None:
    for name in ("a.csv", "sub/b.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("n\n1\n2\n")
    (tmp_path / "README.md").write_text("numbers")
    assert [sample.key for sample in sp.open_dataset(tmp_path)] == ["a.csv:0", "a.csv:1", "sub/b.csv:0", "sub/b.csv:1"]


def test_files_that_are_dated_in_the_future_are_read(photos: Path) -> None:
    later = time.time() + 1e6
    for photo in photos.glob("*.jpg"):
        os.utime(photo, (later, later))
    assert all(sample["jpg"] for sample in sp.open_dataset(photos / "t.csv"))


def test_an_absolute_path_below_the_folder_of_the_table_is_read(photos: Path) -> None:
    (photos / "absolute.csv").write_text(f"image\n{photos / '000.jpg'}\n")
    assert sp.open_dataset(photos / "absolute.csv")[0]["jpg"] == (photos / "000.jpg").read_bytes()


def test_links_of_hugging_faces_cache_into_its_own_blobs_are_followed(photos: Path, tmp_path: Path) -> None:
    """The layout of huggingface_hub: `snapshots/COMMIT/a.jpg -> ../../blobs/HASH`."""
    cache = tmp_path / "datasets--a--b"
    snapshot, blobs = cache / "snapshots" / "c0ffee", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1f").write_bytes((photos / "000.jpg").read_bytes())
    (snapshot / "a.jpg").symlink_to("../../blobs/1f")
    (cache / "secret").write_bytes(b"secret")
    (snapshot / "b.jpg").symlink_to("../../secret")
    (snapshot / "t.csv").write_text("image\na.jpg\nb.jpg\n")
    samples = sp.open_dataset(snapshot / "t.csv")
    assert samples[0]["jpg"] == (blobs / "1f").read_bytes()
    with pytest.raises(ShardError, match="outside the source"):
        samples[1]["jpg"]


def test_a_column_without_a_name_is_called_as_pandas_calls_it(photos: Path) -> None:
    (photos / "p.csv").write_text(",image,\n7,000.jpg,x\n")
    sample = sp.open_dataset(photos / "p.csv")[0]
    assert sample.json() == {"Unnamed: 0": "7", "image": "000.jpg", "Unnamed: 2": "x"} and sample["jpg"]


@pytest.mark.parametrize("name", ["a.tar", "a.parquet", "a.arrow", "a.jsonl", "a.csv", "a.json"])
def test_a_pointer_of_git_lfs_is_recognized(tmp_path: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ShardError, match=rf"{name}: a pointer of Git LFS, not the file; `git lfs pull` fetches it"):
        sp.open_dataset(tmp_path / name)


def test_info_counts_missing_files_and_prints_the_rest(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("zero")
    (tmp_path / "t.csv").write_text("file\n1.txt\n0.txt\n2.txt\n")
    found = dataset_info(tmp_path / "t.csv")
    assert found.parts["txt"].samples == 1 and found.first_key == "t.csv:0"
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("2 samples name files that are not there, of 3 looked at: ")


def test_too_deeply_nested_list_is_an_error_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 60_000 + "]" * 60_000)
    with pytest.raises(ShardError, match=r"deep\.json: not a whole list of objects"):
        sp.open_dataset(tmp_path / "deep.json")


def test_excels_line_with_the_separator_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    for separator in ";,\t|":
        (tmp_path / "a.csv").write_text(f"sep={separator}\na{separator}b\n1{separator}2\n")
        with pytest.raises(ShardError, match=r"the first line is Excel's mark of the separator.*Remove this line"):
            sp.open_dataset(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("sep=;b\n1;2\n")
    assert sp.open_dataset(tmp_path / "a.csv")[0].json() == {"sep=": "1", "b": "2"}


def test_list_with_nan_is_an_error_that_says_how_to_write_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1.5}, {"a": NaN}]')
    with pytest.raises(ShardError, match=r"not a whole list of objects: .*Write null for NaN, or one object a line"):
        sp.open_dataset(tmp_path / "a.json")
