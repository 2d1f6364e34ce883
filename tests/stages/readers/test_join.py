"""`Join`: parts of other datasets by key, exact through resumes, and added in the middle of a run."""

from __future__ import annotations

import io
import json
import pickle
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.chunked_stage import count_of
from savable_pipeline.stages.filters import Filter
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.testing import assert_exact_resume
from tests.conftest import write_numbered_shards, write_tar
from tests.support.streams import next_hashes

LANES = 4


class Captioned(sp.TaskEncoder):
    """A caption's tokens are its bytes; without one, the id alone."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return [sample.json()["id"], rng.integers(100), *(sample.get("captions.txt") or b"")[:4]]

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return [*items, rng.integers(100)]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return [*items, rng.integers(100)]


class Ids(sp.TaskEncoder):
    """The sample's id."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return {"id": sample.json()["id"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 samples in `shards`; `captions` in another order, of all but every fourth; `more` of all, with two parts."""
    root = tmp_path_factory.mktemp("join")
    write_numbered_shards(root / "shards", [25, 20, 15])
    keys = [f"s{i:06d}" for i in range(60)]
    random.Random(3).shuffle(keys)
    with_caption = [key for key in keys if int(key[1:]) % 4]
    for shard in range(2):
        members = [(f"{key}.txt", f"caption of {key}".encode()) for key in with_caption[shard::2]]
        write_tar(root / "captions" / f"{shard}.tar", [*members, (f"other{shard}.txt", b"of no sample")])
    members = [(f"{key}.{part}", part.encode()) for key in keys for part in ("npy", "mask.png")]
    write_tar(root / "more" / "0.tar", members)
    return root


def reader(data: Path, lane: sp.Lane | None = None, **how: Any) -> sp.TarShardReader:
    return sp.TarShardReader(data / "shards", lane or sp.Lane(), shuffle=False, epochs=1, **how)


def test_joined_parts_are_prefixed_with_the_name_of_their_store(data: Path) -> None:
    samples = custom.Join(reader(data), {"more": data / "more", "captions": [data / "captions"]}, missing="skip")
    sample = next(samples)
    assert (sample.key, sample.ref.index) == ("s000001", 1)
    assert list(sample) == ["json", "captions.txt", "more.npy", "more.mask.png"]
    assert sample["captions.txt"] == b"caption of s000001"
    assert sample.text("captions.txt") == "caption of s000001"
    assert (sample["more.mask.png"], sample["MORE.npy".lower()], sample.json()) == (b"mask.png", b"npy", {"id": 1})
    assert sample.array("captions.txt").tobytes() == sample["captions.txt"]
    assert sample.head("captions.txt", 3) == (b"cap", 18)
    assert "captions.txt" in sample
    assert "txt" not in sample
    again = pickle.loads(pickle.dumps(sample))
    assert dict(again.items()) == dict(sample.items())
    assert samples.fetch(samples.ref)["captions.txt"] == b"caption of s000001"
    with pytest.raises(KeyError):
        sample["captions.png"]


@pytest.mark.parametrize("name", ["captions.parquet", "captions.arrow", "captions.jsonl"])
def test_rows_of_a_table_are_found_by_the_column_of_their_keys(data: Path, tmp_path: Path, name: str) -> None:
    keys = [f"s{i:06d}" for i in range(59, -1, -1)]
    table = {"name": keys, "other": keys[::-1], "caption": [f"caption of {key}" for key in keys]}
    if name.endswith("parquet"):
        pq.write_table(pa.table(table), tmp_path / name, row_group_size=7)
    elif name.endswith("arrow"):
        with pa.ipc.new_file(tmp_path / name, pa.table(table).schema) as file:
            file.write_table(pa.table(table), max_chunksize=7)
    else:
        rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = sp.open_dataset(tmp_path / name, key="name")
    found = [sample.text("new.caption") for sample in custom.Join(reader(data), {"new": store})]
    assert found == [f"caption of s{i:06d}" for i in range(60)]
    other = sp.open_dataset(tmp_path / name, key="other")  # has an index of its own
    found = [sample.text("new.caption") for sample in custom.Join(reader(data), {"new": other})]
    assert found == [f"caption of s{59 - i:06d}" for i in range(60)]
    assert custom.Join(reader(data), {"new": store}).settings() != custom.Join(reader(data), {"new": other}).settings()
    assert pickle.loads(pickle.dumps(other))["s000003"].text("caption") == "caption of s000056"
    with pytest.raises(sp.ShardError, match=r"Name the column of keys by sp\.open_dataset\(path, key=COLUMN\)"):
        next(custom.Join(sp.TarShardReader(data / "shards", sp.Lane()), {"new": tmp_path / name}))


