"""What Megatron-Energon keeps beside the shards, read as it is, and never run."""

from __future__ import annotations

import contextlib
import json
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.shards.metadata import read_counts, read_field_map, read_split, split_names
from savable_pipeline.errors import ShardError
from tests.conftest import write_tar

NAMES = ["a/0.tar", "a/1.tar", "b.tar"]
SPLITS: dict[str, Any] = {
    "split_parts": {"train": ["a/{0..1}.tar", "b.tar"], "val": ["b.tar"]},
    "exclude": ["a/1.tar", "b.tar/k{1,3}", "b.tar/dir/k4", "gone.tar/k"],
}


def meta(root: Path, **files: str) -> Path:
    (root / ".nv-meta").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / ".nv-meta" / name.replace("__", ".")).write_text(text)
    return root


YAML_SPLITS = """split_parts:
  train:
  - a/{0..1}.tar
  - b.tar
  val:
  - b.tar
exclude:
- a/1.tar
- b.tar/k{1,3}
- b.tar/dir/k4
- gone.tar/k
"""


@pytest.mark.parametrize(("name", "text"), [("split__yaml", YAML_SPLITS), ("split__json", json.dumps(SPLITS))])
def test_split_is_its_shards_without_excluded_shards_and_keys(tmp_path: Path, name: str, text: str) -> None:
    root = meta(tmp_path, **{name: text})
    assert split_names(root) == ["train", "val"]
    train = read_split(root, "train", NAMES)
    assert (train.shards, train.excluded) == (["a/0.tar", "b.tar"], {"b.tar": {"k1", "k3", "dir/k4"}})
    with pytest.raises(ShardError, match=r"no split 'test'\. Use one of 'train', 'val'"):
        read_split(root, "test", NAMES)
    with pytest.raises(ShardError, match=r"split 'train' names 1 missing shards, such as b\.tar"):
        read_split(root, "train", NAMES[:2])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("__info__json", '{"energon_version": "7.4.1", "shard_counts": {"a/0.tar": 3, "b.tar": 2}}'),
        ("__info__yaml", "shard_counts:\n  a/0.tar: 3\n  b.tar: 2\n"),
    ],
)
def test_counts_are_read_from_json_or_yaml(tmp_path: Path, name: str, text: str) -> None:
    assert read_counts(tmp_path) is None
    assert read_counts(meta(tmp_path, **{name: text})) == {"a/0.tar": 3, "b.tar": 2}


def test_a_field_is_a_part_or_alternatives_or_a_value_inside(tmp_path: Path) -> None:
    assert read_field_map(tmp_path) == {}
    text = "__module__: os\n__class__: system\nfield_map:\n  image: jpg,png\n  caption: json[texts][0]\n"
    assert read_field_map(meta(tmp_path, dataset__yaml=text)) == {
        "image": [("jpg",), ("png",)],
        "caption": [("json", "texts", "0")],
    }


WRONG = {
    "split__yaml": [
        "",
        "[]",
        "split_parts: [a]",
        "split_parts: {train: a.tar}",
        "split_parts: {train: [1]}",
        "{",
        "\x00",
        "a: b: c",
        "split_parts: {train: ['{0..99999999999}.tar']}",
        "split_parts: {train: ['" + "{0..9}" * 12 + "']}",
        "split_parts: {train: ['" + "{a,b}" * 60 + "']}",
        "split_parts: {1: []}",
        "split_parts: {train: []}\nexclude: {a: b}",
        "split_parts: !!python/object:os.system {}",
        "a: &a {x: 1}\nb: {<<: *a}",
        "a: *b",
        "split_parts: {train: [../x.tar]}",
        "split_parts: {train: [/etc/x.tar]}",
        "[" * 200_000,
        "- " * 20_000,
        "{a: " * 50_000,
    ],
    "split__json": ["", "[]", '{"split_parts": 3}', '{"split_parts": {"train": [null]}}', "[" * 100_000],
    "__info__json": [
        "{}",
        '{"shard_counts": {"a.tar": "many"}}',
        '{"shard_counts": {"../a.tar": 1}}',
        '{"shard_counts": {"/a.tar": 1}}',
        '{"shard_counts": {"x/../../a.tar": 1}}',
    ],
    "__info__yaml": ["shard_counts: 3", "shard_counts: {a.tar: -x}", "- 1"],
    "dataset__yaml": [
        "split_config: other.yaml",
        "split_config: ../../split.yaml",
        "split_config: [split.yaml]",
        "info_config: /etc/passwd",
        "info_config: none.json",
        "sample_loader: sample_loader.py:load",
        "part_filter: [jpg]",
        "field_map: [jpg]",
        "field_map: {image: 'jpg]['}",
        "field_map: {image: ''}",
        "3",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts], ids=repr)
