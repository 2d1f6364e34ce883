"""What a state keeps of many shards: hashes of groups of them, which tell whether a dataset begins with the same."""

from __future__ import annotations

import re
from base64 import b64decode
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.shard_digests import count, difference, sample_count, starts_with, summary
from savable_pipeline.data.shards.shard_list import ShardEntry, ShardList
from savable_pipeline.errors import StateError
from savable_pipeline.run.state.fingerprint import Fingerprint, pack_fingerprint, unpack_fingerprint
from tests.support.streams import through_a_file


def entries(shards: int, *, rewritten: int = -1, gone: int = -1, digest: int = 0) -> list[ShardEntry]:
    """Shards of two samples; shard `rewritten` with another hash, and without the shard `gone`."""
    return [
        ShardEntry(f"{i:05d}.bin", size=0, samples=2, digest=digest + i * 977 + (i == rewritten))
        for i in range(shards)
        if i != gone
    ]


def shards(*arguments: int, **more: int) -> ShardList:
    return ShardList.of(entries(*arguments, **more))


class Many(custom.RecordStore):
    """Numbers in many shards."""

    address = "many"

    def __init__(self, made: list[ShardEntry]) -> None:
        self.entries = made

    def key(self, shard: int, row: int) -> str:
        return f"{shard}-{row}"

    def extensions(self, shard: int, row: int) -> list[str]:
        return ["json"]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        return b"%d" % (2 * shard + row)


class Numbers(sp.TaskEncoder):
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()


def pipeline(made: list[ShardEntry], lane: sp.Lane) -> custom.Stage:
    samples = custom.RecordReader(lane.shared("many", lambda: Many(made)), lane)
    return sp.Batcher(sp.Encode(samples, Numbers()), size=3)


def loader(made: list[ShardEntry], **more: Any) -> sp.SavableLoader:
    return sp.SavableLoader(partial(pipeline, made), seed=1, lanes=4, **more)


def state_of(made: list[ShardEntry]) -> dict[str, Any]:
    with loader(made) as run:
        for _ in range(5):
            next(run)
        return through_a_file(run.state_dict())


def test_up_to_1024_shards_are_listed_and_more_are_16_bytes_for_each_1024() -> None:
    assert summary(shards(2)) == [["00000.bin", 2, 0], ["00001.bin", 2, 977]]
    assert isinstance(summary(shards(1024)), list)
    kept: Any = summary(shards(2500))
    assert (kept["shards"], kept["samples"], kept["last"], len(b64decode(kept["groups"]))) == (
        2500,
        5000,
        "02499.bin",
        48,
    )
    assert [count(each) for each in (kept, summary(shards(7)))] == [2500, 7]
    assert [sample_count(each) for each in (kept, summary(shards(7)))] == [5000, 14]


def test_hashes_equal_the_golden_values() -> None:
    kept: Any = summary(shards(1025))
    assert kept["groups"] == "2OjryiZVymzEe6brezzH12Lq11lIH2KNIvOUodT6kPw="


@given(st.integers(0, 12), st.integers(0, 12), st.integers(-1, 12), st.integers(-1, 12), st.integers(1, 4))
def test_prefix_of_shards_is_detected_like_with_a_list(
    old: int, new: int, rewritten: int, gone: int, size: int
) -> None:
    before, now = entries(old), entries(new, rewritten=rewritten, gone=gone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("savable_pipeline.data.dataset.shard_digests.GROUP", size)
        saved = summary(ShardList.of(before))
        assert starts_with(ShardList.of(now), saved) == (now[: len(before)] == before)
        if now != before:
            assert difference(saved, ShardList.of(now))


@pytest.mark.parametrize(
    ("here", "told"),
    [
        (shards(3010), "added: 03000.bin, 03001.bin, 03002.bin, 03003.bin, 03004.bin and 5 more"),
        (
            shards(3000, rewritten=1500),
            "3,000 here, .* from 01024.bin to 02047.bin, numbers 1,024 to 2,047: added, rem",
        ),
        (shards(3000, gone=2600), "3,000 saved and 2,999 here, .* from 02048.bin to 02999.bin, numbers 2,048 to 2,998"),
        (shards(3010, gone=3), "from 00000.bin to 01024.bin, numbers 0 to 1,023"),
        (shards(2048), "removed: 952 after 02047.bin, up to 02999.bin"),
        (shards(5), "from 00000.bin to 00004.bin"),
        (shards(0), "removed: all 3,000"),
    ],
)
def test_first_different_group_is_reported(here: ShardList, told: str) -> None:
    saved = summary(shards(3000))
    assert re.search(told, difference(saved, here)), difference(saved, here)


def test_state_of_many_shards_is_small_and_rejected_if_one_was_rewritten() -> None:
    made = entries(5000)
    state = state_of(made)
    assert len(state["fingerprint"]) < 2_000
    with loader(made) as same:
        same.load_state_dict(state)
    with (
        loader(entries(5000, rewritten=4000)) as other,
        pytest.raises(
            sp.CheckpointMismatchError, match=r"RecordReader.shards: of 5,000 .* from 03072.bin to 04095.bin"
        ),
    ):
        other.load_state_dict(state)


def test_shards_join_a_run_of_many(caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(entries(1500))
    with loader(entries(1600)) as run:
        run.load_state_dict(state, allow={"shards"})
        assert "100 new shards, from 01500.bin on, are read from epoch 1 on" in caplog.text
        seen = [number for _ in range(900) for number in next(run).tolist()]
    assert max(seen) < 3000
    with (
        loader(entries(1600)) as run,
        pytest.raises(sp.CheckpointMismatchError, match="new shards may join at the next"),
    ):
        run.load_state_dict(state)
    with (
        loader(entries(1600, gone=4)) as run,
        pytest.raises(
            sp.CheckpointMismatchError, match=r"RecordReader\.shards: (removed: 00004|added: 01500)|00000\.bin to"
        ),
    ):
        run.load_state_dict(state, allow={"shards"})


@pytest.mark.parametrize("damaged", [{"shards": 2, "samples": 3, "last": "", "groups": "short"}, {"shards": 2}, "?", 5])
def test_a_damaged_list_of_shards_is_an_error(damaged: Any) -> None:
    state = state_of(entries(3))
    found = unpack_fingerprint(state["fingerprint"])
    fields = {**found.fields, "RecordReader.shards": damaged}
    state["fingerprint"] = pack_fingerprint(Fingerprint(fields, found.environment, found.addresses))
    for allow in [(), ("shards",)]:
        with loader(entries(3)) as run, pytest.raises(StateError, match=r"RecordReader\.shards: .*another copy"):
            run.load_state_dict(state, allow=allow)


def test_a_name_with_a_zero_byte_or_that_is_no_text_is_an_error() -> None:
    for name in ["a\0b", "\ud800"]:
        with pytest.raises(sp.ShardError, match=r"the shard name .*\. Rename it"):
            ShardList.of([ShardEntry(name, 0, 1, 1)])