def test_columns_and_key_need_files_that_have_them(data: Path) -> None:
    with pytest.raises(
        ValueError, match=r"key= does not apply to .* files, only to arrow, csv, json, jsonl, litdata and 2 more"
    ):
        sp.open_dataset(data / "captions", key="name")
    with pytest.raises(ValueError, match="columns= does not apply to tar files, only to arrow, parquet"):
        sp.open_dataset(data / "captions", columns=["name"])


def test_sample_without_a_match_is_dropped_and_counted(data: Path) -> None:
    samples = custom.Join(reader(data), {"captions": data / "captions"})
    assert [sample.json()["id"] for sample in samples] == [i for i in range(60) if i % 4]
    assert samples.counts == {"skipped/no such key in captions": 15, "source/0/skipped": 15}


@pytest.mark.parametrize("missing", ["skip", "empty"])
def test_buffer_after_a_join_yields_each_sample_once_under_its_ref(data: Path, missing: Any) -> None:
    samples = sp.ShuffleBuffer(custom.Join(reader(data), {"captions": data / "captions"}, missing=missing), size=7)
    found = [(samples.ref[0], sample.json()["id"], sample.get("captions.txt")) for sample in samples]
    assert [ref for ref, _, _ in found] == [number for _, number, _ in found]
    expected = [number for number in range(60) if number % 4 or missing == "empty"]
    assert sorted(number for number, _, _ in found) == expected
    assert all(text == (f"caption of s{number:06d}".encode() if number % 4 else None) for number, _, text in found)


def test_sample_without_a_match_can_stay_without_the_parts(data: Path) -> None:
    samples = custom.Join(reader(data), {"captions": data / "captions"}, missing="empty")
    found = list(samples)
    assert len(found) == count_of(samples, 0, 0) == 60
    assert list(found[4]) == ["json"]
    assert found[4].get("captions.txt") is None
    assert found[5]["captions.txt"] == b"caption of s000005"
    with pytest.raises(KeyError, match="'captions' has no sample with this key"):
        found[4]["captions.txt"]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_without_the_joined_parts_are_counted(data: Path, workers: int) -> None:
    def captioned(lane: sp.Lane) -> custom.Stage:
        samples = sp.TarShardReader(data / "shards", lane, epochs=1)
        samples = custom.Join(samples, {"captions": data / "captions"}, missing="empty")
        return sp.Batcher(sp.Encode(sp.ShuffleBuffer(samples, size=10), Ids()), size=5)

    with sp.SavableLoader(captioned, seed=1, lanes=2, num_workers=workers, tail="pad") as loader:
        assert sum(int(batch["valid"].sum()) for batch in loader) == 60
        assert loader.stats()["Join/without captions"] == 15


def test_two_samples_with_one_key_are_rejected(data: Path, tmp_path: Path) -> None:
    for shard in range(2):
        write_tar(tmp_path / f"{shard}.tar", [(f"own{shard}.txt", b""), ("s000001.txt", b"x")])
    with pytest.raises(sp.ShardError, match=r"has two samples with key 's000001'.*\n.* 0\.tar and 1\.tar") as caught:
        custom.Join(reader(data), {"captions": tmp_path})
    assert caught.value.reason == "two samples with one key"


def test_own_part_named_like_a_joined_part_is_rejected(tmp_path: Path, data: Path) -> None:
    write_tar(tmp_path / "0.tar", [("s000001.captions.txt", b"its own")])
    sample = next(custom.Join(sp.TarShardReader(tmp_path, sp.Lane()), {"captions": data / "captions"}))
    with pytest.raises(sp.ShardError, match=r"has a part 'captions\.txt', as the joined store has"):
        sample["captions.txt"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stores": {}}, "at least one dataset"),
        ({"stores": {"a.b": "x"}}, "a non-empty str without"),
        ({"missing": "raise"}, "missing must be one of skip, empty"),
        ({"on": "url"}, "on must be one of key"),
    ],
)
def test_wrong_settings_of_a_join_are_rejected(data: Path, wrong: dict[str, Any], message: str) -> None:
    arguments = {"stores": {"captions": data / "captions"}, **wrong}
    with pytest.raises(ValueError, match=f"Join.*{message}"):
        custom.Join(reader(data), **arguments)