def test_wrong_metadata_is_an_error_that_names_the_file(tmp_path: Path, name: str, text: str) -> None:
    root = meta(tmp_path, **{name: text})
    with pytest.raises(ShardError, match=r"\.nv-meta/\.?(split|info|dataset)\."):
        read_everything(root)


def read_everything(root: Path) -> None:
    read_counts(root)
    for name in split_names(root) or []:
        read_split(root, name, ["a.tar"])
    read_field_map(root)


@pytest.mark.parametrize("kind", ["{{<<: [{}]}}", "[{}]"])
def test_small_yaml_file_cannot_expand_to_a_large_object(tmp_path: Path, kind: str) -> None:
    """Merge keys and lists of aliases, each ten times the one before."""
    first = "a0: &a0 {x: 1}\n" if "<<" in kind else "a0: &a0 [x]\n"
    tens = "".join(f"a{i}: &a{i} {kind.format(', '.join([f'*a{i - 1}'] * 10))}\n" for i in range(1, 9))
    tracemalloc.start()
    with pytest.raises(ShardError):
        read_everything(meta(tmp_path, split__yaml=f"{first}{tens}split_parts: {{train: *a8}}\n"))
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


ODD = ["field_map:\n", " a: b[c]\n", "{..}", "{1..", "&a *a"]


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.sampled_from(["split.yaml", "split.json", ".info.json", ".info.yaml", "dataset.yaml"]),
    st.one_of(
        st.binary(max_size=300),
        st.lists(
            st.sampled_from([*YAML_SPLITS.splitlines(True), "field_map:\n", " a: b[c]\n", "{..}", "{1..", "&a *a"])
        )
        .map("".join)
        .map(str.encode),
    ),
)
def test_any_bytes_are_metadata_or_a_shard_error(name: str, raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, ".nv-meta").mkdir()
        Path(folder, ".nv-meta", name).write_bytes(raw)
        with contextlib.suppress(ShardError):
            read_everything(Path(folder))


