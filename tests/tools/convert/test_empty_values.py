"""Samples with empty and missing values are the same when read in place and after a conversion, in every format."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.tools.convert import Options, run_conversion
from tests.support.shards import write_tar
from tests.support.toy_files import jpeg
from tests.support.toy_records import LEAF, arrow_rows, dict_spec, write_litdata, write_mds

TEXTS, BYTES = st.sampled_from(["", "a", "é"]), st.sampled_from([b"", b"\0\1", b"x"])


class Row(NamedTuple):
    """A row of two columns, `text` and `data`."""

    text: str | None
    data: bytes | None


Samples = list[dict[str, bytes]]  # the parts of each sample that is expected, in the order of rows


def as_json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def columns(rows: list[Row]) -> dict[str, Any]:
    return {
        "text": pa.array([row.text for row in rows], pa.string()),
        "bin": pa.array([row.data for row in rows], pa.binary()),
    }


def of_columns(rows: list[Row], text: str = "text", data: str = "bin") -> Samples:
    named = [{text: None if row.text is None else row.text.encode(), data: row.data} for row in rows]
    present = [{name: data for name, data in parts.items() if data is not None} for parts in named]
    return [parts for parts in present if parts]


def mds(root: Path, rows: list[Row]) -> Samples:
    write_mds(root, {"text": "str", "data": "bytes"}, [[(row.text or "").encode(), row.data or b""] for row in rows])
    return [{"bin": row.data or b"", "json": as_json({"text": row.text or ""})} for row in rows]


def litdata(root: Path, rows: list[Row]) -> Samples:
    encoded = [[(row.text or "").encode(), row.data or b""] for row in rows]
    write_litdata(root, ["str", "bytes"], dict_spec(["text", "data"]), encoded)
    return [{"bin": row.data or b"", "json": as_json({"text": row.text or ""})} for row in rows]


def litdata_rows(root: Path, rows: list[Row]) -> Samples:
    write_litdata(root, ["bytes"], LEAF, [[b""]] * len(rows), a_chunk=len(rows))
    (root / "chunk-0-0.bin").write_bytes(arrow_rows([row._asdict() for row in rows]))
    return [
        {"json": as_json({"text": row.text, "data": None})}
        if row.data is None
        else {"bin": row.data, "json": as_json({"text": row.text})}
        for row in rows
    ]


def parquet(root: Path, rows: list[Row]) -> Samples:
    root.mkdir()
    pq.write_table(pa.table(columns(rows)), root / "a.parquet")
    return of_columns(rows)


def arrow(root: Path, rows: list[Row]) -> Samples:
    root.mkdir()
    feather.write_feather(pa.table(columns(rows)), root / "a.arrow", compression="uncompressed")
    return of_columns(rows)


def tar(root: Path, rows: list[Row]) -> Samples:
    root.mkdir()
    with tarfile.open(root / "0.tar", "w") as file:
        for number, row in enumerate(rows):
            for name, data in (("txt", None if row.text is None else row.text.encode()), ("bin", row.data)):
                if data is not None:
                    member = tarfile.TarInfo(f"{number:03d}.{name}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
    return of_columns(rows, "txt")


def jsonl(root: Path, rows: list[Row]) -> Samples:
    root.mkdir()
    lines = [as_json({"text": row.text}) for row in rows]
    (root / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return [{"json": line} for line in lines]


def json_list(root: Path, rows: list[Row]) -> Samples:
    root.mkdir()
    lines = [as_json({"text": row.text}) for row in rows]
    (root / "a.json").write_bytes(b"[" + b", ".join(lines) + b"]")
    return [{"json": line} for line in lines]


def csv_table(root: Path, rows: list[Row]) -> Samples:
    """An empty field is null, because CSV cannot tell them apart."""
    root.mkdir()
    with (root / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("number", "text"), *((i, row.text) for i, row in enumerate(rows))])
    return [{"json": as_json({"number": str(i), "text": row.text or None})} for i, row in enumerate(rows)]


def folder(root: Path, rows: list[Row]) -> Samples:
    """A text may be empty. Other files without bytes were cut, and reject their sample."""
    root.mkdir()
    for number, row in enumerate(rows):
        for name, data in (("txt", None if row.text is None else row.text.encode()), ("dat", row.data)):
            if data is not None:
                (root / f"{number:03d}.{name}").write_bytes(data)
    return of_columns([row for row in rows if row.data != b""], "txt", "dat")


def tokens(root: Path, rows: list[Row]) -> Samples:
    """Megatron's documents, one for each text."""
    root.mkdir()
    lengths = np.array([len(row.text or "") for row in rows], "<i4")
    values = np.arange(lengths.sum(), dtype="<i4")
    (root / "a.bin").write_bytes(values.tobytes())
    starts = lengths.cumsum(dtype="<i8") - lengths
    counts = np.array([1, len(rows), len(rows) + 1], "<u8").tobytes()
    parts = lengths, 4 * starts, np.arange(len(rows) + 1, dtype="<i8")
    header = b"MMIDIDX\0\0" + counts[:8] + b"\4" + counts[8:]
    (root / "a.idx").write_bytes(header + b"".join(each.tobytes() for each in parts))
    return [{"tokens": values[i : i + n].tobytes()} for i, n in zip(starts.tolist(), lengths.tolist(), strict=True)]


