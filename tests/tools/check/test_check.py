"""`savable check` finds ahead of time whatever a run would stumble over; `savable index` survives it."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import savable_pipeline as sp
from savable_pipeline.data.shards import index_making as processes_of_shards
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.tools.check.dataset_check import CheckReport, check_dataset
from savable_pipeline.tools.cli.main import app
from tests.conftest import write_tar
from tests.support.toy_check import die_over_one
from tests.support.toy_files import file_hashes, jpeg

Damage = Callable[[Path], object]
NAMES = ["0.tar", "1.tar", "2.tar"]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three indexed shards of three captioned images, with the files of Energon."""
    root = tmp_path_factory.mktemp("pristine")
    for shard, name in enumerate(NAMES):
        members = []
        for i in range(3):
            text = json.dumps({"n": i}).encode()
            members += [(f"k{i}.jpg", jpeg(shard * 3 + i)), (f"k{i}.json", text), (f"k{i}.txt", b"caption")]
        write_tar(root / name, members)
    index_files(root, TARS, processes=1)
    (root / ".nv-meta/.info.json").write_text(json.dumps({"shard_counts": dict.fromkeys(NAMES, 3)}))
    (root / ".nv-meta/split.yaml").write_text(json.dumps({"split_parts": {"train": NAMES}}))
    return root


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    """Return a copy, to be damaged."""
    for path in pristine.rglob("*"):
        target = tmp_path / "data" / path.relative_to(pristine)
        if path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "data"


def edited(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda root: (root / name).write_bytes(change((root / name).read_bytes()))


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :]


def zeroed(first: int, last: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:first] + bytes(last - first) + raw[last:]


def swapped(root: Path) -> None:
    """Replace a shard by another of the same size."""
    size = (root / "1.tar").stat().st_size
    write_tar(root / "1.tar", [(f"q{i}.txt", b"x") for i in range(3)])
    (root / "1.tar").write_bytes((root / "1.tar").read_bytes().ljust(size, b"\0"))


