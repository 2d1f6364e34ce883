"""Forged states: the checksum is right and the content is not. Each is refused by name, and the loader goes on."""

from __future__ import annotations

import copy
import random
import resource
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.run_facts import RunFacts
from savable_pipeline.core.state_numbers import ORDER, STATE
from savable_pipeline.errors import StateError
from savable_pipeline.run.state.fingerprint import Fingerprint, pack_fingerprint, unpack_fingerprint
from savable_pipeline.run.state.lane_state import has_too_many, pack_state
from savable_pipeline.run.state.state_dict import check_flat, lane_numbers, split_spans
from savable_pipeline.run.state.summary import summarize
from tests.support.streams import next_hashes
from tests.support.toy_pipelines import toy_pipeline
from tests.support.toy_stores import WRITERS

SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 3}
REFUSED = (StateError, sp.CheckpointMismatchError)


def plain_of(raw: bytes) -> Any:
    return msgspec.msgpack.decode(raw[16:])


def sealed(plain: Any) -> bytes:
    """Plain values as an entry of a state, with the right checksum."""
    body = plain if isinstance(plain, bytes) else msgspec.msgpack.encode(plain)
    return b"SAVL" + struct.pack("<HH", STATE, ORDER) + xxh3_64_intdigest(body).to_bytes(8, "little") + body


def sealed_fingerprint(plain: Any) -> bytes:
    packed = plain if isinstance(plain, bytes) else msgspec.msgpack.encode(plain)
    return sealed({"compressed": zlib.compress(packed)})


# The search.

HOSTILE: list[Any] = [
    *(-1, 0, 1, 5, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), None, True, "", "x", [], {}),
    *(b"", b"\xff" * 12, b"\xff" * 11, b"\0" * 24, [[]], [0, 0, 0], [[2**63, 2**63, 2**63]], {"a": 1}, [5, 1, 0]),
    *([2**40, 0, 0], [[1, 0, 0], 0, 5], [-1, -1, -1], [1, 0, [2, 0, 0]]),
]


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value lies inside of another."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield from paths(part, (*at, name))


