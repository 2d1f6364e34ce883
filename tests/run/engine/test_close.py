"""No process, descriptor or shared memory is left, on whatever path a loader or its trainer ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.run.engine import process_host
from tests.support.processes import alive, descendants, kill, wait_until_gone, workers
from tests.support.streams import next_hashes
from tests.support.toy_faults import FaultyEncoder, LargeEncoder, number_pipeline, packed_numbers
from tests.support.toy_pipelines import toy_pipeline


@pytest.fixture
def pipeline(make_shards: Any) -> Any:
    return partial(toy_pipeline, str(make_shards([40, 7, 60])))


def loader(pipeline: Any, num_workers: int = 2, **settings: Any) -> sp.SavableLoader:
    return sp.SavableLoader(pipeline, **{"seed": 3, "lanes": 12, "num_workers": num_workers, **settings})


def held() -> Counter[int | str]:
    """The processes and descriptors that this process has. What others left may end meanwhile: `<=` compares two."""
    descriptors = (str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return Counter([*descendants(os.getpid()), *(name for name in descriptors if "/proc/" not in name)])


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = held()
    yield
    if not held() <= before:
        gc.collect()  # of what pytest holds, such as the frames of an error
    assert held() <= before


pytestmark = pytest.mark.usefixtures("nothing_left")


# Paths on which a loader ends. Each leaves the loader itself alive, so that nothing is left to the garbage collector.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_close_and_with_block_leave_no_process_also_after_an_error(pipeline: Any, num_workers: int) -> None:
    before = held()
    own = loader(pipeline, num_workers)
    next_hashes(own, 5)
    begun = [pid for pid in descendants(os.getpid()) if pid not in before]
    assert len(begun) == (num_workers + 1 if num_workers else 0)  # and a server
    own.close()
    assert held() <= before and not alive(begun)  # a worker whose server has ended is no child any more
    with pytest.raises(ZeroDivisionError), loader(pipeline, num_workers) as own:
        for _batch in own:
            _ = 1 / 0
    assert held() <= before


def test_encoder_error_leaves_no_worker(make_shards: Any, tmp_path: Path) -> None:
    encoder = FaultyEncoder("value", 9, tmp_path / "cured")
    own = loader(partial(number_pipeline, str(make_shards([60])), encoder=encoder))
    with pytest.raises(sp.EncodeError):
        next_hashes(own, 100)
    assert not workers(own)
    own.close()


def test_break_del_and_an_unused_loader_leave_no_process(pipeline: Any) -> None:
    before = held()
    own = loader(pipeline)
    for _batch in own:
        break
    del own
    assert held() <= before
    own = loader(pipeline)
    own.state_dict()
    own.close()
    assert held() <= before


@pytest.mark.parametrize("how", ["made", "taken by no one"])
def test_closing_does_not_wait_for_batches_in_progress(make_shards: Any, tmp_path: Path, how: str) -> None:
    encoder = FaultyEncoder("hang", 9, tmp_path / "cured") if how == "made" else LargeEncoder()
    own = loader(partial(number_pipeline, str(make_shards([60])), encoder=encoder), workers=sp.Workers(prefetch=4))
    next(own)
    time.sleep(0.2)
    begun = workers(own)
    start = time.monotonic()
    own.close()
    assert time.monotonic() - start < 30  # not the minute that a batch takes
    assert begun and not alive(begun)


def test_a_worker_that_does_not_end_is_killed(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_host, "_CHECK_S", 0.2)
    own = loader(pipeline)
    next(own)
    begun = workers(own)
    os.kill(begun[0], signal.SIGSTOP)
    while Path(f"/proc/{begun[0]}/stat").read_text().rsplit(")")[-1].split()[0] != "T":  # it stops a little later
        time.sleep(0.001)
    own.close()
    left = alive(begun)
    for pid in left:
        kill(pid)
    assert begun and not left


def test_killed_process_leaves_no_file_or_shared_memory(pipeline: Any) -> None:
    """A file in /dev/shm outlives whom it belongs to."""
    before = {pid: in_shared_memory(pid) for pid in (*descendants(os.getpid()), os.getpid())}
    with loader(pipeline) as own:
        next_hashes(own, 5)
        for pid in (*descendants(os.getpid()), os.getpid()):
            assert in_shared_memory(pid) <= before.get(pid, before[os.getpid()])


def in_shared_memory(pid: int) -> set[str]:
    """The files in /dev/shm that a process has mapped: other libraries put some there, which forks inherit."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[5] for line in lines if "/dev/shm/" in line}