FORMATS: list[Callable[[Path, list[Row]], Samples]] = [
    mds, litdata, litdata_rows, parquet, arrow, tar, jsonl, json_list, csv_table, folder, tokens,
]  # fmt: skip
FIELDS = {jsonl}  # formats whose fields are parts as well when they are read, see docs/formats.md


def all_parts(root: Path, write: Any = None) -> Samples:
    """The parts of all samples that have any."""
    samples = ({name: sample[name] for name in sample} for sample in sp.open_dataset(root))
    return [{"json": parts["json"]} if write in FIELDS else parts for parts in samples if parts]


@pytest.mark.parametrize("write", FORMATS)
@settings(max_examples=12, deadline=None)
@given(rows=st.lists(st.builds(Row, st.none() | TEXTS, st.none() | BYTES), min_size=1, max_size=5))
def test_empty_values_are_read_and_converted_alike(
    write: Callable[[Path, list[Row]], Samples], rows: list[Row]
) -> None:
    with TemporaryDirectory() as temporary:
        source, target = Path(temporary, "source"), Path(temporary, "target")
        expected = write(source, rows)
        if not expected:  # a dataset without samples is an error
            return
        assert all_parts(source, write) == expected, "read in place"
        report = sp.convert(source, target, reshard=write is tar, workers=1)
        assert all_parts(target) == expected, "converted"
        assert report.samples == len(expected)


@pytest.mark.parametrize("source_format", ["mds", "parquet"])
def test_image_without_bytes_is_converted_and_a_damaged_one_is_rejected(tmp_path: Path, source_format: str) -> None:
    images = [jpeg(1), b"", b"no image"]
    if source_format == "mds":
        write_mds(tmp_path / "in", {"image": "jpeg"}, [[image] for image in images])
    else:
        (tmp_path / "in").mkdir()
        pq.write_table(pa.table({"jpg": pa.array(images, pa.binary())}), tmp_path / "in/a.parquet")
    report = run_conversion(tmp_path / "in", tmp_path / "out", Options())
    assert [reject.reason for reject in report.rejected] == ["unreadable image"]
    assert all_parts(tmp_path / "out") == [{"jpg": image} for image in images[:2]]


@pytest.mark.parametrize("source_format", ["mds", "parquet"])
def test_parts_that_differ_only_in_case_are_rejected_by_name(tmp_path: Path, source_format: str) -> None:
    """webdataset ignores case, and could not read them from a tar."""
    if source_format == "mds":
        image = jpeg(1)
        write_mds(tmp_path / "in", {"x": "jpeg", "A": "jpeg", "a": "jpeg"}, [[image, image, image]])
    else:
        (tmp_path / "in").mkdir()
        pq.write_table(pa.table({"A.jpg": [jpeg(1)], "a.jpg": [jpeg(2)]}), tmp_path / "in/a.parquet")
    (reject,) = run_conversion(tmp_path / "in", tmp_path / "out", Options()).rejected
    assert (reject.reason, reject.detail) == ("two parts with one extension", "A.jpg and a.jpg")


def test_members_of_a_tar_that_differ_only_in_case_are_converted_as_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in/a.tar", [("000.txt", b"one"), ("000.TXT", b"two")])
    report = sp.convert(tmp_path / "in", tmp_path / "out", reshard=True, workers=1)
    assert report.samples == 1 and not report.rejected
    assert all_parts(tmp_path / "in") == all_parts(tmp_path / "out") == [{"txt": b"one", "TXT": b"two"}]
