"""JSONL: lines and their fields, blank lines, lines that are cut, files that are compressed."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.stores import jsonl
from savable_pipeline.data.stores.opening import open_store

LINES = (
    b'{"id": 0, "caption": "\xc3\xbc", "n": [1, 2]}\n\n{"id": 1, "caption": null}\r\n\r\n[3]\n{"id": 4, "json": "?"}'
)


class Texts(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> str:
        return sample.text()


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    return tmp_path / "a.jsonl"


def test_a_line_is_the_part_json_and_its_fields_are_parts(lines: Path) -> None:
    samples = list(custom.JsonlReader(lines, sp.Lane(), shuffle=False, epochs=1))
    assert [sample.json() for sample in samples] == [
        {"id": 0, "caption": "ü", "n": [1, 2]},
        {"id": 1, "caption": None},
        [3],
        {"id": 4, "json": "?"},
    ]
    first, second, third, fourth = samples
    assert (list(first), first.text(), first.json("n"), first["ID"]) == (
        ["json", "id", "caption", "n"],
        "ü",
        [1, 2],
        b"0",
    )
    assert (list(second), list(third), list(fourth)) == (["json", "id"], ["json"], ["json", "id"])
    assert (second.key, second.location) == ("a.jsonl:1", "byte offset 41")
    with pytest.raises(KeyError, match="no part 'caption'; the sample has json, id"):
        second["caption"]  # null


def test_empty_string_is_an_empty_part_and_null_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"caption": "", "tags": [], "note": null}\n')
    store = open_store(tmp_path, format="jsonl")
    assert [store.read(0, 0, name) for name in ("caption", "tags")] == [b"", b"[]"]
    assert store.extensions(0, 0) == ["json", "caption", "tags"]
    assert [store.has_part(0, 0, name) for name in ("Caption", "tags", "note")] == [True, True, False]


def test_the_key_may_be_a_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 0}\n{"id": "a \u00fc"}\n{"id": true}\n{"id": NaN}\n{"id": ""}\n')
    store = open_store(tmp_path, format="jsonl", key="id")
    assert [store.key(0, row) for row in range(5)] == ["0", "a ü", "true", "NaN", ""]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"ID": 1}', "'id' of key= is missing or null"),
        ('{"id": null}', "'id' of key= is missing or null"),
        ("[3]", "'id' of key= is missing or null"),
        ('{"id": "\\ud800"}', "'id' of key= is not UTF-8"),
        ('{"id": 1', "invalid JSON: "),
    ],
)
def test_line_without_the_key_field_is_an_error_that_names_it(tmp_path: Path, line: str, fault: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"id": 0}}\n{line}\n')
    store = open_store(tmp_path, format="jsonl", key="id")
    assert store.key(0, 0) == "0"
    with pytest.raises(sp.ShardError, match=rf"a\.jsonl: row 1\b.*: {fault}"):
        store.key(0, 1)


def test_fields_next_to_nan_and_lone_surrogates_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 5, "x": NaN, "y": -Infinity, "txt": "\\ud83d?"}\n{"id": 6, "x": NaN}')
    first, second = custom.JsonlReader(tmp_path, sp.Lane(), shuffle=False, epochs=1, key="id")
    assert (first.key, second.key) == ("5", "6")
    assert (list(first), list(second)) == (["json", "id", "x", "y", "txt"], ["json", "id", "x"])
    assert (first["x"], first["y"], first["txt"]) == (b"NaN", b"-Infinity", b"\xed\xa0\xbd?")


def test_fields_of_an_invalid_line_are_a_counted_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"txt": "a"}\n{"txt": "b\n{"txt": "c"}\n')
    reader = custom.JsonlReader(tmp_path, sp.Lane(), shuffle=False, epochs=1, on_error="skip")
    broken = reader.dataset.open_samples(reader.take(2))[1]
    assert broken["json"] == b'{"txt": "b'
    for ask in (list, sp.Sample.text):
        with pytest.raises(sp.ShardError, match=r"a\.jsonl: row 1, at byte 13: invalid JSON: Unterminated string"):
            ask(broken)  # type: ignore[operator]
    items = sp.Encode(custom.JsonlReader(tmp_path, sp.Lane(), shuffle=False, epochs=1, on_error="skip"), Texts())
    assert list(items) == ["a", "c"]
    assert items.counts["skipped/malformed JSON"] == 1


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_lines_are_found_for_any_read_size(lines: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = jsonl.JSONL.scan(lines.parent, lines.name)
    monkeypatch.setattr(jsonl, "_CHUNK", chunk)
    assert jsonl.JSONL.scan(lines.parent, lines.name) == expected
    assert np.frombuffer(expected.rows, "<u8").tolist() == [0, 41, 71, 75, len(LINES)]


def test_last_line_without_newline_may_contain_nan(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": NaN}')
    assert open_store(tmp_path, format="jsonl").entries[0].fault == ""


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("names_files", [False, True])
def test_a_line_of_two_values_is_no_truncated_one(tmp_path: Path, end: bytes, names_files: bool) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 1}\n{"id": 2}{"id": 3}' + end)
    store = open_store(tmp_path / "a.jsonl", file_fields=["image"] if names_files else None)
    assert store.entries[0].fault == "" and store.entries[0].samples == 2
    with pytest.raises(sp.ShardError, match=r"JSON: more than one JSON value in a line: Extra data: line 1 column 10"):
        store.extensions(0, 1)


def test_truncated_last_line_is_an_error_and_skip_reads_the_lines_before(lines: Path) -> None:
    lines.write_bytes(LINES[:-3])
    with pytest.raises(sp.ShardError, match=r"a\.jsonl: the last line, at byte 75, was cut: .*copy the file again"):
        custom.JsonlReader(lines, sp.Lane())
    reader = custom.JsonlReader(lines, sp.Lane(), epochs=1, on_error="skip")
    assert len(list(reader)) == 3
    assert reader.counts["skipped/rest of a damaged or missing shard"] == 1


@pytest.mark.parametrize("line", [0, 2, 4])
def test_state_detects_changed_lines_of_equal_length(tmp_path: Path, line: int) -> None:
    path = tmp_path / "a.jsonl"
    texts = [f'{{"id": {number}}}\n' for number in range(5)]
    path.write_text("".join(texts))
    with sp.SavableLoader(sp.read(path).batch(2), seed=1, lanes=1) as loader:
        state = loader.state_dict()
    texts[line] = '{"id": 7}\n'
    path.write_text("".join(texts))
    with (
        sp.SavableLoader(sp.read(path).batch(2), seed=1, lanes=1) as loader,
        pytest.raises(sp.CheckpointMismatchError, match="rewritten"),
    ):
        loader.load_state_dict(state)


def test_compressed_files_are_rejected_with_the_command_that_unpacks(lines: Path) -> None:
    packed = lines.with_name("b.jsonl.gz")
    packed.write_bytes(b"")
    with pytest.raises(sp.ShardError, match=r"a compressed file cannot be read at an offset. Unpack it, or run"):
        custom.JsonlReader(packed, sp.Lane())
    lines.unlink()
    with pytest.raises(sp.ShardError, match=r"no \.jsonl or \.ndjson file .*but 1 compressed ones"):
        custom.JsonlReader(lines.parent, sp.Lane())


def test_file_without_lines_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    with pytest.raises(sp.ShardError, match=r"no sample in a\.jsonl"):
        custom.JsonlReader(tmp_path, sp.Lane())


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_blank_lines_are_not_samples(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_CHUNK", chunk)
    lines = [b" ", b'  {"id": 0} ', b"", b" \t ", b" " * 200, b'{"id": 1}\r', b"\r", b'{"id": 2}', b"\t", b"  "]
    for number, end in enumerate((b"", b"\n")):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"\n".join(lines) + end)
        samples = list(custom.JsonlReader(path, sp.Lane(), shuffle=False, epochs=1))
        assert [sample["json"] for sample in samples] == [b'  {"id": 0} ', b'{"id": 1}', b'{"id": 2}']
        assert [sample.json("id") for sample in samples] == [0, 1, 2]


def test_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    for number, text in enumerate((b'{"id": 0, "txt": "a"}\n{"id": 1}\n', b'{"id": 0, "txt": "a"}')):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + text)
        first = next(custom.JsonlReader(path, sp.Lane(), shuffle=False, key="id"))
        assert (first.key, first["json"]) == ("0", text.strip().split(b"\n")[0])


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (gzip.compress, r"compressed by gzip, .*`gzip -dc < a\.jsonl > NEW` .*`savable convert a\.jsonl DST`"),
        (zstandard.compress, r"compressed by zstd, .*`zstd -dc < a\.jsonl > NEW`"),
        (lambda raw: raw.decode().encode("utf-16"), r"text in UTF-16, .*`iconv -f UTF-16 -t UTF-8 a\.jsonl > NEW`"),
        (lambda raw: raw.decode().encode("utf-16-be"), "text in UTF-16BE, where UTF-8 is read"),
        (lambda raw: raw.decode().encode("utf-32"), "text in UTF-32, where UTF-8 is read"),
        (lambda raw: b"PAR1" + bytes(9), "a first line that is no JSON: .*; JSONL is one JSON value a line"),
        (lambda raw: b'{\n  "id": 1\n}', "a first line that is no JSON: .*; JSONL is one JSON value a line"),
        (lambda raw: raw[:-3], "the last line, at byte .*, was cut"),
        (lambda raw: b'{"id": ', "the last line, at byte 0, was cut"),
    ],
)
def test_file_that_is_not_jsonl_is_reported_as_what_it_is(
    tmp_path: Path, written: Callable[[bytes], bytes], told: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(written(LINES))
    with pytest.raises(sp.ShardError, match=rf"/a\.jsonl: {told}"):
        custom.JsonlReader(path, sp.Lane())


def test_array_of_a_non_text_field_is_an_error_that_names_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc", "ids": [1, 2], "n": 5, "none": null}\n')
    sample = sp.open_dataset(tmp_path / "a.jsonl")[0]
    assert sample.array("text").tobytes() == b"abc" and sample.array("json").tobytes() == sample["json"]
    for name in ("ids", "n"):
        with pytest.raises(TypeError, match=rf"sample\.json\(\)\['{name}'\]"):
            sample.array(name)
