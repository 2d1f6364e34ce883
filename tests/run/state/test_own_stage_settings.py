"""Which settings may differ on restore is said by the stage that has them, not by what its class is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.shard_list import ShardEntry
from tests.support.streams import next_hashes, through_a_file

RUN: dict[str, Any] = {"seed": 3, "lanes": 4}


@pytest.fixture
def shards(make_shards: Any) -> str:
    return str(make_shards([40, 7, 60]))


class LogReader(custom.PassThrough, custom.SampleStage):
    """A filter, in spite of its name, with the settings that it is given."""

    def __init__(self, source: custom.SampleStage, **given: Any) -> None:
        super().__init__(source)
        self.given = given

    def __next__(self) -> sp.Sample:
        return next(self.source)

    def settings(self) -> dict[str, Any]:
        return self.given


def filtered(folder: str, lane: sp.Lane, left_out: Path | None = None, **given: Any) -> custom.Stage:
    return sp.Batcher(LogReader(sp.TarShardReader(folder, lane, exclude=left_out), **given), size=2)


def state_of(pipeline: Callable[[sp.Lane], custom.Stage]) -> dict[str, Any]:
    loader = sp.SavableLoader(pipeline, **RUN)
    next_hashes(loader, 2)
    return through_a_file(loader.state_dict())


def refusal(pipeline: Callable[[sp.Lane], custom.Stage], state: dict[str, Any], allow: Any = ()) -> str:
    with pytest.raises(sp.CheckpointMismatchError) as caught:
        sp.SavableLoader(pipeline, **RUN).load_state_dict(state, allow=allow)
    return str(caught.value)


@pytest.mark.parametrize("setting", ["order", "parts", "shards", "exclude", "level"])
def test_filter_named_like_a_reader_may_differ_in_any_setting(shards: str, setting: str) -> None:
    state = state_of(partial(filtered, shards, **{setting: 1}))
    changed = partial(filtered, shards, **{setting: 2})
    field = f"LogReader.{setting}"
    told = refusal(changed, state)
    assert f"  {field}: saved 1, here 2\n" in told and f"allow=['{field}']" in told
    loader = sp.SavableLoader(changed, **RUN)
    loader.load_state_dict(state, allow=[field])
    assert len(next_hashes(loader, 1)) == 1


def test_exclude_setting_of_a_filter_is_not_the_readers(shards: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("s000003\n")
    state = state_of(partial(filtered, shards, exclude="a"))
    told = refusal(partial(filtered, shards, left_out=tmp_path / "out", exclude="b"), state, allow="exclude")
    assert "\n  LogReader.exclude: saved 'a', here 'b'" in told and "\n  exclude:" not in told


@pytest.mark.parametrize("cause", ["shuffle", "epochs", "policy"])
def test_order_setting_of_a_users_stage_is_compared_alone(shards: str, cause: str) -> None:
    state = state_of(partial(filtered, shards, **{cause: 1, "order": 1}))
    changed = partial(filtered, shards, **{cause: 2, "order": 2})
    assert "  LogReader.order: saved 1, here 2\n" in refusal(changed, state, allow=f"LogReader.{cause}")
    sp.SavableLoader(changed, **RUN).load_state_dict(state, allow=[f"LogReader.{cause}", "LogReader.order"])


class Numbers(custom.RecordStore):
    """A store of the numbers below `count`."""

    address = "numbers"

    def __init__(self, count: int) -> None:
        self.entries = [ShardEntry("all", size=0, samples=count, digest=count)]

    def key(self, shard: int, row: int) -> str:
        return str(row)

    def extensions(self, shard: int, row: int) -> list[str]:
        return ["json"]

    def read(self, shard: int, row: int, extension: str) -> bytes:
        return str(row).encode()


class Rows(custom.RecordReader):
    """A reader, in spite of its name."""


def rows(lane: sp.Lane, count: int = 100, **how: Any) -> custom.Stage:
    return sp.Batcher(Rows(lane.shared(("numbers", count), lambda: Numbers(count)), lane, **how), size=2)


def test_a_reader_of_any_name_never_differs_in_its_shards() -> None:
    state = state_of(rows)
    other = partial(rows, count=101)
    assert "Rows.shards: rewritten: all (shards were added, removed or rewritten since)" in refusal(other, state)
    with pytest.raises(ValueError, match=r"allow='Rows\.shards' is not possible"):
        sp.SavableLoader(other, **RUN).load_state_dict(state, allow="Rows.shards")


def test_exclusions_of_any_reader_are_allowed_by_one_name(tmp_path: Path) -> None:
    (tmp_path / "exclude").write_text("3\n")
    excluding = partial(rows, exclude=tmp_path / "exclude")
    state = state_of(rows)
    assert "\n  exclude: saved None" in refusal(excluding, state)
    sp.SavableLoader(excluding, **RUN).load_state_dict(state, allow={"exclude"})
