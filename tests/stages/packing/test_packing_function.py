"""Packing by a function of one's own: its packs are the ones given, wherever it is cut, or it is told what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.packing.packing_policies import check_groups
from savable_pipeline.testing import assert_exact_resume
from tests.stages.packing.test_packer import LENGTHS, packer
from tests.support.few_examples import few
from tests.support.toy_pipelines import ToyEncoder


def longest_first(lengths: list[int]) -> list[list[int]]:
    """First fit decreasing, in packs of 10."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fitting = [group for group in groups if sum(lengths[i] for i in group) + lengths[place] <= 10]
        fitting[0].append(place) if fitting else groups.append([place])
    return groups


class UpTo:
    """As many neighbours as fit, as an object with a setting."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, lengths: list[int]) -> list[range]:
        groups, start = [], 0
        for stop in range(1, len(lengths) + 1):
            if stop == len(lengths) or sum(lengths[start : stop + 1]) > self.most:
                groups.append(range(start, stop))
                start = stop
        return groups

    def settings(self) -> dict[str, Any]:
        return {"most": self.most}


def numbers(stage: custom.Stage) -> list[list[int]]:
    return [[number for number, _ in pack] for pack in stage]


def test_the_packs_are_the_groups_of_held_items_in_the_functions_order() -> None:
    asked = []

    def reversed_pairs(lengths: list[int]) -> list[list[int]]:
        asked.append(lengths)
        return [[i + 1, i] if i + 1 < len(lengths) else [i] for i in range(0, len(lengths), 2)][::-1]

    #   held until they fill two packs of 10: 5 + 5 + 4 + 6, and at the end what is left
    stage = packer([5, 5, 4, 6, 3, 2, 1], policy=reversed_pairs, open_packs=2)
    assert numbers(stage) == [[3, 2], [1, 0], [6], [5, 4]]
    assert asked == [[5, 5, 4, 6], [5, 5, 4, 6], [3, 2, 1]]  # the first time twice, to find one that draws


@few(30)
@given(LENGTHS, st.integers(1, 4), st.sets(st.integers(0, 30), max_size=6), st.sampled_from([longest_first, UpTo(10)]))
def test_restored_after_any_packs_the_rest_is_the_same(
    lengths: list[int], open_packs: int, cuts: set[int], policy: Any
) -> None:
    expected = list(packer(lengths, policy=policy, open_packs=open_packs))
    stage, packs = packer(lengths, policy=policy, open_packs=open_packs), []
    for step in range(len(expected)):
        if step in cuts:
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state()))
            stage = packer(lengths, policy=policy, open_packs=open_packs)
            stage.restore_state(state)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(stage.save_state())) == state
            assert stage.source.fetched == []  # type: ignore[attr-defined]
        packs.append(next(stage))
    assert packs == expected
    given_items = sorted(item for pack in packs for item in pack)
    assert given_items == [(number, length) for number, length in enumerate(lengths) if length <= 10]


def of_toys(shards: str, lane: sp.Lane) -> custom.Stage:
    items = sp.Encode(sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=6), ToyEncoder())
    packs = sp.OnlinePacker(items, max_length=20, policy=UpTo(20), open_packs=3)
    return sp.Batcher(packs, size=2)


def test_packs_by_a_function_resume_exactly(make_shards: Any) -> None:
    shards = str(make_shards([40, 40]))
    assert_exact_resume(partial(of_toys, shards), lanes=2, steps=7, world_sizes=(1, 2), chains=1, after=2)


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ([[0, 1], [2], []], "group 2 is empty"),
        ([[0, 1], [3]], "group 1 has the index 3 of 3 lengths"),
        ([[0, -1], [2]], "group 0 has the index -1"),
        ([[0, 1], [1, 2]], "group 1 has the index 1, which is in a group already"),
        ([[0, 1]], "the index 2 is in no group; each of the 3 belongs to one"),
        ([[0, 1, 2]], r"group 0 is 12 long, but max_length=10: lengths of \[0, 1, 2\]"),
    ],
)
def test_groups_that_are_no_packs_are_refused(groups: Sequence[Sequence[int]], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        check_groups(groups, [5, 4, 3], 10)


class Turning(UpTo):
    """Gives other groups each time."""

    def __init__(self) -> None:
        self.groups = cycle([[[0, 1]], [[1, 0]]])

    def __call__(self, lengths: list[int]) -> Any:
        return next(self.groups)


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (
            lambda lengths: [[0, 0]],
            "<lambda>\\), for 2 items: ValueError: group 0 has the index 0, which is in a group",
        ),
        (lambda lengths: None, "TypeError"),
        (lambda lengths: [[0.5], [1]], "TypeError"),
        (Turning(), "called again it returned other groups"),
    ],
)
def test_a_wrong_answer_is_an_error_each_time_and_nothing_is_lost(policy: Any, what: str) -> None:
    stage = packer([5, 5], policy=policy, open_packs=1)
    for _ in range(2):
        with pytest.raises(sp.EncodeError, match=what):
            next(stage)
    state = stage.save_state()
    assert state["held"] == [((0, 0, 0), 5), ((1, 0, 0), 5)]
    right = packer([5, 5], policy=longest_first, open_packs=1)
    right.restore_state(state)
    assert numbers(right) == [[0, 1]]


def test_the_fingerprint_has_the_functions_name_and_settings() -> None:
    assert packer([1], policy=longest_first).settings()["policy"] == "longest_first"
    found = packer([1], policy=UpTo(7)).settings()
    assert (found["policy"], found["policy.most"]) == ("UpTo", 7)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"policy": longest_first, "max_images": 3}, "knows lengths alone"),
        ({"policy": partial(longest_first)}, "has no name and no settings"),
        ({"policy": UpTo}, "must be a function"),
        ({"policy": "worst_fit"}, "policy must be one of"),
    ],
)
def test_wrong_settings_are_refused(how: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        packer([1], **how)