def test_keys_of_another_rule_are_an_error(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageInfo, "max_empty", 50)
    write_tar(tmp_path / "0.tar", [("shards/s000001.txt", b"x")])
    with pytest.raises(sp.ShardError, match=r"'captions' lacks 50 samples in a row, the last one with key"):
        next(custom.Join(reader(data), {"captions": tmp_path}))


def test_join_applies_the_policy_for_damaged_shards(data: Path, tmp_path: Path) -> None:
    write_numbered_shards(tmp_path, [10, 10])
    sp.open_dataset(tmp_path)  # indexes the shards
    (tmp_path / "0001.tar").write_bytes(b"changed")
    samples = sp.TarShardReader(tmp_path, sp.Lane(), shuffle=False, epochs=1, on_error="skip")
    items = sp.Encode(custom.Join(samples, {"captions": data / "captions"}), Captioned())
    assert [item[0] for item in items] == [i for i in range(10) if i % 4]
    assert items.counts["skipped/changed shard"] == 10


# Exact.


def pipeline(
    data: Path, lane: sp.Lane, *, join: bool = True, missing: Any = "skip", blend: bool = False, late: bool = False
) -> custom.Stage:
    def joined(samples: custom.SampleStage) -> custom.SampleStage:
        stores = {"captions": data / "captions", "more": data / "more"}
        return custom.Join(samples, stores, missing=missing) if join else samples

    def source() -> custom.SampleStage:
        samples = sp.TarShardReader(data / "shards", lane, block_size=3)
        if late:
            return joined(sp.ShuffleBuffer(samples, size=7))
        return sp.ShuffleBuffer(joined(samples), size=7)

    samples = sp.Blend({"a": source(), "b": source()}, weights={"a": 2, "b": 1}) if blend else source()
    return sp.Batcher(sp.OnlinePacker(sp.Encode(samples, Captioned()), max_length=20), size=2)


@pytest.mark.parametrize(
    "how",
    [{}, {"blend": True, "missing": "empty", "late": True}],
)
def test_interrupted_run_resumes_exactly(data: Path, how: dict[str, Any]) -> None:
    assert_exact_resume(
        partial(pipeline, data, **how), seed=2, lanes=LANES, steps=12, world_sizes=(1, 2, 4), chains=1, after=1
    )


@pytest.mark.parametrize("blend", [False, True])
def test_join_added_during_a_run_does_not_change_the_order(data: Path, blend: bool) -> None:
    """With missing="empty" the ids and random numbers are those of the run without it; only the captions are new."""

    make = partial(pipeline, data, missing="empty", blend=blend)

    def unpacked(lane: sp.Lane, join: bool) -> custom.Stage:
        packer = make(lane, join=join).source
        return sp.Batcher(packer.source, size=3)

    without, with_it = (sp.SavableLoader(partial(unpacked, join=join), seed=4, lanes=LANES) for join in (False, True))
    next_hashes(without, 9)
    state = without.state_dict()
    with pytest.raises(sp.CheckpointMismatchError, match=r"joins: saved None, here \{'captions': 'empty "):
        with_it.load_state_dict(state)
    with_it.load_state_dict(state, allow={"joins"})
    for _ in range(20):
        old, new = next(without), next(with_it)
        assert [item[:2] for item in old[:-1]] == [item[:2] for item in new[:-1]]
        assert any(len(item) > 2 for item in new[:-1])
        assert all(len(item) == 2 for item in old[:-1])
    later = sp.SavableLoader(partial(unpacked, join=True), seed=4, lanes=LANES)
    later.load_state_dict(with_it.state_dict())
    assert next_hashes(later, 5) == next_hashes(with_it, 5)


