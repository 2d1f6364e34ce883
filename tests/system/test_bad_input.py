"""Bad data, bad states and bad arguments: a clear error at once, with and without workers, and never a hang."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.state_numbers import ORDER, STATE
from savable_pipeline.errors import StateError
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from savable_pipeline.testing import assert_exact_resume
from tests.conftest import write_tar
from tests.support.streams import next_hashes
from tests.support.toy_faults import FaultyEncoder, NumberEncoder, SkipEverything, no_stage_pipeline, number_pipeline
from tests.support.toy_pipelines import toy_pipeline


def loader(pipeline: Any, num_workers: int = 0, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": 12, "num_workers": num_workers, **settings})


with_and_without_workers = pytest.mark.parametrize("num_workers", [0, 2])


# Data.


def truncated(folder: Path) -> None:
    write_tar(folder / "0.tar", [("a.json", bytes(3000))])
    (folder / "0.tar").write_bytes((folder / "0.tar").read_bytes()[:2000])


def shard_errors() -> dict[str, tuple[Callable[[Path], Any], str]]:
    return {
        "an empty folder": (lambda folder: folder.mkdir(), "no .tar file in this folder or below it"),
        "no folder": (lambda folder: None, "no such file or folder"),
        "no samples": (
            lambda folder: write_tar(folder / "0.tar", [("README", b"x")]),
            r"no sample in 1 shard\. Name a sample's files KEY\.EXTENSION",
        ),
        "no members": (lambda folder: write_tar(folder / "0.tar", []), "no sample in 1 shard"),
        "an empty file": (
            lambda folder: (folder.mkdir(), (folder / "0.tar").touch()),
            "0.tar: truncated: it ends at byte 0",
        ),
        "truncated": (truncated, "0.tar: truncated: the member at byte 0 ends at byte 3512"),
        "no tar": (lambda folder: (folder.mkdir(), (folder / "0.tar").write_bytes(b"jpeg" * 999)), "0.tar: .*byte 0"),
        "an extension twice": (
            lambda folder: write_tar(folder / "0.tar", [("a.json", b"1"), ("a.json", b"2")]),
            "0.tar: sample 'a' has the extension 'json' twice, again at byte 1024",
        ),
    }


@pytest.mark.parametrize(("what", "num_workers"), [*((what, 0) for what in shard_errors()), ("truncated", 2)])
def test_unreadable_shards_have_a_clear_error(tmp_path: Path, what: str, num_workers: int) -> None:
    make, message = shard_errors()[what]
    make(tmp_path / "shards")
    with pytest.raises(sp.ShardError, match=message):
        next(loader(partial(number_pipeline, str(tmp_path / "shards")), num_workers))


@pytest.mark.parametrize(("change", "num_workers"), [("unlink", 0), ("cut", 0), ("unlink", 2)])
def test_shard_deleted_during_a_run_has_a_clear_error(make_shards: Any, change: str, num_workers: int) -> None:
    """The trainer indexes it; then, before a worker opens it, someone cleans up."""
    folder = make_shards([20])
    own = loader(partial(number_pipeline, str(folder)), num_workers)
    own.state_dict()
    if change == "unlink":
        (folder / "0000.tar").unlink()
    else:
        (folder / "0000.tar").write_bytes((folder / "0000.tar").read_bytes()[:9000])
    for _ in range(2):
        told = (
            r"0000\.tar: (No such file|9000 bytes, but \d+ when indexed|truncated: it ends at byte 9000)"
            "|no .tar file in this folder"  # a worker that lists the folder after the only shard went
        )
        with pytest.raises(sp.SavableError, match=told):
            next(own)


@with_and_without_workers
def test_raising_encoder_has_a_clear_error(make_shards: Any, tmp_path: Path, num_workers: int) -> None:
    pipeline = partial(number_pipeline, str(make_shards([20])), encoder=FaultyEncoder("value", 0, tmp_path / "never"))
    with pytest.raises(sp.EncodeError, match=r"sample 's000000' of 0000\.tar: ValueError: no such colour\."):
        next(loader(pipeline, num_workers))


@with_and_without_workers
def test_endless_run_that_skips_every_sample_has_a_clear_error(make_shards: Any, num_workers: int) -> None:
    pipeline = partial(number_pipeline, str(make_shards([20])), encoder=SkipEverything())
    with pytest.raises(sp.EncodeError, match=r"skipped [\d,]+ samples in a row, the last one with 'not wanted'"):
        next(loader(pipeline, num_workers))


def test_a_finite_run_in_which_every_sample_is_skipped_is_an_error(make_shards: Any) -> None:
    pipeline = partial(number_pipeline, str(make_shards([20])), encoder=SkipEverything(), epochs=1)
    told = r"Encode skipped the first 20 samples of the data: 'not wanted' 20\. Change the encoder or its settings, or"
    with loader(pipeline) as own, pytest.raises(sp.SavableError, match=told):
        next(own)


def test_endless_run_without_a_fitting_item_has_a_clear_error(make_shards: Any) -> None:
    told = r"items in a row were longer than max_length, the last one with 5\. Raise max_length=4"
    with pytest.raises(sp.EncodeError, match=told):
        next(loader(partial(too_long_pipeline, str(make_shards([20])))))


class Long(NumberEncoder):
    """Every item has length 5."""

    def length(self, item: Any) -> int:
        return 5


def too_long_pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.OnlinePacker(sp.Encode(sp.TarShardReader(shards, lane), Long()), max_length=4), size=1)


def test_pipeline_that_returns_no_stage_has_a_clear_error() -> None:
    own = loader(no_stage_pipeline)
    for use in (own.state_dict, own.__next__):
        with pytest.raises(ValueError, match=r"a pipeline must return its last stage \(such as a Batcher\), not list"):
            use()


# States.


@pytest.fixture
def pipeline(make_shards: Any) -> Any:
    return partial(toy_pipeline, str(make_shards([40, 7, 60])))


@pytest.fixture
def state(pipeline: Any) -> dict[str, Any]:
    own = loader(pipeline, lanes=2)
    next_hashes(own, 5)
    return own.state_dict()


def refused(pipeline: Any, state: Any, kind: type[Exception] = StateError, **settings: Any) -> str:
    """Why a loader does not load `state`, and where it stood before it still stands."""
    own = loader(pipeline, lanes=2)
    before = own.state_dict()
    with pytest.raises(kind) as caught:
        own.load_state_dict(state, **settings)
    assert own.state_dict() == before
    return str(caught.value)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (None, "a state must be a dict, not NoneType"),
        ([1, 2], "a state must be a dict, not list"),
        (b"SAVL", "a state must be a dict, not bytes"),
        ({}, "no state of a SavableLoader: it lacks epoch, fingerprint, lanes, slot.\n  It has nothing."),
        ({"model": {"weight": torch.ones(2)}}, "this is no state of a SavableLoader"),
        ({"_snapshot": {}, "_steps_since_snapshot": 3}, "this is no state of a SavableLoader"),
    ],
    ids=["None", "list", "bytes", "empty", "a model", "another loader"],
)
def test_state_of_another_type_has_a_clear_error(pipeline: Any, wrong: Any, message: str) -> None:
    assert message in refused(pipeline, wrong)
    with pytest.raises(StateError, match=message):
        sp.merge_states([wrong])


@pytest.mark.parametrize("version", [0, STATE + 1, str(STATE), None])
def test_state_of_another_version_has_a_clear_error(pipeline: Any, state: dict[str, Any], version: Any) -> None:
    saved = f"ORDER {ORDER} and STATE {'none' if version is None else repr(version)}"
    told = f"the state: saved with {saved}, but this release reads ORDER {ORDER} and STATE {STATE}. "
    assert told in refused(pipeline, {**state, "state": version})


def test_lane_of_another_version_has_a_clear_error(pipeline: Any, state: dict[str, Any]) -> None:
    raw = state["lane_00000"]
    assert f"lane_00000: saved with ORDER {ORDER} and STATE 9, but this release reads ORDER" in refused(
        pipeline, {**state, "lane_00000": raw[:4] + (9).to_bytes(2, "little") + raw[6:]}
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("lanes", -1), ("epoch", 1.5), ("slot", None), ("lanes", "3"), ("epoch", True), ("slot", torch.tensor(3))],
)
def test_number_that_is_not_a_count_has_a_clear_error(
    pipeline: Any, state: dict[str, Any], name: str, value: Any
) -> None:
    assert f"{name} of the state is {value!r}, not a count" in refused(pipeline, {**state, name: value})


def test_state_without_lanes_has_a_clear_error(pipeline: Any, state: dict[str, Any]) -> None:
    assert "no lanes" in refused(pipeline, {**state, "lanes": 0})


def test_entry_that_is_not_a_state_has_a_clear_error(pipeline: Any, state: dict[str, Any]) -> None:
    for value in (None, 3, "text", [], torch.ones(3), b"", b"SAVL"):
        for name in ("fingerprint", "lane_00001"):
            assert refused(pipeline, {**state, name: value}).startswith(f"{name}: ")


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["fingerprint", "lane_00001"])
def test_flipped_byte_or_truncation_anywhere_has_a_clear_error(
    pipeline: Any, state: dict[str, Any], name: str, step: int
) -> None:
    own = loader(pipeline, lanes=2)
    raw = state[name]
    for at in (*range(40), *range(40, len(raw), step)):
        for wrong in (raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :], raw[:at]):
            with pytest.raises(StateError, match=name):
                own.load_state_dict({**state, name: wrong})
    own.load_state_dict(state)


def test_state_of_other_stages_has_a_clear_error(pipeline: Any, state: dict[str, Any]) -> None:
    """As if by hand: the fingerprint agrees, the checksum too, but the stages' part is of another stage."""
    lane = unpack_state(state["lane_00001"], LaneState, "lane")
    other = pack_state(msgspec.structs.replace(lane, stages={"position": 3}))
    own = loader(pipeline, lanes=2)
    own.load_state_dict({**state, "lane_00001": other})
    for _ in range(2):
        with pytest.raises(sp.CheckpointMismatchError, match="this is no state of Batcher"):
            next(own)


