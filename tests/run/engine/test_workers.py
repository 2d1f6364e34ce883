"""Workers that fail: killed, hanging, leaving, or with errors of every kind; the loader stays exact in each case."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.engine import pool, process_host
from savable_pipeline.run.engine import worker_main as worker
from tests.support.processes import alive, kill, wait_for_deaths, wait_until_gone, workers
from tests.support.streams import next_hashes
from tests.support.toy_faults import (
    CuredEncoder,
    FaultyEncoder,
    LambdaEncoder,
    LargeEncoder,
    NumberEncoder,
    UnpicklableError,
    fails_in_other_processes,
    faulty_stage_pipeline,
    number_pipeline,
    packed_numbers,
)
from tests.support.toy_pipelines import toy_pipeline


def loader(pipeline: Any, num_workers: int = 2, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": 12, "num_workers": num_workers, **settings})


@pytest.fixture
def faulty(make_shards: Any, tmp_path: Path) -> Callable[..., Any]:
    """Build a pipeline of numbers in file order whose encoder fails at a sample until `cured` is there."""
    shards = str(make_shards([60, 60]))

    def make(how: str, at: int = 9, **settings: Any) -> Any:
        encoder = FaultyEncoder(how, at, tmp_path / "cured")
        return partial(number_pipeline, shards, encoder=encoder, **settings)

    return make


# Killed.


@pytest.mark.parametrize(
    ("killed", "after", "epochs"), [(slice(0, 1), 1, None), (slice(1, 2), 4, 1), (slice(0, 2), 4, None)], ids=str
)
def test_killed_worker_is_replaced_and_the_batches_are_the_same(
    make_shards: Any, killed: slice, after: int, epochs: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])), epochs=epochs)
    expected = next_hashes(loader(pipeline, 0), 24)
    with loader(pipeline) as own:
        found = next_hashes(own, after)
        time.sleep(0.1)  # until what was asked ahead is made, so that the next ask meets a dead worker
        pids = workers(own)[killed]
        for pid in pids:
            kill(pid)
        wait_until_gone(pids)
        found += next_hashes(own, len(expected) - after)
        assert found == expected
        wait_for_deaths(own, len(pids))
        assert len(workers(own)) == 2
    assert "ended by signal SIGKILL" in caplog.text and "replaced" in caplog.text


def test_continuously_killed_workers_change_nothing(make_shards: Any) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40, 7, 60])))
    expected = next_hashes(loader(pipeline, 0), 60)
    draw = random.Random(3)
    kills = 0
    with loader(pipeline, 3) as own:
        found = []
        while len(found) < len(expected):
            if kills < 30 and (there := alive(workers(own))):
                kill(draw.choice(there))
                kills += 1
                time.sleep(draw.choice([0, 0, 0.002, 0.02]))
            found += next_hashes(own, min(2, len(expected) - len(found)))
    assert found == expected and kills > 20


def test_a_worker_killed_in_the_middle_of_sending_a_batch_is_replaced_and_nothing_is_lost(make_shards: Any) -> None:
    pipeline = partial(number_pipeline, str(make_shards([60])), encoder=LargeEncoder())
    expected = next_hashes(loader(pipeline, 0), 10)
    with loader(pipeline) as own:
        found = next_hashes(own, 1)
        for pause in (0.3, 0.0, 0.001, 0.003):
            time.sleep(pause)
            for pid in workers(own)[:1]:  # there may be none yet in place of the last
                kill(pid)
            found += next_hashes(own, 1)
        found += next_hashes(own, 5)
        assert found == expected


def test_batches_delivered_by_a_dead_worker_are_not_repeated(make_shards: Any, tmp_path: Path) -> None:
    encoder = CuredEncoder("kill", 9, 1, tmp_path / "log")
    pipeline = partial(number_pipeline, str(make_shards([60])), encoder=encoder)
    with loader(pipeline, 1, lanes=1, workers=sp.Workers(prefetch=4)) as own:  # asked for more of the lane by then
        found = [next(own) for _ in range(8)]
        assert own.stats()["restarts"] == 1
    assert found == [[2 * i, 2 * i + 1] for i in range(8)]


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """More than 1,024 descriptors, the most that `select` can wait for, are open before anything of a test is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2000)), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_workers_are_replaced_with_any_open_descriptors(faulty: Any, many_descriptors: None) -> None:
    with loader(faulty("none"), 0) as alone:
        expected = next_hashes(alone, 12)
    with loader(faulty("none"), 2) as own:
        given = next_hashes(own, 4)
        for pid in workers(own):
            kill(pid)
        assert given + next_hashes(own, 8) == expected
        assert own.stats()["restarts"] == 2


