"""A child process answers, prints where errors go, and ends with its parent whoever else holds the connection."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from savable_pipeline.core.child_process import ChildProcess
from tests.support.processes import wait_until_gone

pytestmark = pytest.mark.usefixtures("own_interpreters")


def test_dead_child_raises_eof_error_and_closing_kills_a_live_one() -> None:
    child = ChildProcess("os:_exit")  # which takes no connection: it dies of a TypeError
    with pytest.raises(EOFError):
        child.connection.recv()
    assert child.process.wait() == 1
    child.close()
    child = ChildProcess("tests.core.test_child_process:echo", "x", 1.5)
    child.connection.send("a message")
    assert child.connection.recv() == ("a message", "x", 1.5)
    child.close()
    assert child.process.returncode == -signal.SIGKILL


def test_child_in_a_reference_cycle_is_killed_and_its_descriptor_closed() -> None:
    child = ChildProcess("tests.core.test_child_process:echo")
    process, ours = child.process, Path(f"/proc/self/fd/{child.connection.fileno()}").readlink()
    circle: list[object] = [child]
    circle.append(circle)
    del child, circle
    gc.collect()
    assert process.returncode == -signal.SIGKILL
    assert ours not in _open_files()


def _open_files() -> set[Path]:
    """What the descriptors of this process are of; other threads may close some meanwhile."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(descriptor.readlink())
    return found


def echo(connection: Connection, messages: Iterator[object], *arguments: object) -> None:
    for message in messages:
        print("noise")
        connection.send((message, *arguments))


def test_child_ends_with_its_parent_although_a_fork_inherited_the_connection() -> None:
    program = (
        "import os, time; from savable_pipeline.core.child_process import ChildProcess\n"
        "child = ChildProcess('tests.core.test_child_process:echo'); fork = os.fork() or time.sleep(60)\n"
        "print(child.process.pid, fork, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, fork = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    wait_until_gone([child])
    os.kill(fork, signal.SIGKILL)
    parent.stdout.close()
