"""JSONL: lines and their fields, blank lines, lines that are cut, files that are compressed."""

from __future__ import annotations

from pathlib import Path

import pytest

import savable_pipeline as sp
from savable_pipeline.stores import jsonl_file
from savable_pipeline.stores.jsonl_store import JsonlStore

LINES = (
    b'{"id": 0, "caption": "\xc3\xbc", "n": [1, 2]}\n\n{"id": 1, "caption": null}\r\n\r\n[3]\n{"id": 4, "json": "?"}'
)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    return tmp_path / "a.jsonl"


def test_a_line_is_the_part_json_and_its_fields_are_parts(lines: Path) -> None:
    samples = list(sp.JsonlReader(lines, sp.Lane(), shuffle=False, epochs=1))
    assert [sample.json() for sample in samples] == [
        {"id": 0, "caption": "ü", "n": [1, 2]},
        {"id": 1, "caption": None},
        [3],
        {"id": 4, "json": "?"},
    ]
    first, second, third, fourth = samples
    assert (list(first), first.text(), first.json("n"), first["ID"]) == (["json", "caption"], "ü", [1, 2], b"0")
    assert (list(second), second["caption"], list(third), list(fourth)) == (["json"], b"null", ["json"], ["json"])
    assert (second.key, second.place) == ("a.jsonl:1", "byte offset 41")
    with pytest.raises(KeyError, match="no part 'txt'; the sample has json, id, caption"):
        second["txt"]


def test_the_key_may_be_a_field(lines: Path) -> None:
    store = JsonlStore(lines, key="id")
    assert [store.key(0, row) for row in range(4)] == ["0", "1", "a.jsonl:2", "4"]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_lines_are_found_whatever_is_read_at_a_time(lines: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = jsonl_file.scan(lines.parent, lines.name)
    monkeypatch.setattr(jsonl_file, "_CHUNK", chunk)
    assert jsonl_file.scan(lines.parent, lines.name) == expected
    assert expected.array().tolist() == [0, 41, 71, 75, len(LINES)]


def test_a_last_line_that_was_cut_is_an_error_and_under_skip_the_lines_before_it_are_read(lines: Path) -> None:
    lines.write_bytes(LINES[:-3])
    with pytest.raises(sp.ShardError, match=r"a\.jsonl: the last line, at byte 75, was cut: .*copy the file again"):
        sp.JsonlReader(lines, sp.Lane())
    reader = sp.JsonlReader(lines, sp.Lane(), epochs=1, on_error="skip")
    assert len(list(reader)) == 3
    assert reader.counts == {"skipped/rest of a damaged or missing shard": 1}


def test_a_file_cut_or_rewritten_under_a_run_is_an_error(lines: Path) -> None:
    store = JsonlStore(lines)
    lines.write_bytes(LINES[:60])
    with pytest.raises(sp.ShardError, match="60 bytes, but 97 when it was indexed"):
        store.read(0, 0, "json")
    lines.write_bytes(LINES)
    store = JsonlStore(lines)
    lines.write_bytes(LINES.replace(b'"id": 0', b'"ip": 0'))
    with pytest.raises(sp.ShardError, match="was rewritten since"):
        store.read(0, 1, "json")


def test_compressed_files_are_refused_with_the_command_that_unpacks(lines: Path) -> None:
    packed = lines.with_name("b.jsonl.gz")
    packed.write_bytes(b"")
    with pytest.raises(sp.ShardError, match="a compressed JSONL file cannot be read at an offset; `gzip -dk` or"):
        sp.JsonlReader(packed, sp.Lane())
    lines.unlink()
    with pytest.raises(sp.ShardError, match=r"no \.jsonl or \.ndjson file .*1 compressed JSONL files are there"):
        sp.JsonlReader(lines.parent, sp.Lane())


def test_a_file_of_no_lines_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    with pytest.raises(sp.ShardError, match="no sample in 1 shards"):
        sp.JsonlReader(tmp_path, sp.Lane())