JPEG_BYTES = len(jpeg(3))
TEXT_AT = 512 + -(-JPEG_BYTES // 512) * 512 + 512 + 512  # where the header of k0.txt stands
DAMAGES: dict[str, tuple[Damage, set[tuple[str, str]]]] = {
    "nothing": (lambda root: None, set()),
    "missing": (lambda root: (root / "1.tar").unlink(), {("1.tar", "missing shard")}),
    "truncated": (lambda root: os.truncate(root / "1.tar", 3000), {("1.tar", "damaged shard")}),
    "cut in its final padding": (
        edited("1.tar", lambda raw: raw.rstrip(b"\0")),
        {("1.tar", "damaged shard")},
    ),
    "empty": (lambda root: os.truncate(root / "1.tar", 0), {("1.tar", "damaged shard")}),
    "zero-filled header": (edited("1.tar", zeroed(TEXT_AT, TEXT_AT + 512)), {("1.tar", "damaged shard")}),
    "flipped in a header": (edited("1.tar", flipped(TEXT_AT + 3)), {("1.tar", "damaged shard")}),
    "zero-filled image": (edited("1.tar", zeroed(512, 512 + JPEG_BYTES)), {("1.tar", "zero-filled")}),
    "no image": (edited("1.tar", flipped(512)), {("1.tar", "unreadable image")}),
    "cut image": (edited("1.tar", zeroed(512 + JPEG_BYTES // 2, 512 + JPEG_BYTES)), {("1.tar", "unreadable image")}),
    "malformed JSON": (
        edited("1.tar", lambda raw: raw.replace(b'{"n": 1}', b'{"n"; 1}')),
        {("1.tar", "malformed JSON")},
    ),
    "malformed text": (
        edited("1.tar", lambda raw: raw.replace(b"caption", b"c\xffption", 1)),
        {("1.tar", "malformed text")},
    ),
    "grown": (edited("1.tar", lambda raw: raw + bytes(512)), {("1.tar", "changed since it was indexed")}),
    "swapped": (
        swapped,
        {("1.tar", "changed since it was indexed"), ("1.tar", "wrong .tar.idx")},
    ),
    "offsets of another shard": (edited("1.tar.idx", flipped(8)), {("1.tar", "wrong .tar.idx")}),
    "offsets cut short": (edited("1.tar.idx", lambda raw: raw[:-3]), {("1.tar", "wrong .tar.idx")}),
    "another count": (
        edited(".nv-meta/.info.json", lambda raw: raw.replace(b'"1.tar": 3', b'"1.tar": 4')),
        {("1.tar", "wrong count")},
    ),
    "a split of unknown shards": (
        edited(".nv-meta/split.yaml", lambda raw: raw.replace(b"2.tar", b"9.tar")),
        {("", "wrong metadata")},
    ),
    "excluding what is not there": (
        edited(".nv-meta/split.yaml", lambda raw: raw[:-1] + b', "exclude": ["0.tar/k0", "9.tar/k0"]}'),
        {("", "wrong metadata")},
    ),
    "a split that leads outside": (
        edited(".nv-meta/split.yaml", lambda raw: raw.replace(b"2.tar", b"../../etc/passwd")),
        {("", "wrong metadata")},
    ),
    "metadata that is none": (edited(".nv-meta/.info.json", lambda raw: raw[:-3]), {("", "wrong metadata")}),
}


def found(report: CheckReport) -> set[tuple[str, str]]:
    return {(problem.shard, problem.reason) for problem in report.problems}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check shards in this process, which is faster for three."""

    def each_shard(task: Any, root: Path, names: list[str], processes: int) -> Any:
        return ((name, msgspec.msgpack.encode(task(root, name))) for name in names)

    monkeypatch.setattr("savable_pipeline.tools.check.dataset_check.each_shard", each_shard)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("what", DAMAGES)
def test_check_finds_each_kind_of_damage_and_nothing_else(dataset: Path, what: str) -> None:
    damage, expected = DAMAGES[what]
    damage(dataset)
    before = file_hashes(dataset)
    report = check_dataset(dataset)
    assert found(report) == expected
    assert file_hashes(dataset) == before
    if not expected:
        assert (report.shards, report.samples) == (3, 9)


@pytest.mark.usefixtures("in_this_process")
def test_half_of_a_surrogate_pair_in_json_is_a_problem(tmp_path: Path) -> None:
    """A tokenizer raises an error for it. A pair, and letters whose bytes start alike, are text."""
    lines = [
        rb'{"m": "\ud83d\ude00 \uD55C"}',
        '{"m": "한글"}'.encode(),
        rb'{"m": "\\ud83d"}',
        rb'{"m": ["\ud83d"]}',
        b'{"m": "\xed\xa0\x80"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    report = check_dataset(tmp_path, processes=1)
    assert [(each.reason, each.index) for each in report.problems] == [("malformed text", 3), ("malformed text", 4)]


def test_dataset_without_samples_is_a_problem(tmp_path: Path) -> None:
    """As readers raise an error. An empty file beside others is none: Spark writes them."""
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert [each.reason for each in check_dataset(tmp_path, processes=1).problems] == ["no samples"]
    (tmp_path / "b.jsonl").write_bytes(b'{"a": 1}\n')
    assert not check_dataset(tmp_path, processes=1).problems


def test_error_of_a_sample_names_it_and_its_position(dataset: Path) -> None:
    DAMAGES["malformed JSON"][0](dataset)
    (problem,) = check_dataset(dataset).problems
    assert (problem.shard, problem.key, problem.part, problem.index) == ("1.tar", "k1", "json", 1)
    assert problem.offset is not None
    raw = (dataset / "1.tar").read_bytes()
    assert raw[problem.offset : problem.offset + 8] == b'{"n"; 1}'


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_check_command_reports_problems_as_text_and_json(dataset: Path) -> None:
    whole = run("check", dataset, "--workers", 1)
    assert (whole.exit_code, whole.stdout.split(" in ")[0]) == (0, "no problem found")
    DAMAGES["truncated"][0](dataset)
    DAMAGES["offsets of another shard"][0](dataset)
    DAMAGES["a split of unknown shards"][0](dataset)
    text = run("check", dataset, "--workers", 2)
    assert text.exit_code == 1
    assert text.stdout.startswith("2 problems found in 6 samples (3 shards, ")
    assert text.stdout.endswith("\nFAILED: 2 problems\n")
    assert "1.tar: damaged shard: no tar header at byte 2560: truncated" in text.stdout
    told = run("check", dataset, "--json", "--workers", 1)
    assert told.exit_code == 1
    facts = json.loads(told.stdout)
    assert (facts["shards"], facts["samples"], facts["root"]) == (3, 6, str(dataset))
    assert [(p["shard"], p["reason"]) for p in facts["problems"]] == [
        ("", "wrong metadata"),
        ("1.tar", "damaged shard"),
    ]
    assert run("check", dataset / "nothing").exit_code == 2


def test_index_command_indexes_and_lists_unreadable_shards(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("savable_pipeline.tools.cli.console._LINE_EVERY_S", 0.0)
    (dataset / INDEX_NAME).unlink()
    os.truncate(dataset / "1.tar", 5700)
    first = run("index", dataset)
    assert first.exit_code == 1
    assert f"index: {dataset / INDEX_NAME}" in first.stdout
    assert "1.tar: " in first.stdout and "(1 sample before it)" in first.stdout
    assert "indexing: 3 of 3 shards" in first.stderr and first.stdout.endswith("FAILED: 1 damaged shard\n")
    again = run("index", dataset)
    assert again.exit_code == 1 and "indexing: 1 of 1 shards" in again.stderr
    (dataset / "1.tar").write_bytes((dataset / "0.tar").read_bytes())
    assert run("index", dataset).exit_code == 0
    assert "indexing: 0 of 0 shards" in run("index", dataset).stderr


def test_process_killed_by_a_shard_costs_only_that_shard(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def each_shard(task: Any, root: Path, names: list[str], processes: int) -> Any:
        return processes_of_shards.each_shard(die_over_one, root, names, processes)

    monkeypatch.setattr("savable_pipeline.tools.check.dataset_check.each_shard", each_shard)
    report = check_dataset(dataset, processes=1)
    assert found(report) == {("1.tar", "cannot be checked")}
    assert report.samples == 6


def test_samples_with_scattered_members_are_a_problem_of_their_shard(dataset: Path) -> None:
    write_tar(dataset / "3.tar", [(f"k{i}.{part}", b"x" * 90) for part in ("txt", "bin") for i in range(3)])
    (problem,) = (each for each in check_dataset(dataset, processes=1).problems if each.reason == "torn samples")
    assert (problem.shard, "3 samples" in problem.detail) == ("3.tar", True)


def test_images_with_alpha_are_a_warning(dataset: Path) -> None:
    clear = io.BytesIO()
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(clear, "PNG")
    write_tar(dataset / "new" / "3.tar", [("a.png", clear.getvalue()), ("b.png", clear.getvalue())])
    shown = CliRunner().invoke(app, ["check", str(dataset / "new")])
    assert shown.exit_code == 0 and shown.stdout.startswith("no problem found")
    assert "warning: 2 images have alpha: sample.image() lays them over white, or over its background=" in shown.stdout
    assert check_dataset(dataset / "0.tar").with_alpha == 0 and check_dataset(dataset / "new").with_alpha == 2


def test_images_that_decode_differently_than_expected_are_warnings(dataset: Path) -> None:
    deep, turned = io.BytesIO(), io.BytesIO()
    Image.new("I;16", (4, 4), 30_000).save(deep, "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    Image.new("RGB", (4, 6)).save(turned, "JPEG", exif=exif)
    write_tar(dataset / "new" / "3.tar", [("a.png", deep.getvalue()), ("b.jpg", turned.getvalue())])
    more_bits, to_turn = check_dataset(dataset / "new").warnings
    assert more_bits.startswith("1 image has more than 8 bits") and "image(bits=8)" in more_bits
    assert to_turn.startswith("1 image is to be turned") and "fit sample.image(exif=False)" in to_turn
    sample, other = sp.open_dataset(dataset / "new")
    assert sample.image(mode="I").getextrema() == (30_000, 30_000)
    assert other.image().size == (6, 4) and other.image(exif=False).size == (4, 6)
    assert check_dataset(dataset / "0.tar").warnings == []