@pytest.mark.parametrize("how", ["segfault", "hang"])
def test_sample_that_kills_three_workers_is_built_by_the_fourth(
    make_shards: Any, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = CuredEncoder(how, 9, 3, tmp_path / "failed")
    pipeline = partial(number_pipeline, str(make_shards([60, 60])), encoder=encoder)
    with loader(pipeline, workers=sp.Workers(timeout=0.5 if how == "hang" else 60)) as own:
        assert [next(own) for _ in range(10)] == [[2 * i, 2 * i + 1] for i in range(10)]
        assert own.stats()["restarts"] == 3
    told = [record.message for record in caplog.records]
    assert len(told) == 3 and (tmp_path / "failed").read_text() == "xxx"
    for number, message in enumerate(told, start=1):
        assert "while it built a batch of lane 4, in Encode, shard " in message and "key 's000009'" in message
        assert f"replaced, restart {number} of 100" in message
        assert re.search(r"innermost call first:\n.*line \d+ in fail\n.*line \d+ in encode\n", message)


def test_sample_that_kills_every_worker_stops_the_run_at_its_batch(faulty: Any, tmp_path: Path) -> None:
    """Not before, though the workers are ahead; the state is that before the batch."""
    with loader(faulty("kill", at=13), workers=sp.Workers(prefetch=8)) as own:
        found = [next(own) for _ in range(6)]
        with pytest.raises(sp.WorkerError, match=r"SIGKILL, .*lane 6, in Encode, .*key 's000013', .*: death 4 there"):
            next(own)
        assert own.state_dict()["slot"] == 6
        (tmp_path / "cured").touch()
        found += [next(own) for _ in range(4)]
    assert found == [[2 * i, 2 * i + 1] for i in range(10)]


@pytest.mark.parametrize("how", ["exit", "os exit"])
def test_encoder_that_exits_its_process_is_reported_with_the_exit_code(faulty: Any, how: str, tmp_path: Path) -> None:
    with loader(faulty(how), 1) as own:
        found = [next(own) for _ in range(4)]
        for _ in range(2):
            told = (
                f"ended with exit code {3 if how == 'exit' else 5}, while it built a batch of lane 4, .* death 4 there"
            )
            with pytest.raises(sp.WorkerError, match=told):
                next(own)
        (tmp_path / "cured").touch()
        found += [next(own) for _ in range(6)]
    assert found == [[2 * i, 2 * i + 1] for i in range(10)]


def test_too_many_worker_deaths_end_the_run(make_shards: Any) -> None:
    pipeline = partial(number_pipeline, str(make_shards([60])))
    with (
        loader(pipeline, 1, workers=sp.Workers(max_restarts=3)) as own,
        pytest.raises(sp.WorkerError, match="more than"),
    ):
        for _ in range(100):
            next(own)
            for pid in workers(own):
                kill(pid)


@pytest.mark.parametrize("in_a_row", [3, 4])
def test_four_consecutive_workers_that_die_at_start_end_the_run(
    make_shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_row: int
) -> None:
    births = tmp_path / "births"
    known: set[int] = set()

    def born() -> None:
        if os.getpid() in known:
            return
        known.add(os.getpid())
        with births.open("a") as file:
            file.write("x")
        if births.stat().st_size % (in_a_row + 1):
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(worker, "become_replaced", born)  # what only a worker does, first; the server is forked here
    pipeline = partial(number_pipeline, str(make_shards([60])))
    with loader(pipeline, 1) as own:
        if in_a_row == 4:
            with pytest.raises(sp.WorkerError, match="before it had started, as did the 3 workers before it"):
                next(own)
            return
        found = [next(own) for _ in range(5)]
        for _ in range(2):
            kill(workers(own)[0])
            found += [next(own) for _ in range(5)]
        assert found == [[2 * i, 2 * i + 1] for i in range(15)]
        assert own.stats()["restarts"] == 3 + 2 * (1 + 3)


# Hanging.


def test_hung_worker_is_reported_with_its_lane_after_the_timeout(faulty: Any, tmp_path: Path) -> None:
    with loader(faulty("hang", epochs=1), workers=sp.Workers(timeout=0.5)) as own:
        found = [next(own) for _ in range(4)]
        pids = workers(own)
        start = time.monotonic()
        told = r"gave no batch in 0\.5 s and was killed, while it built a batch of lane 4, in Encode, .*'s000009', byte"
        with pytest.raises(sp.WorkerError, match=told) as caught:
            next(own)
        assert 1.9 < time.monotonic() - start < 30  # not the minute that the encoder hangs
        assert re.search(r"innermost call first:\n.*line \d+ in fail\n.*line \d+ in encode\n", str(caught.value))
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        (tmp_path / "cured").touch()
        found += [next(own) for _ in range(6)]
    assert found == [[2 * i, 2 * i + 1] for i in range(10)]


def test_slow_batch_within_the_timeout_is_no_error(faulty: Any) -> None:
    with loader(faulty("none"), 1, workers=sp.Workers(timeout=2)) as own:
        next(own)
        (pid,) = workers(own)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        while time.monotonic() - started < 0.5:
            time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        assert [next(own) for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]


def test_stopped_workers_are_killed_when_the_loader_closes(faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_host, "END_WAIT_S", 60.0)
    own = loader(faulty("none"), 4)
    next(own)
    pids = workers(own)
    assert len(pids) == 4
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    while any(" T " not in Path(f"/proc/{pid}/stat").read_text() for pid in pids):
        time.sleep(0.01)
    start = time.monotonic()
    own.close()
    assert time.monotonic() - start < 30  # at once, not after the minute that a worker may take to end by itself
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_timeout_excludes_the_imports_of_a_worker(make_shards: Any) -> None:
    """A spawned worker imports torch, which takes seconds."""
    pipeline = partial(number_pipeline, str(make_shards([20])))
    with loader(pipeline, 1, workers=sp.Workers(start_method="spawn", timeout=0.5)) as own:
        assert next(own) == [0, 1]


def test_a_worker_that_does_not_start_is_an_error(make_shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_START_S", 0.001)
    pipeline = partial(number_pipeline, str(make_shards([20])))
    with (
        loader(pipeline, 1, workers=sp.Workers(start_method="spawn")) as own,
        pytest.raises(sp.WorkerError, match=r"a worker did not start within 0\.001 s"),
    ):
        next(own)


# Errors.


@pytest.mark.parametrize(
    ("how", "num_workers", "at", "epochs"),
    [("value", 0, 0, None), ("value", 2, 9, None), ("unpicklable", 2, 0, 1), ("unpicklable", 0, 9, 1)],
)
def test_encoder_error_names_its_sample_repeats_and_loses_nothing(
    faulty: Any, tmp_path: Path, how: str, num_workers: int, at: int, epochs: int | None
) -> None:
    with loader(faulty(how, at, epochs=epochs), num_workers) as own:
        found = []
        told = []
        for _ in range(3):
            with pytest.raises(sp.EncodeError) as caught:
                while True:
                    found.append(next(own))
            told.append(str(caught.value))
            if num_workers:
                cause = caught.value.__cause__
                assert type(cause) is (ValueError if how == "value" else sp.WorkerError)
                text = "".join(traceback.format_exception(cause))
                assert "in a worker:\nTraceback" in text and "in fail" in text and "Error: " in text
        assert len(set(told)) == 1
        offset = at * 1024
        for part in ("FaultyEncoder.encode failed on", "stage Encode", "0000.tar", f"'s{at:06d}'", f"offset {offset},"):
            assert part in told[0]
        assert ("ValueError: no such colour" if how == "value" else "UnpicklableError: broken 7") in told[0]
        state = own.state_dict()
        (tmp_path / "cured").touch()
        found += [next(own) for _ in range(10 - len(found))]
        assert found == [[2 * i, 2 * i + 1] for i in range(10)]
    fresh = loader(faulty(how, at, epochs=epochs), 1)
    fresh.load_state_dict(state)
    assert next(fresh) == found[state["slot"]]
    fresh.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_users_error_class_can_be_caught_as_savable_error(make_shards: Any, num_workers: int) -> None:
    pipeline = partial(faulty_stage_pipeline, str(make_shards([20])))
    with loader(pipeline, num_workers) as own:
        for _ in range(2):
            with pytest.raises(sp.ShardError, match="shard 7 is upside down"):
                next(own)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_encoder_error_shows_only_the_users_frames(faulty: Any, num_workers: int) -> None:
    with loader(faulty("value", 9), num_workers) as own:
        with pytest.raises(sp.EncodeError) as caught:
            next_hashes(own, 20)
        shown = "".join(traceback.format_exception(caught.value))
        assert len(shown.splitlines()) < 40, shown  # of which up to 16 are of this test
        assert 'toy_faults.py", line' in shown
        assert {name for name in OURS if name in shown} == {"savable_pipeline/run/loader/savable_loader.py"}


def refuses_to_decide(error: sp.SavableError) -> bool:
    raise LookupError(f"no policy for {type(error).__name__} of {type(error.__cause__).__name__}")


def stops_to_decide(error: sp.SavableError) -> bool:
    raise UnpicklableError("no policy", second=7)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_error_function_works_the_same_with_and_without_workers(faulty: Any, num_workers: int) -> None:
    with loader(faulty("value", 9, on_error=refuses_to_decide), num_workers) as own:
        for _ in range(2):
            with pytest.raises(LookupError, match="no policy for EncodeError of ValueError"):
                next_hashes(own, 20)


def test_unpicklable_error_of_an_on_error_function_is_reported_with_its_traceback(faulty: Any) -> None:
    with (
        loader(faulty("value", 9, on_error=stops_to_decide), 2) as own,
        pytest.raises(sp.WorkerError, match=r"in a worker(.|\n)*in stops_to_decide"),
    ):
        next_hashes(own, 20)


def test_pipeline_that_fails_to_build_in_a_worker_is_reported_with_its_traceback(make_shards: Any) -> None:
    pipeline = partial(fails_in_other_processes, os.getpid(), str(make_shards([20])))
    with loader(pipeline) as own:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no licence") as caught:
                next(own)
            assert "in fails_in_other_processes" in caught.value.__notes__[0]


def test_unpicklable_batch_is_reported(make_shards: Any) -> None:
    pipeline = partial(number_pipeline, str(make_shards([20])), encoder=LambdaEncoder())
    with loader(pipeline) as own:
        for _ in range(2):
            with pytest.raises(sp.WorkerError, match=r"in a worker(.|\n)*LambdaEncoder\.batch\.<locals>\.<lambda>"):
                next(own)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pipeline_that_cannot_be_sent_to_workers_is_an_error_at_once(make_shards: Any, method: str) -> None:
    shards = str(make_shards([20]))
    holds_a_lambda: Any = partial(toy_pipeline, shards, size=lambda: 1)  # type: ignore[arg-type]
    for pipeline in (lambda lane: number_pipeline(shards, lane), holds_a_lambda):
        with pytest.raises(ValueError, match=rf"sent to workers started by {method}: (.|\n)*functools\.partial"):
            loader(pipeline, workers=sp.Workers(start_method=method))
        loader(pipeline, 0, workers=sp.Workers(start_method=method))
        loader(pipeline, 2, workers=sp.Workers(start_method="fork"))


# Interrupted.


OURS = tuple(
    f"savable_pipeline/run/{name}.py"
    for name in (
        "loader/savable_loader",
        "loader/run",
        "loader/misuse",
        "loader/states",
        "loader/local_lanes",
        "loader/epoch_end",
        "loader/prefetcher",
        "loader/position",
        "engine/in_process",
        "engine/lane_runner",
        "engine/pool",
        "engine/process_host",
        "engine/shared_batches",
        "transport/channel",
        "transport/status_page",
    )
)


def interrupted_at(moment: int, call: Callable[[], Any]) -> tuple[bool, Any]:
    """Return whether Ctrl-C came at the `moment`-th place where Python could hear it in the loader, and what `call`
    gave.
    """
    passed, owner = 0, os.getpid()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal passed
        if frame.f_code.co_filename.endswith(OURS) and os.getpid() == owner:
            passed += 1
            if passed == moment:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        return False, call()
    except KeyboardInterrupt:
        return True, None
    finally:
        sys.setprofile(None)


def one(loader: sp.SavableLoader) -> str:
    """The next batch; that of the next epoch after the last one."""
    return next_hashes(loader, 1)[0]


@pytest.mark.parametrize(
    "num_workers,stride,epochs,start",
    [
        pytest.param(0, 1, None, 0, marks=pytest.mark.landing),
        (0, 3, None, 5),
        pytest.param(0, 1, None, 5, marks=pytest.mark.long),
        pytest.param(0, 1, 1, 0, marks=pytest.mark.long),
        pytest.param(0, 1, 1, 2, marks=pytest.mark.long),
        (0, 3, 1, -2),
        pytest.param(0, 1, 1, -2, marks=pytest.mark.long),
        pytest.param(0, 1, 1, -1, marks=pytest.mark.long),
        pytest.param(1, 9, 1, -1, marks=pytest.mark.landing),
        pytest.param(1, 9, 1, 2, marks=pytest.mark.long),
        pytest.param(1, 9, None, 2, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that is closed
def test_loader_interrupted_at_any_moment_is_before_or_after_a_batch(
    make_shards: Any, num_workers: int, stride: int, epochs: int | None, start: int
) -> None:
    """As by Ctrl-C in a notebook, after which one looks at the loader, saves it, and goes on.

    A start of -1 is before the last batch of an epoch, -2 before the one before it.
    """
    pipeline = partial(packed_numbers, str(make_shards([30])), epochs=epochs)
    alone = loader(pipeline, 0, lanes=3)
    first = next_hashes(alone, 9 if epochs is None else 1000)
    stream = first + [one(alone) for _ in range(3)]
    start %= len(first)
    own = loader(pipeline, 0, lanes=3)
    for _ in range(start):
        one(own)
    state = own.state_dict()

    with loader(pipeline, num_workers, lanes=3) as own:
        interrupted, moment = True, 1
        while interrupted:
            own.load_state_dict(state)
            interrupted, _ = interrupted_at(moment, partial(next, own, None))
            after = own.state_dict()
            now = after["slot"] + after["epoch"] * len(first)
            assert now in ((start, start + 1) if interrupted else (start + 1,))
            fresh = loader(pipeline, 0, lanes=3)
            fresh.load_state_dict(after)
            assert [one(fresh), one(fresh)] == [one(own), one(own)] == stream[now : now + 2]
            moment += stride
    assert moment > 10


class Tokenizing(NumberEncoder):
    """Holds what cannot be pickled, as some tokenizers are."""

    def __init__(self) -> None:
        self.tokenizer = threading.Lock()


def redefined(sample: sp.Sample) -> int:
    return 1


first_defined = redefined


def redefined(sample: sp.Sample) -> int:  # type: ignore[no-redef]
    return 2


def test_unpicklable_object_is_an_error_with_a_fix_for_its_cause(make_shards: Any) -> None:
    read = sp.read(make_shards([4]))
    causes = {
        r"cannot pickle '_thread.lock' object\. Create .* tokenizer, in the worker.*\.encode\(make\)": Tokenizing(),
        r"not the same object as .*redefined\. It was redefined, as by a notebook cell": first_defined,
    }
    for told, cause in causes.items():
        pipeline = read.encode(cause) if isinstance(cause, Tokenizing) else read.map(cause)
        with pytest.raises(ValueError, match=told):
            sp.SavableLoader(pipeline.batch(2), seed=3, lanes=2, workers=sp.Workers(1, start_method="spawn"))