# A dataset with it.


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Three shards of 4, 3 and 5 samples with captions, and metadata as Energon writes it."""
    counts = {"a/0.tar": 4, "a/1.tar": 3, "b.tar": 5}
    n = 0
    for name, count in counts.items():
        members = []
        for i in range(count):
            members += [(f"k{i}.jpg", b"%d" % n), (f"k{i}.json", json.dumps({"texts": [f"caption {n}"]}).encode())]
            n += 1
        write_tar(tmp_path / name, members)
    fields = "field_map:\n  image: png,jpg\n  caption: json[texts][0]\n  gone: txt\n"
    info = json.dumps({"energon_version": "7.4.1", "shard_counts": counts})
    return meta(tmp_path, split__yaml=YAML_SPLITS, __info__json=info, dataset__yaml=fields)


def ids(stage: custom.Stage) -> list[int]:
    return [int(sample["jpg"]) for sample in stage]


def test_reader_of_a_split_uses_indices_of_the_whole_dataset(prepared: Path) -> None:
    reader = sp.TarShardReader(prepared, sp.Lane(), split="train", epochs=1, shuffle=False)
    assert reader.population == 7
    samples = list(reader)
    assert [int(s["jpg"]) for s in samples] == [0, 1, 2, 3, 7, 9, 11]  # k1 and k3 of the last shard are excluded
    assert [s.ref.index for s in samples] == [0, 1, 2, 3, 7, 9, 11]
    assert ids(sp.TarShardReader(prepared, sp.Lane(), split="val", epochs=1, shuffle=False)) == [7, 9, 11]
    lanes = [sp.TarShardReader(prepared, sp.Lane(i, 3), split="train", epochs=1, block_size=2) for i in range(3)]
    assert sorted(number for lane in lanes for number in ids(lane)) == [0, 1, 2, 3, 7, 9, 11]


def test_exclude_that_matches_nothing_warns_once_with_the_names(
    prepared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared: dict[Any, Any] = {}
    for lane in range(3):
        sp.TarShardReader(prepared, sp.Lane(lane, 3, worker=WorkerContext(shared=shared)), split="train")
    assert [record.getMessage() for record in caplog.records] == [
        f"{prepared}: not found in b.tar, but named by `exclude`: dir/k4",
        f"{prepared}: not found, but named by `exclude`: gone.tar/k",
    ]


def test_fields_are_found_where_the_field_map_says(prepared: Path) -> None:
    sample = next(sp.TarShardReader(prepared, sp.Lane(), shuffle=False))
    assert (sample.field("image"), sample.field("caption")) == (b"0", "caption 0")
    with pytest.raises(KeyError, match=r"field 'gone' is in \['txt'\], but the sample has \['jpg', 'json'\]"):
        sample.field("gone")
    with pytest.raises(KeyError, match="no field 'label'; the dataset has image, caption, gone"):
        sample.field("label")


def test_selection_is_part_of_the_fingerprint_but_not_the_split_file(prepared: Path) -> None:
    def selection() -> Any:
        return sp.TarShardReader(prepared, sp.Lane(), split="train").settings()["selection"]

    before = selection()
    assert (before["shards"], before["samples"]) == (2, 7)
    meta(prepared, split__yaml=YAML_SPLITS.replace("  val:\n  - b.tar\n", "  val:\n  - a/1.tar\n"))
    assert selection() == before
    meta(prepared, split__yaml=YAML_SPLITS.replace("k{1,3}", "k{1,2}"))
    assert selection()["samples"] == before["samples"] and selection() != before


def test_missing_shard_of_energons_metadata_is_an_error(prepared: Path) -> None:
    (prepared / "a/1.tar").unlink()
    with pytest.raises(ShardError, match=r"a/1\.tar: No such file"):
        open_any(prepared)
    assert open_any(prepared, on_error="skip").faults == [("a/1.tar", "a/1.tar: No such file or directory")]


def test_a_split_of_a_dataset_without_splits_is_an_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"")])
    with pytest.raises(ShardError, match=r"split='train', but there is no split\.yaml"):
        sp.TarShardReader(tmp_path, sp.Lane(), split="train")


def test_configured_metadata_files_replace_the_usual_ones(prepared: Path) -> None:
    other = "split_parts: {train: [a/0.tar, b.tar]}\nexclude: [a/0.tar/k1]\n"
    meta(prepared, dataset__yaml="split_config: v2/split.yaml\ninfo_config: counts.json\n")
    (prepared / ".nv-meta/v2").mkdir()
    (prepared / ".nv-meta/v2/split.yaml").write_text(other)
    with pytest.raises(ShardError, match=r"dataset\.yaml: `info_config` names counts\.json, which is not in"):
        open_any(prepared)
    meta(prepared, counts__json='{"shard_counts": {"b.tar": 5}}')
    assert ids(sp.TarShardReader(prepared, sp.Lane(), split="train", epochs=1, shuffle=False)) == [
        *[0, 2, 3],
        *[7, 8, 9, 10, 11],
    ]
    assert split_names(prepared) == ["train"] and read_counts(prepared) == {"b.tar": 5}


@pytest.mark.parametrize("setting", ["sample_loader", "part_filter"])
def test_unsupported_setting_warns_at_opening_and_disables_fields(
    prepared: Path, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    meta(prepared, dataset__yaml=f"{setting}: loader.py:function\n")
    sample = next(sp.TarShardReader(prepared, sp.Lane(), shuffle=False))
    assert f"`{setting}` of .nv-meta/dataset.yaml" in caplog.text
    assert sample["jpg"] == b"0"
    with pytest.raises(ShardError, match=f"`{setting}`, so samples have no fields"):
        sample.field("image")


def test_a_split_is_read_in_its_own_order_of_shards_unless_it_is_shuffled(prepared: Path) -> None:
    def reader(lane: int = 0, lanes: int = 1, **settings: Any) -> sp.TarShardReader:
        return sp.TarShardReader(prepared, sp.Lane(lane, lanes, 5), split="train", epochs=1, **settings)

    split = "split_parts: {train: [b.tar, a/0.tar, a/1.tar]}\nexclude: [a/0.tar/k1, b.tar/k0]"
    meta(prepared, split__yaml="split_parts: {train: [a/0.tar, a/1.tar, b.tar]}\nexclude: [a/0.tar/k1, b.tar/k0]")
    sorted_by_name, shuffled = reader(shuffle=False).settings(), ids(reader())
    meta(prepared, split__yaml=split)
    assert ids(reader(shuffle=False)) == [8, 9, 10, 11, 0, 2, 3, 4, 5, 6]
    assert ids(reader()) == shuffled
    assert reader(shuffle=False).settings()["selection"]["digest"] != sorted_by_name["selection"]["digest"]
    assert reader().settings()["selection"]["digest"] == sorted_by_name["selection"]["digest"]
    lanes = [ids(reader(lane, 3, shuffle=False, block_size=2)) for lane in range(3)]
    assert lanes == [[8, 9, 3, 4], [10, 11, 5, 6], [0, 2]]
    half = ids(reader(shuffle=False, subset=0.5))
    assert set(half) == set(ids(reader(subset=0.5))) and half[0] >= 8
