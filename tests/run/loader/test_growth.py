"""`allow={"shards"}`: when new shards join, what is kept of it, and what is refused."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.run_facts import RunFacts
from savable_pipeline.data.shards.index import Format
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from savable_pipeline.run.state.state_dict import lane_name, read_facts
from savable_pipeline.run.state.summary import summarize
from tests.conftest import write_numbered_shards, write_tar

LANES = 4
SIZES = [12, 9, 15, 10, 8]


class Ids(sp.TaskEncoder):
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"]


def pipeline(folder: Path, lane: sp.Lane, **how: Any) -> custom.Stage:
    samples = sp.TarShardReader(folder, lane, block_size=2, **how)
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(samples, size=5), Ids()), size=1)


def blended(folder: Path, lane: sp.Lane) -> custom.Stage:
    sources = {name: sp.TarShardReader(folder / name, lane, block_size=2) for name in ("a", "b")}
    return sp.Batcher(sp.Encode(sp.Blend(sources, weights={"a": 3, "b": 1}), Ids()), size=1)


def loader(folder: Path, make: Any = pipeline, how: dict[str, Any] | None = None, **more: Any) -> sp.SavableLoader:
    return sp.SavableLoader(partial(make, folder, **(how or {})), seed=1, lanes=LANES, **more)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of the first two shards; `add` copies others into it."""
    write_numbered_shards(tmp_path / "all", SIZES)
    (tmp_path / "now").mkdir()
    add(tmp_path / "now", 0, 1)
    return tmp_path / "now"


def add(folder: Path, *shards: int) -> None:
    for shard in shards:
        shutil.copy(folder.parent / "all" / f"{shard:04d}.tar", folder)


def after(steps: int, **how: Any) -> dict[str, Any]:
    """The state of a loader that has given so many batches."""
    with loader(**how) as made:
        for _ in range(steps):
            next(made)
        return made.state_dict()


def growth_in(state: dict[str, Any]) -> list[Any]:
    """What a state says of the growth."""
    return read_facts(state).growth


def refusal(made: sp.SavableLoader, state: dict[str, Any], allow: Any = ("shards",)) -> str:
    before = made.state_dict()
    with pytest.raises(sp.CheckpointMismatchError) as caught:
        made.load_state_dict(state, allow=allow)
    assert made.state_dict() == before
    return str(caught.value)


def test_new_shards_join_at_the_epoch_after_the_last_started_one(data: Path) -> None:
    state = after(4 * 12 + 1, folder=data)  # 21 samples over 4 lanes; the buffer takes 5 more: lane 0 is in epoch 3
    add(data, 2)
    made = loader(data)
    made.load_state_dict(state, allow="shards")
    assert growth_in(made.state_dict()) == {"": [(0, 2), (4, 3)]}
    next(made)
    made.load_state_dict(made.state_dict())  # the same, said to people
    assert summarize(made.state_dict()).settings["growth"] == "2 shards from epoch 0, 3 shards from epoch 4"
    later = loader(data)
    later.load_state_dict(made.state_dict())  # no word is needed from now on
    assert growth_in(later.state_dict()) == {"": [(0, 2), (4, 3)]}
    add(data, 3, 4)
    again = loader(data)
    again.load_state_dict(later.state_dict(), allow="shards")  # before the first have joined: all at one epoch
    assert growth_in(again.state_dict()) == {"": [(0, 2), (4, 5)]}
    for _ in range(4 * 20):
        next(again)
    assert growth_in(again.state_dict()) == {"": [(0, 2), (4, 5)]}


def test_new_shards_before_the_first_batch_are_used_from_the_start(data: Path) -> None:
    state = after(0, folder=data)
    add(data, 2)
    made, fresh = loader(data), loader(data)
    made.load_state_dict(state, allow=["shards"])
    assert made.state_dict() == fresh.state_dict()
    assert [int(next(made)) for _ in range(40)] == [int(next(fresh)) for _ in range(40)]


def test_shards_join_each_source_of_a_blend_at_its_own_epoch(data: Path) -> None:
    for name, shards in (("a", (0,)), ("b", (1, 2))):
        (data / name).mkdir()
        for shard in shards:
            shutil.copy(data.parent / "all" / f"{shard:04d}.tar", data / name)
    state = after(4 * 15, folder=data, make=blended)  # a: 11 of 3 a lane and epoch; b: 4 of 6
    for name in "ab":
        shutil.copy(data.parent / "all" / "0003.tar", data / name)
    made = loader(data, make=blended)
    made.load_state_dict(state, allow={"shards"})
    assert growth_in(made.state_dict()) == {"a": [(0, 1), (4, 2)], "b": [(0, 2), (1, 3)]}
    shutil.copy(data.parent / "all" / "0004.tar", data / "b")
    again = loader(data, make=blended)
    again.load_state_dict(made.state_dict(), allow={"shards"})
    assert growth_in(again.state_dict()) == {"a": [(0, 1), (4, 2)], "b": [(0, 2), (1, 4)]}