# Arguments.


def encoded(shards: Any) -> custom.Stage:
    return sp.Encode(sp.TarShardReader(str(shards), sp.Lane()), NumberEncoder())


@pytest.mark.parametrize(
    "make,message",
    [
        *[
            (lambda shards, name=name, value=value: sp.TarShardReader(str(shards), sp.Lane(), **{name: value}), name)
            for name in ("epochs", "block_size", "window")
            for value in (0, -1)
        ],
        (lambda shards: sp.ShuffleBuffer(encoded(shards), size=0), "size must be at least 1, not 0"),
        (lambda shards: sp.ShuffleBuffer(encoded(shards), size=-1), "size must be at least 1, not -1"),
        (lambda shards: sp.OnlinePacker(encoded(shards), max_length=0), "max_length must be at least"),
        (lambda shards: sp.OnlinePacker(encoded(shards), max_length=-1), "max_length must be at least"),
        (lambda shards: sp.OnlinePacker(encoded(shards), max_length=1, open_packs=0), "open_packs must be at least"),
        (
            lambda shards: sp.OnlinePacker(encoded(shards), max_length=1, policy="best"),  # type: ignore[arg-type]
            "policy must be one of sequential",
        ),
        (
            lambda shards: sp.OnlinePacker(sp.TarShardReader(str(shards), sp.Lane()), max_length=9),
            r"OnlinePacker takes a stage of items \(custom.ItemStage\), not TarShardReader",
        ),
        (lambda shards: sp.Batcher(encoded(shards), size=0), "size must be at least 1, not 0"),
        (lambda shards: sp.Batcher(encoded(shards), size=-1), "size must be at least 1, not -1"),
        (lambda shards: sp.Lane(-1, 4), "index -1, count 4"),
        (lambda shards: sp.Lane(4, 4), "index 4, count 4"),
        (lambda shards: sp.Lane(0, 0), "index 0, count 0"),
        (lambda shards: sp.Lane().rng("a").integers(0), "not 0"),
        (lambda shards: sp.Lane().rng("a").integers(-3), "not -3"),
        (lambda shards: sp.StatefulDataset(no_stage_pipeline, seed=0, lanes=0), "lanes must be at least 1, not 0"),
        (lambda shards: sp.StatefulDataset(no_stage_pipeline, seed=0, lanes=-4), "lanes must be at least 1, not -4"),
    ],
)
def test_wrong_number_in_a_stage_has_a_clear_error(make_shards: Any, make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_shards([4]))


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"lanes": 0}, "lanes must be at least 1, not 0"),
        ({"lanes": -12}, "lanes must be at least 1, not -12"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"workers": 4}, r"workers must be sp\.Workers\(\.\.\.\), not 4"),
        ({"workers": sp.Workers(2), "num_workers": 2}, r"pass num_workers=2 or sp\.Workers\(2\), not both"),
        ({"seed": 2**64}, "seed must fit into 64 bits"),
        ({"seed": -(2**63) - 1}, "seed must fit into 64 bits"),
        ({"ranks": 0}, r"ranks must be \(rank, world_size\), a process group, a mesh or sp\.Ranks\(\.\.\.\), not 0"),
        ({"ranks": (5, 4)}, "rank must be 0 to 3, not 5"),
        (
            {"ranks": (0, 5)},
            "5 ranks do not divide lanes=12. Start a run with lanes=15, or use a world size of 1, 2, 3",
        ),
    ],
    ids=str,
)
def test_wrong_argument_of_the_loader_has_a_clear_error(pipeline: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(pipeline, **settings)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_every_seed_of_64_bits_is_a_seed(pipeline: Any, seed: int) -> None:
    own = loader(pipeline, seed=seed)
    batches = next_hashes(own, 3)
    own.load_state_dict(own.state_dict())
    assert batches != next_hashes(loader(pipeline, seed=7), 3)
    assert derive_key(seed) != derive_key(7)


def test_shards_of_a_reader_are_checked_first_in_the_trainer(tmp_path: Path) -> None:
    own = loader(partial(number_pipeline, str(tmp_path / "nothing")), 2, workers=sp.Workers(start_method="spawn"))
    for use in (own.state_dict, own.__next__, partial(own.load_state_dict, {})):
        with pytest.raises(sp.SavableError):
            use()


def test_assert_exact_resume_rejects_a_world_size_that_does_not_divide(pipeline: Any) -> None:
    with pytest.raises(ValueError, match="5 ranks do not divide lanes=12"):
        assert_exact_resume(pipeline, steps=1, world_sizes=(5,))
