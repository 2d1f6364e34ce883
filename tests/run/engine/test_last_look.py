"""A shard that is overwritten in the last second of a run is told of: before its end, in a pause, or at the close."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import Lane
from savable_pipeline.data.stores import shard_files
from savable_pipeline.run.engine import worker_main

OVERWRITTEN = r"0000\.tar: it was overwritten while this run read it.*\nThe slots \d.* may have bytes of both"


class Ids(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> int:
        return int(sample.json()["id"])


def pipeline(root: Path, epochs: int | None, lane: Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(root, lane, shuffle=False, epochs=epochs), Ids()), size=2)


@pytest.fixture
def root(make_shards: Any) -> Path:
    folder: Path = make_shards([84])
    return folder


@pytest.fixture(autouse=True)
def never_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is over before the shards are looked at a second time, however slow the machine: workers are forked."""
    monkeypatch.setattr(shard_files, "_CHECK_S", 10_000.0)


def loader(root: Path, num_workers: int, epochs: int | None = None) -> sp.SavableLoader:
    return sp.SavableLoader(
        partial(pipeline, root, epochs),
        seed=0,
        lanes=2,
        num_workers=num_workers,
        workers=sp.Workers(prefetch=1, start_method="fork"),
    )


def overwrite(root: Path) -> None:
    """Other bytes of the same size in place, as `cp` writes them."""
    shard = root / "0000.tar"
    raw = shard.read_bytes().replace(b'{"id": ', b'{"id":-')
    time.sleep(0.02)  # a tick of the clock that stamps files
    with shard.open("r+b") as file:
        file.write(raw)


def begun(root: Path, num_workers: int, batches: int = 10, epochs: int | None = None) -> sp.SavableLoader:
    """A loader whose shard is overwritten after some batches; the next three may be of it."""
    own = loader(root, num_workers, epochs)
    for _ in range(batches):
        next(own)
    overwrite(root)
    for _ in range(3):
        next(own)
    return own


def left_with(error: BaseException, own: sp.SavableLoader) -> None:
    with own:
        raise error


each = pytest.mark.parametrize("workers", [0, 1])


@each
def test_finite_run_on_an_overwritten_shard_ends_with_an_error(root: Path, workers: int) -> None:
    own = begun(root, workers, epochs=1)
    with pytest.raises(sp.ShardError, match=OVERWRITTEN) as caught:
        for _ in own:
            pass
    assert caught.value.reason == "changed shard"
    with pytest.raises(sp.ShardError, match=OVERWRITTEN):
        own.state_dict()
    own.close()  # it was told


def left_over(root: Path, lane: Lane) -> custom.Stage:
    """Lane 1, which gives the last batch, has more: the sources of a blend begin at different lanes."""
    samples = sp.Blend({"b": sp.TarShardReader(root, lane, shuffle=False, epochs=1)}, weights={"b": 1})
    return sp.Batcher(sp.Encode(samples, Ids()), size=2)


@each
def test_epoch_on_an_overwritten_shard_ends_with_an_error_although_its_lane_has_more(
    root: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_main, "_IDLE_S", 10_000.0)
    own = sp.SavableLoader(
        partial(left_over, root), seed=0, lanes=2, num_workers=workers, workers=sp.Workers(start_method="fork")
    )
    batches = [next(own) for _ in range(40)]
    ended = own._run.position.previous
    assert len(batches) == 40 and ended is not None and [ended.lanes[lane].more for lane in (0, 1)] == [False, True]
    overwrite(root)
    for _ in range(2):
        with pytest.raises(sp.ShardError, match=OVERWRITTEN):
            next(own)
    own.close()


@each
def test_epoch_on_unchanged_shards_ends_and_the_next_starts(root: Path, workers: int) -> None:
    with sp.SavableLoader(partial(left_over, root), seed=0, lanes=2, num_workers=workers) as own:
        assert [sum(1 for _ in own) for _ in range(3)] == [40] * 3 and own.stats()["restarts"] == 0


@each
def test_interrupted_run_on_an_overwritten_shard_raises_at_close(root: Path, workers: int) -> None:
    own = begun(root, workers)
    with pytest.raises(sp.ShardError, match=OVERWRITTEN) as caught:
        own.close()
    assert caught.value.reason == "changed shard"
    own.close()
    with pytest.raises(sp.ShardError, match=OVERWRITTEN):
        own.state_dict()


@each
def test_run_ended_by_another_error_logs_the_overwritten_shard(root: Path, workers: int, caplog: Any) -> None:
    own = begun(root, workers)
    with pytest.raises(ZeroDivisionError):
        left_with(ZeroDivisionError(), own)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "it was overwritten while this run read it" in told


@each
def test_released_loader_logs_the_overwritten_shard(root: Path, workers: int, caplog: Any) -> None:
    own = begun(root, workers)
    del own
    gc.collect()
    assert "it was overwritten while this run read it" in caplog.text


def test_state_without_workers_is_saved_after_a_check_of_the_shards(root: Path) -> None:
    own = begun(root, 0)
    with pytest.raises(sp.ShardError, match=OVERWRITTEN):
        own.state_dict()
    with pytest.raises(sp.ShardError, match=OVERWRITTEN):
        next(own)


def eventually_raises(act: Callable[[], object]) -> pytest.ExceptionInfo[sp.ShardError]:
    deadline = time.monotonic() + 60
    with pytest.raises(sp.ShardError, match=OVERWRITTEN) as caught:
        while time.monotonic() < deadline:
            act()
            time.sleep(0.02)
    return caught


def test_idle_worker_reports_an_overwritten_shard_to_the_next_state_and_batch(root: Path) -> None:
    own = begun(root, 1)
    eventually_raises(own.state_dict)
    with pytest.raises(sp.ShardError, match=OVERWRITTEN):
        next(own)
    own.close()


@each
def test_earlier_state_resumes_once_the_old_shard_is_restored(root: Path, workers: int) -> None:
    raw = (root / "0000.tar").read_bytes()
    own = loader(root, workers)
    before = [next(own).tolist() for _ in range(3)]
    state = own.state_dict()
    overwrite(root)
    next(own)
    next(own)
    with pytest.raises(sp.ShardError, match=OVERWRITTEN):
        own.close()
    (root / "0000.tar").write_bytes(raw)
    own.load_state_dict(state)
    assert own.state_dict() == state
    with loader(root, 0) as whole:
        assert before + [next(own).tolist() for _ in range(4)] == [next(whole).tolist() for _ in range(7)]
    own.close()


@each
def test_unchanged_shards_are_not_reported(root: Path, workers: int, caplog: Any) -> None:
    with loader(root, workers, epochs=1) as own:
        assert sum(len(batch) for batch in own) == 80
        own.state_dict()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
