"""Small datasets that the tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.forked_children import ForkedChildren, forked_children
from tests.support.shards import write_numbered_shards, write_tar

__all__ = ["MakeShards", "write_numbered_shards", "write_tar"]

# Whoever starts the tests in the background may have Ctrl-C ignored; then so have the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported, here and in what tests start: a test has one core, whatever the machine has.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine may be busy with other things: no example is too slow. What guards a change draws the same examples each
# time; a long search draws others.
settings.register_profile("untimed", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=2000)  # `--hypothesis-profile long`: twenty times as many
settings.load_profile("untimed")

MakeShards = Callable[..., Path]


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage goes through it again, here or in a forked process."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end of the process all of it is garbage."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process runs tests that follow each other, so that what a file's tests share is made once, not by each."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: a sixth of their time tests wait for clocks, sockets and processes."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is written to the user's cache is gone after the tests; matplotlib's fonts stay where they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def children(own_cache: None) -> Iterator[ForkedChildren]:
    """Child processes of the package start without an import."""
    with forked_children() as server:
        yield server


@pytest.fixture
def own_interpreters(children: ForkedChildren) -> Iterator[None]:
    """Child processes of the package start as they do elsewhere."""
    with children.off():
        yield


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """Write shards of numbered samples, as `write_numbered_shards` does, and return their folder."""

    def make(sizes: list[int], folder: str = "shards", **extra: Any) -> Path:
        write_numbered_shards(tmp_path / folder, sizes, **extra)
        return tmp_path / folder

    return make
