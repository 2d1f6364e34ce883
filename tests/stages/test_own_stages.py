"""A user's own stages: the code of the first page on them runs, and a class is told what stages have no more."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.testing import assert_exact_resume
from tests.conftest import write_tar


class Longer(custom.PassThrough, custom.ItemStage):
    """Items with at least `least` words."""

    def __init__(self, source: custom.ItemStage, *, least: int) -> None:
        super().__init__(source)
        self.least = least

    def __next__(self):  # type: ignore[no-untyped-def]
        return next(item for item in self.source if len(item) >= self.least)

    def settings(self):  # type: ignore[no-untyped-def]
        return {"least": self.least}


class Pairs(custom.ItemStage):
    """Two items as a tuple; the last one of an odd number is alone."""

    ref = ()

    def __init__(self, source: custom.ItemStage) -> None:
        super().__init__(source)
        self._count = 0

    def __next__(self):  # type: ignore[no-untyped-def]
        pair = [(item, self.source.ref) for item in islice(self.source, 2)]
        if not pair:
            raise StopIteration
        items, refs = zip(*pair, strict=True)
        self.ref = (self._count, *refs)
        self._count += 1
        return items

    def fetch(self, ref):  # type: ignore[no-untyped-def]
        return tuple(self.source.fetch(part) for part in ref[1:])

    def save_state(self):  # type: ignore[no-untyped-def]
        return {"count": self._count, **super().save_state()}

    def restore_state(self, state):  # type: ignore[no-untyped-def]
        super().restore_state(state)
        self._count = state["count"]


class Swapped(custom.ItemStage):
    """Items in pairs, the second one first."""

    ref = ()

    def __init__(self, source: custom.ItemStage) -> None:
        super().__init__(source)
        self._held = custom.HeldItems(self)

    def __next__(self):  # type: ignore[no-untyped-def]
        while self._held or self._held.fill(2):
            item, self.ref = self._held.take(-1)
            if type(item) is not sp.Skip:
                return item
        raise StopIteration

    def save_state(self):  # type: ignore[no-untyped-def]
        return {"held": self._held.refs(), **super().save_state()}

    def restore_state(self, state):  # type: ignore[no-untyped-def]
        super().restore_state(state)
        self._held.restore(state["held"])


class Words(sp.TaskEncoder):
    """The words of a caption; batches are lists."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.text().split()[: 1 + rng.integers(5)]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """40 samples with captions of two to five words."""
    members = [(f"s{n:06d}.txt", b" ".join([b"word"] * (2 + n % 4)) + b" %d" % n) for n in range(40)]
    write_tar(tmp_path / "shards" / "0.tar", members)
    return str(tmp_path / "shards")


def test_the_page_as_it_was_first_written_resumes_exactly(shards: str) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(shards, lane), Words())
        return sp.Batcher(Pairs(Swapped(Longer(items, least=2))), size=3)

    assert all(len(words) >= 2 for pair in next(pipeline(sp.Lane())) for words in pair)
    assert_exact_resume(pipeline, lanes=3, steps=9, world_sizes=[1, 3])
    odd = sp.TarShardReader(shards, sp.Lane(), epochs=1, subset=25)
    assert sum(map(len, Pairs(sp.Encode(odd, Words())))) == 25


@pytest.mark.parametrize("kind", [custom.Stage, custom.SampleStage, custom.ItemStage, custom.BatchStage])
def test_a_stage_has_at_most_twelve_public_members_and_each_kind_three_more(kind: type[custom.Stage]) -> None:
    public = {name for name in [*dir(custom.Stage), *custom.Stage.__annotations__] if name[0] != "_"}
    assert len(public) <= 12
    assert len({name for name in dir(kind) if name[0] != "_"} - public) <= 3


@pytest.mark.parametrize(
    "members,told",
    [
        ({"count_of": lambda self, lane, epoch: self.source.count_of(lane, epoch)}, r"ask count_of\(stage, …\) of"),
        ({"verify": lambda self, slot: None}, r"Own: a stage with `verify` has verify and stores_read"),
        ({"take": lambda self, n: ([], [])}, r"Own: `take\(self, n\)` .* is now `take\(self, n, \*, deferred=False\)`"),
    ],
)
def test_a_class_with_half_of_a_capability_is_told_the_other_half(members: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        type("Own", (custom.ItemStage,), members)


class Reading(custom.PassThrough, custom.SampleStage):
    """Has a few of the methods that the loader asks stages for, as their docstrings said."""

    looked: list[int]

    def __init__(self, source: custom.SampleStage) -> None:
        super().__init__(source)
        self.looked = []

    def __next__(self) -> Any:
        return next(self.source)

    def verify(self, slot: int) -> None:
        self.looked.append(slot)

    def stores_read(self) -> list[Any]:
        return []

    @property
    def held_items(self) -> int:
        return 7

    def count_of(self, lane: int, epoch: int) -> int | None:
        return 5

    def addresses(self) -> dict[str, str]:
        return {"table": "here"}

    def settings(self) -> dict[str, Any]:
        return {"table": 1}


def test_what_the_loader_asks_for_is_asked_of_a_stage_that_has_it(shards: str, tmp_path: Path) -> None:
    from savable_pipeline.run.engine.lane_runner import LaneRunner
    from savable_pipeline.run.state.fingerprint import fingerprint
    from savable_pipeline.run.state.lane_state import LaneState, pack_state

    made: list[Reading] = []

    def pipeline(lane: sp.Lane) -> custom.Stage:
        made.append(Reading(sp.TarShardReader(shards, lane, epochs=1)))
        return sp.Batcher(made[-1], size=3)

    runner = LaneRunner(pipeline, seed=0, lanes=1, shared={})
    found = runner.deliver(0, pack_state(LaneState(0, 0)))
    assert made[-1].looked == [0] and found.rebuild_s > 0
    assert len(sp.SavableLoader(pipeline, seed=0, lanes=1)) == 2  # of 5 elements
    assert fingerprint(pipeline(sp.Lane()), lanes=1, seed=0).addresses["Reading.table"] == "here"
