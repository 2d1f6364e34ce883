"""The keys and the bytes of every part of each layout, by libraries that are not ours, and the commands on them.

The oracles are webdataset, pyarrow, csv and json; of folders, Kaldi and Lhotse Shar ten lines that follow their rules.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds

import savable_pipeline as sp
from savable_pipeline.data.dataset.info import dataset_info
from savable_pipeline.data.shards.byte_source import seconds_of
from savable_pipeline.data.stores.opening import index_any
from savable_pipeline.tools.check.dataset_check import check_dataset
from savable_pipeline.tools.preview.dataset_page import preview_dataset
from tests.data.test_layouts import LAYOUTS, Layout, kaldi, shar

Samples: TypeAlias = dict[str, dict[str, bytes]]
OPEN = [pytest.param(each, id=each.name) for each in LAYOUTS if not each.error]
WASTE = (".crc", ".idx", ".index", ".fresh", ".tmp", ".part", ".md5")


def visible(root: Path) -> list[Path]:
    """The files that no desktop, archive, NAS, engine or writer has left, in the order of their names."""
    names = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    hidden = ("__MACOSX", "@eaDir")
    shown = [name for name in names if not any(part.startswith((".", "_")) or part in hidden for part in name.parts)]
    return [root / name for name in shown if not name.name.endswith(WASTE)]


def ending(*suffixes: str) -> Callable[[Path], list[Path]]:
    """The files that end so, or have no suffix."""
    return lambda root: [
        path for path in visible(root) if path.suffix.lower() in (*suffixes, "") and path.name[0] != "L"
    ]


def of_tars(root: Path) -> Samples:
    urls = [str(path) for path in ending(".tar")(root)]
    found = wds.WebDataset(urls, shardshuffle=False, empty_check=False)
    return {
        sample["__key__"]: {name: data for name, data in sample.items() if not name.startswith("__")}
        for sample in found
    }


def as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()


def named_files(path: Path, fields: dict[str, Any]) -> dict[str, bytes]:
    """The files that a row names, by suffix; the second of one suffix has its field before it.

    They are beside the table, or below a folder that is. Those of a list have a number before their suffix.
    """
    found: dict[str, bytes] = {}
    folders = [path.parent, *(each for each in path.parent.iterdir() if each.is_dir())]
    for field, value in fields.items():
        file = next((folder / str(value) for folder in folders if (folder / str(value)).is_file()), path)
        if isinstance(value, str) and file.suffix and file != path:
            part = file.suffix[1:]
            found[f"{field}.{part}" if part in found else part] = file.read_bytes()
        elif isinstance(value, list):
            for number, each in enumerate(value):
                found |= {f"{number}.{part}": data for part, data in named_files(path, {field: each}).items()}
    return found


def of_rows(root: Path, path: Path, rows: list[dict[str, Any]], texts: list[bytes]) -> Iterator[tuple[str, Any]]:
    """Rows as JSON, with the files that some of them name as parts, else with their fields."""
    files = [named_files(path, row) for row in rows]
    for number, (row, text, named) in enumerate(zip(rows, texts, files, strict=True)):
        fields = {} if any(files) or path.suffix.lower() in (".csv", ".tsv") or path.read_bytes()[:1] == b"[" else row
        parts = named or {name: as_bytes(value) for name, value in fields.items()}
        yield f"{path.relative_to(root)}:{number}", {"json": json.loads(text), **parts}


def of_texts(root: Path) -> Samples:
    """The rows of the tables that name files, if there are some, else of all."""
    found: dict[str, Any] = {}
    naming: dict[str, Any] = {}
    for path in ending(".jsonl", ".ndjson", ".json", ".csv", ".tsv")(root):
        raw = path.read_bytes()
        if path.suffix.lower() in (".csv", ".tsv"):
            lines, plain = raw.decode().splitlines(), path.suffix == ".tsv"
            delimiter = "\t" if plain else max(",|", key=lines[0].count)
            quoting = csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL
            rows = list(csv.DictReader(lines, delimiter=delimiter, quoting=quoting))
            texts = [json.dumps(row).encode() for row in rows]
        elif raw[:1] == b"[":
            rows = json.loads(raw)
            texts = [json.dumps(row).encode() for row in rows]
        elif b"}\n{" in raw or path.suffix.lower() in (".jsonl", ".ndjson"):
            texts = raw.splitlines()
            rows = [json.loads(line) for line in texts]
        else:
            continue
        found |= dict(of_rows(root, path, rows, texts))
        if any(named_files(path, row) for row in rows):
            naming |= dict(of_rows(root, path, rows, texts))
    return naming or found


def of_parquet(root: Path) -> Samples:
    found: dict[str, Any] = {}
    for path in ending(".parquet", ".pq")(root):
        rows = pq.ParquetFile(path).read().to_pylist()
        partitions = dict(part.split("=") for part in path.relative_to(root).parts[:-1] if "=" in part)
        for number, row in enumerate(rows):
            named = named_files(path, row)
            parts = {name: as_bytes(value) for name, value in (row | partitions).items()}
            found[f"{path.relative_to(root)}:{number}"] = {"json": row, **named} if named else parts
    return found


def of_arrow(root: Path) -> Samples:
    found = {}
    for path in ending(".arrow", ".feather")(root):
        if not path.name.startswith(("cache-", "tmp")):
            for number, row in enumerate(pa.ipc.open_file(path).read_all().to_pylist()):
                found[f"{path.relative_to(root)}:{number}"] = {name: as_bytes(value) for name, value in row.items()}
    return found


def of_folder(root: Path) -> Samples:
    """What shares a path up to the first dot; beside media no README, and no table that stands alone."""
    found: Samples = {}
    for path in visible(root):
        key, _, part = path.name.partition(".")
        found.setdefault(str(path.relative_to(root).with_name(key)), {})[part] = path.read_bytes()
    alone = {"md", "csv", "jsonl", "parquet", "", "db"}
    return {key: parts for key, parts in found.items() if not (set(parts) <= alone or key.endswith("_stats"))}


def of_kaldi(root: Path) -> Samples:
    def lines(path: Path) -> dict[str, str]:
        pairs = (line.split(maxsplit=1) for line in path.read_text().splitlines()) if path.exists() else ()
        return dict(pairs)  # type: ignore[arg-type]

    found: dict[str, Any] = {}
    for scp in sorted(root.rglob("wav.scp")):
        texts, speakers, segments = (lines(scp.with_name(name)) for name in ("text", "utt2spk", "segments"))
        for key in texts:
            path = lines(scp)[segments[key].split()[0] if segments else key]
            fields = {"id": key, "audio": path, "text": texts[key], "speaker": speakers[key]}
            if segments:
                start, end = map(float, segments[key].split()[1:])
                data: Any = {"path": path, "begin_s": start, "end_s": end}
                fields |= {"start": start, "end": end}
            else:
                data = (scp.parent / path).read_bytes()
            found[f"{scp.parent.name} {key}"] = {"json": fields, "wav": data}
    return found


def of_shar(root: Path) -> Samples:
    found: dict[str, Any] = {}
    for path in sorted(root.glob("cuts.*.jsonl.gz")):
        number = path.name.split(".")[1]
        rows, targets = (
            [json.loads(line) for line in unpacked(root / f"{field}.{number}.jsonl.gz").splitlines()]
            for field in ("cuts", "target")
        )
        members = of_members(root / f"recording.{number}.tar")
        for row, target in zip(rows, targets, strict=True):
            data = {
                f"{key}": members[f"{row['id']}.{end}"]
                for key, end in (("flac", "flac"), ("recording.json", "json"))
                if f"{row['id']}.{end}" in members
            }
            found[row["id"]] = {"json": row, "target.json": target, **data}
    return found


def unpacked(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def of_members(path: Path) -> dict[str, bytes]:
    import tarfile

    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


ORACLES: dict[str, Callable[[Path], Samples]] = {
    "tar": of_tars,
    "parquet": of_parquet,
    "arrow": of_arrow,
    "jsonl": of_texts,
    "json": of_texts,
    "csv": of_texts,
    "folder": of_folder,
    "shar": of_shar,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def comparable(samples: Any) -> Any:
    """The samples by key; of parts that are JSON, what they hold."""
    found: dict[str, Any] = {}
    for key, parts in samples:
        found[key] = {}
        for name, data in parts.items():
            value = data
            if name.rpartition(".")[2] == "json" and isinstance(data, bytes):
                value = json.loads(data)
            found[key][name] = value
    return found


def parts_of(root: Path) -> Any:
    return comparable((sample.key, {name: sample[name] for name in sample}) for sample in sp.open_dataset(root))


@pytest.mark.parametrize("layout", [each for each in OPEN if each.values[0].kind in ORACLES])
def test_keys_and_parts_are_those_of_other_libraries(layout: Layout, root: Path) -> None:
    layout.write(root)
    expected = comparable(ORACLES[layout.kind](root).items())
    assert parts_of(root) == expected


@pytest.mark.parametrize("segments", ["", "a1 r 0.0 0.5\na2 r 0.5 1\n"])
def test_kaldi_utterance_has_its_text_speaker_and_audio(root: Path, segments: str) -> None:
    kaldi(segments)(root)
    expected = {key.partition(" ")[2]: parts for key, parts in of_kaldi(root).items()}
    found = {
        key: {**parts, "wav": json.loads(parts["wav"]) if segments else parts["wav"]}
        for key, parts in parts_of(root).items()
    }
    assert found == expected and len(found) == 2


def test_kaldi_tables_may_have_empty_lines(root: Path) -> None:
    kaldi()(root)
    (root / "text").write_text("\na1 good day\n\n")
    assert [sample.json().get("text") for sample in sp.open_dataset(root)] == ["good day", None]


def test_kaldi_text_keeps_line_separators_and_spaces_that_are_not_ascii(root: Path) -> None:
    kaldi()(root)
    texts = ["good\u2028day", "\u3000\u5143\u6c17\x85\u3000"]
    (root / "text").write_text(f"a1 {texts[0]}\na2\t{texts[1]}\r\n")
    assert [sample.json()["text"] for sample in sp.open_dataset(root)] == texts


def test_kaldi_table_that_is_not_utf8_is_an_error_that_names_it(root: Path) -> None:
    kaldi()(root)
    (root / "text").write_bytes(b"a1 caf\xe9\na2 b\n")
    with pytest.raises(sp.ShardError, match=r"text: no UTF-8 text: .*Convert it by iconv"):
        sp.open_dataset(root)


def test_kaldi_segment_is_a_range_of_its_recording(root: Path) -> None:
    kaldi("a1 r 0.0 0.5\na2 r 0.5 1\n")(root)
    with sp.open_dataset(root)["a2"].open("wav") as file:
        assert (file.read(), seconds_of(file)) == (b"RIFF1", (0.5, 1.0))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("wav.scp", "a1 flac -dc a.flac |\na2 b.wav\n", r"row 0, at byte 0: no audio file: wav\.scp has 'flac"),
        ("wav.scp", "a1 raw.ark:17\na2 b.wav\n", r"no audio file: wav\.scp has 'raw\.ark:17'\. Write each"),
        ("wav.scp", "a1 ../a.wav\na2 b.wav\n", "outside the source: the field 'audio' names"),
        ("segments", "a1 nobody 0 1\n", r"no recording: 'nobody' is not in wav\.scp"),
        ("segments", "a1 r 0\n", "malformed line: expected UTTERANCE RECORDING START END"),
    ],
)
def test_kaldi_line_without_audio_is_an_error_of_its_row(root: Path, file: str, content: str, message: str) -> None:
    kaldi()(root)
    (root / file).write_text(content)
    with pytest.raises(sp.ShardError, match=message):
        sp.open_dataset(root)[0]["wav"]


def test_changed_kaldi_text_is_read_again_and_changes_the_digest(root: Path) -> None:
    kaldi()(root)
    before = sp.open_dataset(root)
    assert before["a1"].json()["text"] == "good day"
    (root / "text").write_text("a1 good bye\na2 bye\n")
    after = sp.open_dataset(root)
    assert after["a1"].json()["text"] == "good bye"
    assert after.dataset.digest() != before.dataset.digest()
    (root / "segments").write_text("s a1 0 1\n")
    assert [sample.key for sample in sp.open_dataset(root)] == ["s"]


def test_shar_cut_id_may_have_dots(root: Path) -> None:
    shar(root, "b.1")
    assert sp.open_dataset(root)["b.1"]["flac"] == b'"b.1 flac"'


def test_shar_tar_with_other_cuts_is_an_error(root: Path) -> None:
    shar(root)
    (root / "recording.000001.tar").write_bytes((root / "recording.000000.tar").read_bytes())
    data = sp.open_dataset(root)
    assert data["a"]["flac"] == b'"a flac"'
    with pytest.raises(sp.ShardError, match=r"recording\.000001\.tar: cut 0: not of the cut 'c'"):
        data[2]["flac"]


def test_damaged_shar_cuts_are_found_when_they_are_indexed(root: Path) -> None:
    shar(root)
    path = root / "cuts.000001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(sp.ShardError, match=r"cuts\.000001\.jsonl\.gz: its compressed data are cut short"):
        sp.open_dataset(root)


def preview(root: Path) -> int:
    found = re.search(rb"samples\s+([0-9]+)", re.sub(rb"<[^>]*>", b" ", preview_dataset(str(root))))
    return 0 if found is None else int(found[1])


COMMANDS: dict[str, Callable[[Path], int]] = {
    "info": lambda root: dataset_info(str(root)).samples,
    "check": lambda root: check_dataset(str(root), processes=1).samples,
    "index": lambda root: sum(entry.samples for entry in entries_after_indexing(root)),
    "preview": preview,
}


def entries_after_indexing(root: Path) -> list[Any]:
    path, faults = index_any(str(root), processes=1)
    assert path.exists() and not faults
    return [*sp.open_dataset(root).dataset.entries]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("layout", OPEN)
def test_every_command_counts_the_samples_of_each_layout(layout: Layout, command: str, root: Path) -> None:
    layout.write(root)
    assert COMMANDS[command](root) == layout.samples