class Needs(sp.TaskEncoder):
    """The ids of samples, some of them in two parts; with a Join it reads the caption, without which it fails."""

    def __init__(self, join: bool, *, declares: bool = False) -> None:
        self.join = join
        if declares:
            self.length_of = lambda sample: None if sample.json()["id"] % 5 == 0 else 1  # type: ignore[method-assign]

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        assert not self.join or sample["captions.txt"]
        return (number for _ in range(2)) if number % 5 == 0 else number

    def length(self, item: Any) -> int:
        return 1

    def pack(self, items: list[int], rng: sp.Rng) -> list[int]:
        return items


@pytest.mark.parametrize("declares", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("after", ["", "filter", "shuffle", "pack"])
def test_added_join_that_skips_also_skips_buffered_samples(data: Path, after: str, late: bool, declares: bool) -> None:
    def items(join: bool) -> Any:
        samples: Any = sp.TarShardReader(data / "shards", sp.Lane(), block_size=3)
        samples = sp.ShuffleBuffer(samples, size=7) if late else samples
        samples = custom.Join(samples, {"captions": data / "captions"}) if join else samples
        samples = samples if late else sp.ShuffleBuffer(samples, size=7)
        if after == "filter":
            samples = Filter(samples, lambda sample: not join or bool(sample["captions.txt"]))
        made: Any = sp.Encode(samples, Needs(join, declares=declares))
        if after == "pack":
            return sp.OnlinePacker(made, max_length=5, open_packs=2)
        return sp.ShuffleBuffer(made, size=4) if after == "shuffle" else made

    def numbers(found: list[Any]) -> list[int]:
        return [number for each in found for number in (each if after == "pack" else [each])]

    plain = items(join=False)
    for cut in range(1, 9):
        next(plain)
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(plain.save_state()))
        own = items(join=True)
        own.restore_state(state)
        given = numbers([next(own) for _ in range(20)])
        assert given and all(number % 4 for number in given)
        if late and after in ("", "filter"):  # else fewer samples enter a buffer
            ahead = items(join=False)
            ahead.restore_state(state)
            assert given == [number for number in numbers([next(ahead) for _ in range(80)]) if number % 4][:20], cut
    counts = sum((stage.counts for stage in upstream(own)), Counter[str]())
    assert counts["skipped/no such key in captions"]
    assert not counts["without captions"]


def test_both_of_two_joins_skip_buffered_samples(data: Path) -> None:
    def items(*stores: dict[str, Path]) -> Any:
        samples: Any = sp.ShuffleBuffer(sp.TarShardReader(data / "shards", sp.Lane()), size=7)
        for each in stores:
            samples = custom.Join(samples, each)
        return sp.Encode(samples, Needs(bool(stores)))

    plain = items()
    next(plain)
    own = items({"captions": data / "captions"}, {"all": data / "shards"})
    own.restore_state(plain.save_state())
    assert all(next(own) % 4 for _ in range(20))


def test_another_store_or_policy_is_a_mismatch(data: Path, tmp_path: Path) -> None:
    with sp.SavableLoader(partial(pipeline, data), seed=4, lanes=LANES) as loader:
        next(loader)
        state = loader.state_dict()
    for how, told in [({"missing": "empty"}, "'skip [0-9a-f]{32}'.* here .*'empty "), ({"join": False}, "here None")]:
        other = sp.SavableLoader(partial(pipeline, data, **how), seed=4, lanes=LANES)
        with pytest.raises(sp.CheckpointMismatchError, match=f"joins: saved .*{told}"):
            other.load_state_dict(state)


def test_slice_or_transformed_dataset_is_rejected(data: Path) -> None:
    whole = sp.open_dataset(data / "captions")
    for part in (whole[:10], sp.open_dataset(data / "captions", transform=sp.Sample.decoded)):
        with pytest.raises(ValueError, match=r"'captions' is a slice or has a transform. Pass sp.open_dataset"):
            custom.Join(reader(data), {"captions": part})
    assert len(list(custom.Join(reader(data), {"captions": whole[:]}))) == 45


def test_array_in_a_store_is_read_as_an_array(tmp_path: Path, data: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(4))
    write_tar(tmp_path / "0.tar", [("s000001.npy", file.getvalue()), ("s000001.json", json.dumps([1]).encode())])
    sample = next(custom.Join(reader(data), {"latents": tmp_path}))
    assert sample.decoded()["latents.npy"].tolist() == [0, 1, 2, 3]
    assert sample.decoded()["latents.json"] == [1]