def test_many_starts_and_stops_leave_nothing(pipeline: Any) -> None:
    expected = next_hashes(loader(pipeline, 0), 6)
    own = loader(pipeline, 1)
    found = []
    for _ in range(6):
        found += next_hashes(own, 1)
        own.close()
    assert found == expected


def test_two_loaders_at_once_do_not_disturb_each_other(pipeline: Any) -> None:
    train, validation = next_hashes(loader(pipeline, 0), 12), next_hashes(loader(pipeline, 0, seed=4), 12)
    first, second = loader(pipeline), loader(pipeline, seed=4)
    found: list[str] = []
    for step in range(6):
        found += next_hashes(first, 1)
        assert next_hashes(second, 1) == [validation[step]]
    first.close()
    assert next_hashes(second, 3) == validation[6:9]
    found += next_hashes(first, 3)  # started again, after the other
    second.close()
    found += next_hashes(first, 3)
    first.close()
    assert found == train


def test_exiting_child_of_the_trainer_ends_no_worker(pipeline: Any) -> None:
    """Such as a process that the trainer forks to save a checkpoint, which inherits the loader."""
    own = loader(pipeline)
    expected = next_hashes(loader(pipeline, 0), 10)
    found = next_hashes(own, 4)
    for _ in range(2):
        child = os.fork()
        if not child:
            own.close()
            os._exit(0)
        os.waitpid(child, 0)
    assert found + next_hashes(own, 6) == expected
    own.close()


def test_forked_child_that_iterates_is_an_error_that_suggests_its_own_loader(pipeline: Any) -> None:
    own = loader(pipeline)
    next_hashes(own, 4)
    told, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            next(own)
        except sp.SavableError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"Create it in the process that uses it" in os.read(told, 1000)
    assert next_hashes(own, 6) == next_hashes(loader(pipeline, 0), 10)[4:]
    own.close()
    os.close(told)
    os.close(write)


# Paths on which a trainer ends.


def start(shards: Path, method: str, how: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A trainer in a session of its own, and its workers."""
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.toy_trainer", str(shards), method, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) >= 2
    return trainer, workers


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_when_their_trainer_is_killed(make_shards: Any, method: str) -> None:
    trainer, workers = start(make_shards([40, 7, 60]), method, "run")
    assert alive(workers) == workers
    trainer.kill()
    trainer.communicate()
    wait_until_gone(workers)


def test_ctrl_c_reaches_only_the_trainer_and_its_state_is_complete(make_shards: Any, tmp_path: Path) -> None:
    trainer, workers = start(make_shards([40, 7, 60]), "fork", "run")
    time.sleep(0.2)
    os.killpg(trainer.pid, signal.SIGINT)
    printed, errors = trainer.communicate(timeout=120)
    assert (printed, errors, trainer.returncode) == ("saved\n", "", 0)
    wait_until_gone(workers)

    saved = torch.load(tmp_path / "state.pt")
    fresh = loader(partial(packed_numbers, str(tmp_path / "shards")), 0)
    fresh.load_state_dict(saved["data"])
    assert next_hashes(fresh, 3) == saved["next"]
    assert saved["data"]["slot"] > 3


@pytest.mark.parametrize("how", ["leave", "raise"])
def test_a_trainer_that_ends_without_closing_leaves_no_worker(make_shards: Any, how: str) -> None:
    trainer, workers = start(make_shards([40, 7, 60]), "fork", how)
    _, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == (how == "raise")
    assert ("the trainer broke" in errors) == (how == "raise") and errors.count("Traceback") == (how == "raise")
    wait_until_gone(workers)