def test_permission_for_new_shards_applies_later_and_is_harmless_without_any(data: Path) -> None:
    with loader(data, ranks=(1, 2)) as made:
        next(made)
        state = made.state_dict()  # a rank's own part
    made.load_state_dict(state, allow={"shards"})
    assert made.state_dict() == state


def test_joining_shards_needs_the_state_of_all_lanes(data: Path) -> None:
    made = [loader(data, ranks=(rank, 2)) for rank in range(2)]
    for each in made:
        next(each)
    states = [each.state_dict() for each in made]
    add(data, 2)
    later = loader(data, ranks=(1, 2))
    told = refusal(later, states[1])
    assert "not 2 of 4" in told
    assert "global_state_dict()" in told
    later.load_state_dict(sp.merge_states(states), allow={"shards"})
    assert growth_in(sp.merge_states([later.state_dict(), _of_rank(data, states, 0)]))


def _of_rank(data: Path, states: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    made = loader(data, ranks=(rank, 2))
    made.load_state_dict(sp.merge_states(states), allow={"shards"})
    return made.state_dict()


def test_ranks_with_different_new_shards_are_rejected(data: Path) -> None:
    state = after(5, folder=data)
    add(data, 2)
    grown = loader(data)
    grown.load_state_dict(state, allow={"shards"})
    facts = RunFacts({"": [(0, 2), (9, 3)]})
    lane = unpack_state(grown.state_dict()["lane_00002"], LaneState, "")
    other = pack_state(msgspec.structs.replace(lane, facts=facts.digest))
    mixed = {**grown.state_dict(), "lane_00002": other}
    assert "lane_00002 does not fit the state" in refusal(loader(data), mixed, ())
    with pytest.raises(sp.CheckpointMismatchError, match="lane_00002 does not fit the state"):
        sp.merge_states([mixed])
    alone = {name: value for name, value in mixed.items() if not name.startswith("lane_")} | {"lane_00002": other}
    with pytest.raises(sp.CheckpointMismatchError, match="have different epochs at which shards joined"):
        sp.merge_states([grown.state_dict(), {**alone, "facts": pack_state(facts)}])


@pytest.mark.parametrize(
    ("last", "new", "advice"),
    [
        ("0001.tar", "0000b.tar", "0002.tar"),
        ("part-9.tar", "part-10.tar", "part-9_1.tar"),
        ("web/0009.tar", "new/0000.tar", "web/0010.tar"),
        ("last.tar", "before.tar", "last_1.tar"),
    ],
)
def test_new_shard_between_others_is_rejected_with_a_better_name(
    tmp_path: Path, last: str, new: str, advice: str
) -> None:
    folder = tmp_path / "data"
    members = [(f"{i}.json", b'{"id": 1}') for i in range(8)]
    write_tar(folder / "0000.tar", members)
    write_tar(folder / last, members)
    state = after(5, folder=folder)
    write_tar(folder / new, members)
    told = refusal(loader(folder), state)
    assert f"the new shard {new} sorts before {last}" in told
    assert f"such as {advice}" in told
    (folder / new).rename(folder / advice)
    index_files(folder, TARS)
    loader(folder).load_state_dict(state, allow={"shards"})


def test_removed_and_rewritten_shards_stay_an_error(data: Path) -> None:
    state = after(5, folder=data)
    original = (data / "0001.tar").read_bytes()
    add(data, 2)
    write_tar(data / "0001.tar", [(f"{i}.json", b"{}") for i in range(3)])
    assert "rewritten: 0001.tar (shards were added, removed" in refusal(loader(data), state)
    (data / "0001.tar").unlink()
    index_files(data, TARS)
    assert "added: 0002.tar; removed: 0001.tar" in refusal(loader(data), state)
    (data / "0001.tar").write_bytes(original)
    loader(data).load_state_dict(state, allow={"shards"})
    assert "allow={'TarShardReader.shards'}" not in refusal(loader(data), state, ())


def test_other_differences_are_rejected_with_new_shards(data: Path) -> None:
    state = after(5, folder=data)
    add(data, 2)
    assert "window: saved 128, here 2" in refusal(loader(data, how={"window": 2}), state)


def test_subset_by_count_rejects_new_shards_and_by_fraction_accepts_them(data: Path) -> None:
    states = {subset: after(5, folder=data, how={"subset": subset}) for subset in (10, 0.5)}
    add(data, 2)
    told = refusal(loader(data, how={"subset": 10}), states[10])
    assert "subset=10 is a count, so no shards can join" in told
    made = loader(data, how={"subset": 0.5})
    made.load_state_dict(states[0.5], allow={"shards"})
    assert growth_in(made.state_dict())[""][-1][1] == 3
    other = loader(data, how={"subset": 0.4})
    assert "subset: saved 0.5, here 0.4" in refusal(other, states[0.5])


def test_split_grows_with_its_list_without_changing_old_shards(data: Path) -> None:
    def split(*shards: int) -> None:
        lines = "".join(f"  - '{shard:04d}.tar'\n" for shard in shards)
        (data / ".nv-meta" / "split.yaml").write_text(f"split_parts:\n  train:\n{lines}\n")

    add(data, 2)
    (data / ".nv-meta").mkdir()
    split(0, 2)
    state = after(5, folder=data, how={"split": "train"})
    add(data, 3, 4)
    split(0, 2, 4)
    made = loader(data, how={"split": "train"})
    made.load_state_dict(state, allow={"shards"})
    ids = {int(next(made)) for _ in range(200)}
    assert ids == {*range(12), *range(21, 36), *range(46, 54)}
    split(0, 1, 2, 4)
    assert "TarShardReader.selection: " in refusal(loader(data, how={"split": "train"}), state)


def test_evaluation_cannot_get_new_shards(data: Path) -> None:
    state = after(1, folder=data, how={"epochs": 1}, on_iter="restart")
    add(data, 2)
    told = refusal(loader(data, how={"epochs": 1}, on_iter="restart"), state)
    assert "on_iter='restart' cannot reach" in told


def test_only_new_shards_are_read_to_index_them(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = after(5, folder=data)
    scanned: list[str] = []
    scan = Format.scan
    monkeypatch.setattr(Format, "scan", lambda form, root, name: scanned.append(name) or scan(form, root, name))
    add(data, 2, 3)
    loader(data).load_state_dict(state, allow={"shards"})
    assert scanned == ["0002.tar", "0003.tar"]


@pytest.mark.parametrize("pairs", [[(0, 2), (3, 9)], [(0, 0), (2, 2)], [(1, 2)], [(0, 2), (0, 2)]])
def test_forged_pairs_are_an_error(data: Path, pairs: list[tuple[int, int]]) -> None:
    facts = RunFacts({"": pairs})
    state = {**after(5, folder=data), "facts": pack_state(facts)}
    for name in [lane_name(lane) for lane in range(LANES)]:
        lane = unpack_state(state[name], LaneState, "")
        state[name] = pack_state(msgspec.structs.replace(lane, facts=facts.digest))
    made = loader(data)
    with pytest.raises(sp.CheckpointMismatchError, match="is of another dataset"):
        made.load_state_dict(state)
        next(made)


class Unmarked(custom.PassThrough, custom.BatchStage):
    """The ids of samples without a mark: it does not know of itself whether there is another."""

    def __next__(self) -> Any:
        return next(found["id"] for sample in self.source if "mark" not in (found := sample.json()))


def unmarked(folder: Path, lane: sp.Lane) -> custom.Stage:
    return Unmarked(sp.TarShardReader(folder, lane, epochs=2))


def test_lane_that_read_an_old_batch_is_requested_again(tmp_path: Path) -> None:
    """In the epoch that it was to come from, it has other samples now, which are all skipped."""
    write_numbered_shards(tmp_path, [2 * LANES])
    state = after(2 * LANES, folder=tmp_path, make=unmarked)
    assert unpack_state(state["lane_00000"], LaneState, "").more
    write_tar(tmp_path / "0001.tar", [(f"m{i}.json", b'{"id": 0, "mark": 1}') for i in range(600)])
    made = loader(tmp_path, make=unmarked)
    made.load_state_dict(state, allow={"shards"})
    with pytest.raises(sp.SavableError, match="epoch 1 has no batch"):  # epoch 0 has ended, as it can; nothing is left
        next(made)


def test_loader_of_grown_data_reads_old_epochs_unchanged(data: Path) -> None:
    finite = {"epochs": 1}
    with loader(data, how=finite) as made:
        old = [int(next(made)) for _ in range(2)]  # two of the lanes have read nothing yet
        state, rest = made.state_dict(), [int(batch) for batch in made]
    add(data, 2)
    made = loader(data, how=finite)
    assert len(made) > len(old) + len(rest)
    for _ in range(2):
        next(made)
    made.load_state_dict(state, allow={"shards"})
    assert len(made) == len(old) + len(rest)
    assert [int(batch) for batch in made] == rest
    assert growth_in(made.state_dict()) == {"": [(0, 2), (1, 3)]}  # in later passes too
