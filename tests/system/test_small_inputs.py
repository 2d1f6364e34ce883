"""Small inputs that would become large, or take hours: each is refused, or read in little memory."""

from __future__ import annotations

import tarfile
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.metadata import read_counts, read_split
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import StateError
from savable_pipeline.run.state import fingerprint
from savable_pipeline.run.state.fingerprint import Fingerprint, pack_fingerprint, unpack_fingerprint
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from tests.conftest import write_tar


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Fails where Python's objects take more than 400 MB."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400_000_000, peak


def meta(root: Path, name: str, text: str) -> Path:
    (root / ".nv-meta").mkdir(exist_ok=True)
    (root / ".nv-meta" / name).write_text(text)
    return root


class Compressed(msgspec.Struct):
    compressed: bytes


@pytest.mark.landing
def test_fingerprint_that_decompresses_to_a_gigabyte_is_rejected(little_memory: None) -> None:
    deflate = zlib.compressobj()
    zeros = bytes(1 << 24)
    raw = b"".join(deflate.compress(zeros) for _ in range(64)) + deflate.flush()
    with pytest.raises(StateError, match=r"fingerprint: more than 67\.1 MB inflated\. Use another copy"):
        unpack_fingerprint(pack_state(Compressed(raw)))


def test_settings_that_would_not_round_trip_are_rejected_on_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"have 2\.\d kB, more than 1\.\d kB, most of it Encode\."):
        pack_fingerprint(Fingerprint({"seed": 1, "Encode.table": "x" * 2000}, {}))


@pytest.mark.parametrize("depth", [250, 5000])
def test_lane_with_deep_lists_is_rejected(depth: int) -> None:
    body = b"\x91" * depth + b"\xc0"
    raw = pack_state(LaneState(0, 0, stages={"x": msgspec.Raw(body)}))
    with pytest.raises(StateError, match=r"lane 0: .*Use another copy"):
        unpack_state(raw, LaneState, "lane 0")


@pytest.mark.long
def test_small_split_of_billions_of_shards_is_rejected(tmp_path: Path, little_memory: None) -> None:
    lines = "".join(f"  - '{i}-{{000000..099999}}.tar'\n" for i in range(800))
    root = meta(tmp_path, "split.yaml", f"split_parts:\n  train:\n{lines}")
    with pytest.raises(sp.ShardError, match=r"split\.yaml: more than 2,000,000 names up to '20-"):
        read_split(root, "train", [])


@pytest.mark.landing
def test_pattern_of_long_names_is_limited(tmp_path: Path, little_memory: None) -> None:
    root = meta(tmp_path, "split.yaml", f"split_parts:\n  train: ['{{000000..999999}}{'x' * 5000}.tar']\n")
    with pytest.raises(sp.ShardError, match="too long ones"):
        read_split(root, "train", [])


@pytest.mark.parametrize("number", ["1:" * 1_500_000 + "1", "9" * 3_000_000, "0x" + "f" * 3_000_000])
def test_integer_of_three_megabytes_is_rejected(tmp_path: Path, number: str) -> None:
    root = meta(tmp_path, ".info.yaml", f"shard_counts: {{a.tar: {number}}}\n")
    with pytest.raises(
        sp.ShardError, match=r"\.info\.yaml: cannot be read: line 1, column 23: a number of 300000. char"
    ):
        read_counts(root)


@pytest.mark.parametrize("value", ["!!int ''", "!!bool x", "!!timestamp x", "!!float x"])
def test_value_that_contradicts_its_tag_is_rejected(tmp_path: Path, value: str) -> None:
    with pytest.raises(sp.ShardError, match=r"\.info\.yaml: cannot be read: a value does not match its type"):
        read_counts(meta(tmp_path, ".info.yaml", f"shard_counts: {{a.tar: {value}}}\n"))
    (tmp_path / "mixture.yaml").write_text(f"sources: {{a: {{path: a, weight: {value}}}}}\n")
    with pytest.raises(ValueError, match=r"mixture\.yaml, line 1: a value does not match its type"):
        custom.read_mixture(tmp_path / "mixture.yaml")


TENS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a0: &a0 [x]\n{TENS}sources: *a11\n", r"line \d+, column \d+: more than 100,000 values"),
        ("sources: &a {b: *a}\n", r"line 1: .*the alias \*a contains itself"),
        ("sources: {a: {path: a, weight: '1e99999999'}}", "line 1: the weight of 'a' is too large"),
        ("sources: {true: {path: a, weight: 1}}", "line 1: the name True is not a string. Write it in quotes"),
        (f"sources: {'[' * 1500}", "deeper than 20"),
        ("sources: \0", "line 1: .*special characters are not allowed"),
    ],
)
def test_hostile_mixture_is_rejected(tmp_path: Path, text: str, message: str, little_memory: None) -> None:
    (tmp_path / "mixture.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        custom.read_mixture(tmp_path / "mixture.yaml")
    assert type(caught.value) is ValueError


def test_a_mixture_may_have_aliases(tmp_path: Path) -> None:
    text = "sources:\n  a: &a {path: s, weight: 1}\n  b: *a\n  c: {<<: *a, split: train}\n"
    (tmp_path / "mixture.yaml").write_text(text)
    sources = custom.read_mixture(tmp_path / "mixture.yaml").sources
    assert {name: source.weight for name, source in sources.items()} == {"a": 1, "b": 1, "c": 1}


def test_mixture_that_is_not_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_bytes(b"sources: \xff\xfe")
    with pytest.raises(ValueError, match=r"mixture\.yaml, line 1: ") as caught:
        custom.read_mixture(tmp_path / "mixture.yaml")
    assert type(caught.value) is ValueError


@pytest.mark.landing
def test_pax_headers_by_the_thousand_are_read_in_little_memory(tmp_path: Path) -> None:
    """Every global header has names of its own, and each member is read with all of them."""
    write_tar(tmp_path / "end.tar", [(f"s{i}.txt", b"x") for i in range(200)])
    many = b""
    for i in range(300):
        header = tarfile.TarInfo("h").create_pax_global_header({f"{i}-{j}": "v" * 9 for j in range(500)})
        many += header
    (tmp_path / "many.tar").write_bytes(many + (tmp_path / "end.tar").read_bytes())
    tracemalloc.start()
    table = TARS.scan(tmp_path, "many.tar")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not table.entry.fault and table.entry.samples == 200
    assert peak < 3_000_000