def mutated(rng: random.Random, value: Any) -> Any:
    """The value with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        *before, last = rng.choice(list(paths(value)) or [("odd",)])
        parent = value
        for name in before:
            parent = parent[name]
        _change(rng, parent, last)
    return value


def _change(rng: random.Random, parent: Any, last: Any) -> None:
    old = parent.get(last) if isinstance(parent, dict) else parent[last]
    how = rng.random()
    if how < 0.15:
        del parent[last]
    elif how < 0.3 and isinstance(parent, list):
        parent.append(copy.deepcopy(old))
    elif how < 0.4 and isinstance(old, bytes) and old:
        place = rng.randrange(len(old))
        parent[last] = old[:place] + bytes([rng.randrange(256)]) + old[place + 1 :]
    elif how < 0.5 and type(old) is int:
        parent[last] = max(-(2**63), min(2**64 - 1, old + rng.choice([-1, 1, 7, 1000, 2**33])))
    elif how < 0.6 and isinstance(parent, dict):
        parent["odd"] = old
    else:
        parent[last] = copy.deepcopy(rng.choice(HOSTILE))


def forged(rng: random.Random, state: dict[str, Any]) -> dict[str, Any]:
    """The state with changes in its fingerprint, in its own entries, or, mostly, in a lane."""
    where = rng.random()
    if where < 0.15:
        found = unpack_fingerprint(state["fingerprint"])
        return {
            **state,
            "fingerprint": sealed_fingerprint(mutated(rng, msgspec.to_builtins(found, builtin_types=[bytes]))),
        }
    if where < 0.2:
        return mutated(rng, state)  # type: ignore[no-any-return]
    name = rng.choice([name for name in state if name.startswith("lane_")])
    return {**state, name: sealed(mutated(rng, plain_of(state[name])))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("forged")
    for store in ("tar", "parquet", "jsonl", "tokens"):
        WRITERS[store](folder / store, [40, 7, 60])
    return folder


PIPELINES: dict[str, dict[str, Any]] = {
    "buffer, fan-out and packs": {"store": "tar"},
    "sequential packs of cut items": {"store": "tar", "pack": "sequential", "too_long": "split", "max_images": 3},
    "held packs": {"store": "tar", "pack": "first_fit_decreasing", "candidates": 3},
    "two epochs of nested blends": {"store": "tar", "epochs": 2, "blend": "nested"},
    "blend by tokens": {"store": "tar", "blend": "items", "by": "tokens"},
    "schedule, buckets and groups": {"store": "tar", "blend": "items", "weights": "linear", "pack": "both"},
    "schedule by tokens": {"store": "tar", "blend": "items", "weights": "step", "by": "tokens", "tells": True},
    "Parquet in order": {"store": "parquet", "subset": 0.5, "shuffle": False},
    "blend of JSONL": {"store": "jsonl", "blend": "samples"},
    "tokens": {"store": "tokens", "pack": "function", "tells": True},
}


def search(folder: Path, name: str, seed: int, tries: int) -> int:
    """Load so many forged states and take batches; the number of those that were refused."""
    how = PIPELINES[name]
    pipeline = partial(toy_pipeline, str(folder / how["store"]), **how)
    rng = random.Random(seed)
    whole = sp.SavableLoader(pipeline, **SETTINGS)
    first, state, then = next_hashes(whole, 7), whole.state_dict(), next_hashes(whole, 3)
    refused = 0
    own = sp.SavableLoader(pipeline, **SETTINGS)
    for _ in range(tries):
        wrong = forged(rng, state)
        before = own.state_dict()
        loaded = False
        try:
            own.load_state_dict(wrong)
            loaded = True
            next_hashes(own, 4)
        except REFUSED:
            refused += 1
            assert loaded or own.state_dict() == before
        except sp.EncodeError as error:
            assert "did not yield item" in str(error)  # a ref of a part that a sample may have had
    own.load_state_dict(state)
    assert len(first) == 7 and next_hashes(own, 3) == then, "after all of them a good one loads"
    return refused


@pytest.mark.parametrize("name", PIPELINES)
def test_a_forged_state_is_a_state_error_and_changes_nothing(folder: Path, name: str) -> None:
    assert search(folder, name, seed=1, tries=24) > 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", PIPELINES)
def test_many_forged_states_are_state_errors(folder: Path, name: str, seed: int) -> None:
    assert search(folder, name, seed, tries=1500) > 300


# One by one.


@pytest.fixture
def saved(folder: Path) -> dict[str, Any]:
    own = sp.SavableLoader(partial(toy_pipeline, str(folder / "tar")), **SETTINGS)
    next_hashes(own, 7)
    return own.state_dict()


def toy(folder: Path, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(partial(toy_pipeline, str(folder / "tar")), **{**SETTINGS, **settings})


def without(state: dict[str, Any], *fields: str) -> dict[str, Any]:
    found = unpack_fingerprint(state["fingerprint"])
    kept = {name: value for name, value in found.fields.items() if name not in fields}
    return {**state, "fingerprint": pack_fingerprint(Fingerprint(kept, found.environment, found.addresses))}


def test_a_state_without_its_stages_is_rejected_by_a_run_of_another_seed_and_batch_size(
    folder: Path, saved: dict[str, Any]
) -> None:
    other = sp.SavableLoader(partial(toy_pipeline, str(folder / "tar"), size=3), seed=4, lanes=3)
    every = set(unpack_fingerprint(saved["fingerprint"]).fields)
    for fields in ({"stages"}, {"stages", "seed", "batch_size"}, every):
        with pytest.raises(sp.CheckpointMismatchError, match=r"stages: saved None, here \['TarShardReader'"):
            other.load_state_dict(without(saved, *fields))


def test_missing_fields_of_a_state_are_named(folder: Path, saved: dict[str, Any]) -> None:
    fields = unpack_fingerprint(saved["fingerprint"]).fields
    assert fields["TarShardReader.epochs"] is None
    for field in fields:
        with pytest.raises(sp.CheckpointMismatchError, match=rf"  {field}: "):
            toy(folder).load_state_dict(without(saved, field))


def test_new_encoder_setting_of_none_is_allowed(folder: Path) -> None:
    """It means what the encoder did before."""

    class Encoder(sp.TaskEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            return sample.json()["id"]

    class WithCrop(Encoder):
        def settings(self) -> dict[str, Any]:
            return {"crop": None}

    WithCrop.__qualname__ = Encoder.__qualname__

    def pipeline(lane: sp.Lane, kind: type[Encoder]) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(str(folder / "tar"), lane), kind()), size=2)

    state = sp.SavableLoader(partial(pipeline, kind=Encoder), **SETTINGS).state_dict()
    sp.SavableLoader(partial(pipeline, kind=WithCrop), **SETTINGS).load_state_dict(state)


def test_other_lanes_in_the_state_than_in_its_fingerprint_are_a_state_error(
    folder: Path, saved: dict[str, Any]
) -> None:
    fresh = toy(folder).state_dict()
    with pytest.raises(StateError, match="has 6 lanes, but its fingerprint 3"):
        toy(folder).load_state_dict({**fresh, "lanes": 6})


@pytest.mark.parametrize(
    "odd",
    [
        {"lane_²": b""},
        {"lane_" + "9" * 5000: b""},
        {"lane_00000000": b""},
        {"state": 10**5000},
        {"slot": 10**5000},
        {"slot": 1 << 62},
        {7: b""},
        {None: b""},
        {("a",): 1},
        {"fingerprint": {"a": 1}},
        {"lane_00001": None},
    ],
    ids=range(11),
)
def test_odd_keys_and_numbers_are_state_errors_or_ignored(saved: dict[str, Any], odd: dict[Any, Any]) -> None:
    harmless = all(isinstance(name, str) and name not in saved for name in odd)
    for read in (check_flat, summarize, lambda state: sp.merge_states([state, saved])):
        try:
            read({**saved, **odd})
        except StateError:
            assert not harmless
    assert lane_numbers({**saved, "lane_²": b"", "lane_" + "9" * 5000: b"", "lane_00000000": b""}) == [0, 1, 2]


@pytest.mark.parametrize(
    "raw", [b"[[1,2,", b"[[-1,2,3]]", b'[["\xff",0,1]]', b"[[0,0,1" + b"0" * 5000 + b"]]", 5, None]
)
def test_spans_that_cannot_be_read_are_a_state_error(raw: Any) -> None:
    with pytest.raises(StateError, match="to_skip"):
        split_spans({"to_skip": raw})


class Keeping(custom.PassThrough, custom.SampleStage):
    """A stage of a user's, whose state is a number in a dict."""

    given = 0

    def __next__(self) -> sp.Sample:
        self.given += 1
        return next(self.source)

    def save_state(self) -> dict[str, Any]:
        return {"mine": {"given": self.given}, "source": self.source.save_state()}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.given = state["mine"]["given"]
        if self.given < 0:
            raise OSError(5, "the disk is gone")
        self.source.restore_state(state["source"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_of_a_users_stage_is_a_state_error_with_its_cause_but_not_a_disk_error(
    folder: Path, num_workers: int
) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(Keeping(sp.TarShardReader(str(folder / "tar"), lane)), size=2)

    with sp.SavableLoader(
        pipeline, **SETTINGS, num_workers=num_workers, workers=sp.Workers(start_method="fork" if num_workers else None)
    ) as own:
        next_hashes(own, 3)
        state = own.state_dict()
        for mine, kind, said in (
            ({}, StateError, "lane 0 cannot be restored .KeyError: 'given'"),
            (5, StateError, "lane 0 cannot be restored .TypeError"),
            ({"given": -1}, OSError, "the disk is gone"),
        ):
            lane = plain_of(state["lane_00000"])
            lane["stages"]["source"]["mine"] = mine
            own.load_state_dict({**state, "lane_00000": sealed(lane)})
            with pytest.raises(kind, match=said) as caught:
                next(own)
            assert kind is OSError or caught.value.__cause__ is not None
        own.load_state_dict(state)
        assert len(next_hashes(own, 3)) == 3


def test_a_wrong_name_in_allow_is_still_a_value_error(folder: Path, saved: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allow='sede' is no field"):
        toy(folder).load_state_dict(saved, allow={"sede"})


def test_missing_joined_shards_are_rejected_and_the_next_state_loads(folder: Path, saved: dict[str, Any]) -> None:
    own = toy(folder)
    expected = next_hashes(own, 7)
    facts = RunFacts({"": [(0, 1), (1, 900)]})
    wrong = {**saved, "facts": pack_state(facts)}
    for name in ("lane_00000", "lane_00001", "lane_00002"):
        wrong[name] = sealed({**plain_of(saved[name]), "facts": facts.digest})
    told = r"of another dataset\. .*\n  shards joined as \(epoch, shards\) \[\(0, 1\), \(1, 900\)\], here are 3"
    with pytest.raises(sp.CheckpointMismatchError, match=told):
        own.load_state_dict(wrong)
    own.close()
    own.load_state_dict(toy(folder).state_dict())
    assert next_hashes(own, 7) == expected


# Objects.


def test_nested_objects_of_a_state_are_counted() -> None:
    """None is missed but small integers. Random bytes count too, as many as a file has of them."""
    for value in ([], {}, [1, [2, {}]], {"a": [None, True, 1.5]}, "x" * 40, b"y" * 300, -5, -(2**40), 2**63):
        packed = msgspec.msgpack.encode([value] * 1_200_000)
        objects = 1_200_000 * _objects(value)
        assert has_too_many(packed, max(0, objects - (1 << 20)))
    for text in ("z" * 7_000_000, [1] * 7_000_000, b"\xff" * (1 << 20)):
        assert not has_too_many(msgspec.msgpack.encode(text), 8)
    content = random.Random(1).randbytes(7_000_000)
    assert not has_too_many(msgspec.msgpack.encode(content), len(zlib.compress(content)))


def _objects(value: Any) -> int:
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return (type(value) is not int or not 0 <= value < 128) + sum(map(_objects, inner))


def bomb(content: bytes) -> bytes:
    """A fingerprint with one field of twenty million bytes, small on the disk."""
    head = b"\x83\xa6fields\x81\xa1x" + b"\xdd" + (20_000_000 // len(content)).to_bytes(4, "big")
    return sealed_fingerprint(head + content * (20_000_000 // len(content)) + b"\xabenvironment\x80\xa9addresses\x80")


@pytest.mark.parametrize("content", [b"\x90", b"\x80", b"\x81\x01\x90", b"\xa2ab"])
def test_small_state_of_millions_of_lists_is_rejected_before_decoding(content: bytes) -> None:
    raw = bomb(content)
    assert len(raw) < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StateError, match="over a million values"):
        unpack_fingerprint(raw)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # in KiB; its own bytes are 20 MB


def test_value_that_a_state_cannot_restore_is_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match="over a million values"):
        pack_fingerprint(Fingerprint({"numbers": [300] * 2_000_000}, {}))


def test_the_list_of_many_shards_of_an_older_state_is_read() -> None:
    rows = [[f"{i:07d}.tar", 100, xxh3_64_intdigest(b"%d" % i)] for i in range(150_000)]
    found = Fingerprint({"TarShardReader.shards": rows}, {})
    assert unpack_fingerprint(pack_fingerprint(found)) == found
