"""`savable_pipeline.tools.convert`: the same bytes whoever writes them, and what a kill leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from savable_pipeline.core.child_process import ChildProcess
from savable_pipeline.errors import SavableError, WorkerError
from savable_pipeline.tools.convert import Options, run_conversion
from savable_pipeline.tools.convert.jobs import claimed, locked
from savable_pipeline.tools.convert.options import MANIFEST
from tests.support import processes
from tests.support.toy_files import SMALL, file_hashes, write_captioned_images, write_lines
from tests.support.toy_sources import watch_written_ranges


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 40, **{"bad.jpg": b"x", "nodot": b"x", "b/worse.png": b""})
    for workers in (1, 2):
        run_conversion(source, tmp_path / str(workers), SMALL, workers=workers)
    one, two = (file_hashes(tmp_path / str(workers)) for workers in (1, 2))
    assert len(one) == 2 * 14 + 7
    assert one == two


def test_output_bytes_do_not_depend_on_path_or_time_of_the_input(tmp_path: Path) -> None:
    lines = [{"image": f"{i:03d}.jpg"} for i in (0, 3, 5)]
    write_lines(write_captioned_images(tmp_path / "in", 6) / "meta.jsonl", *lines)
    shutil.copytree(tmp_path / "in", tmp_path / "deeper/elsewhere")
    os.utime(tmp_path / "deeper/elsewhere/000.jpg", (1, 1))
    run_conversion(tmp_path / "in/meta.jsonl", tmp_path / "one", SMALL)
    run_conversion(tmp_path / "deeper/elsewhere/meta.jsonl", tmp_path / "two", SMALL)
    one, two = file_hashes(tmp_path / "one"), file_hashes(tmp_path / "two")
    assert one.pop(MANIFEST) != two.pop(MANIFEST), "where the input lay"
    assert one == two


def run_until_killed(source: Path, target: Path, event: int) -> bool:
    """Convert in a process that is killed before its `event`-th touch of a file; tells whether it was."""
    return processes.run_until_killed(lambda: run_conversion(source, target, SMALL), source.parent, event)


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, str]:
    """What the conversion of `tmp_path / "in"` comes to when nobody kills it."""
    run_conversion(
        write_captioned_images(tmp_path / "in", 7, **{"003.jpg": b"bad", "nodot": b""}), tmp_path / "calm", SMALL
    )
    return file_hashes(tmp_path / "calm")


@pytest.mark.landing
def test_killed_and_repeated_conversion_writes_the_same_bytes(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    event = 1
    while run_until_killed(tmp_path / "in", tmp_path / "out", event):
        report = run_conversion(tmp_path / "in", tmp_path / "out", SMALL)
        assert (report.samples, len(report.rejected)) == (6, 2)
        assert file_hashes(tmp_path / "out") == undisturbed, event
        assert not [path for path in (tmp_path / "out").rglob("*") if path.is_dir() and path.name != ".nv-meta"]
        shutil.rmtree(tmp_path / "out")
        event += 1
    assert event > 60  # else the hook saw too little


def test_finished_ranges_are_not_written_again(
    tmp_path: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(done: int, total: int, size: int) -> None:
        if done >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_conversion(tmp_path / "in", tmp_path / "out", SMALL, progress=stopped)
    finished = {path.parent.name for path in (tmp_path / "out").rglob("record")}
    names = watch_written_ranges(monkeypatch)
    run_conversion(tmp_path / "in", tmp_path / "out", SMALL)
    assert finished and names and not finished & names
    assert file_hashes(tmp_path / "out") == undisturbed


def test_finished_conversion_is_only_reported_again(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    first = run_conversion(tmp_path / "in", tmp_path / "calm", SMALL)
    inodes = {path: path.stat().st_ino for path in (tmp_path / "calm").glob("*.tar")}
    assert run_conversion(tmp_path / "in", tmp_path / "calm", SMALL) == first
    assert {path: path.stat().st_ino for path in inodes} == inodes
    next(iter(inodes)).unlink()
    assert run_conversion(tmp_path / "in", tmp_path / "calm", SMALL) == first
    assert file_hashes(tmp_path / "calm") == undisturbed


def test_missing_offsets_of_a_finished_conversion_are_written_again(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    (tmp_path / "calm/000001.tar.idx").unlink()
    (tmp_path / "calm/000001.tar.idx.99.tmp").write_bytes(b"")  # of a process that was killed on a full disk
    assert run_conversion(tmp_path / "in", tmp_path / "calm", SMALL).already
    found = file_hashes(tmp_path / "calm")
    assert {name: found[name] for name in found if not name.endswith(".lock")} == undisturbed


COMMAND = """
from savable_pipeline.tools.convert import ranges
ranges.LEAST_BYTES = 1
from savable_pipeline.tools.cli.main import app
app()
"""


def start_command(source: Path, target: Path) -> subprocess.Popen[bytes]:
    """The command with two workers, once it has finished some shards."""
    arguments = [sys.executable, "-c", COMMAND, "convert", str(source), str(target), "--shard-samples=3", "--workers=2"]
    with target.with_name("errors").open("wb") as errors:
        process = subprocess.Popen(arguments, stderr=errors, start_new_session=True)
    enough = len(_tars(target)) + 3
    deadline = time.monotonic() + 60
    while len(_tars(target)) < enough and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be disturbed"
    return process


def _tars(target: Path) -> list[Path]:
    """The shards so far; none while a folder is renamed."""
    with contextlib.suppress(FileNotFoundError):
        return [*target.rglob("*.tar")]
    return []


def living(target: Path) -> list[int]:
    """The processes that were told of a target, and live: the command and its workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended in the meantime
            found += [int(path.parent.name)] if os.fsencode(target) in path.read_bytes() else []
    return found


def wait_until_gone(target: Path) -> None:
    deadline = time.monotonic() + 60
    while left := living(target):
        if time.monotonic() > deadline:
            for process in left:
                os.kill(process, signal.SIGKILL)
            raise AssertionError("some of its processes live on")
        time.sleep(0.05)


def texts(folder: Path, count: int, size: int = 1) -> Path:
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:05d}.raw").write_bytes(bytes([1 + i % 255]) * size)
    return folder


@pytest.mark.usefixtures("own_interpreters")  # found by their command lines
def test_neither_a_kill_nor_ctrl_c_leaves_processes_behind(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", 900)
    process = start_command(source, tmp_path / "out")
    assert len(living(tmp_path / "out")) == 3
    process.kill()
    process.wait()
    wait_until_gone(tmp_path / "out")
    process = start_command(source, tmp_path / "out")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 130
    wait_until_gone(tmp_path / "out")
    errors = (tmp_path / "errors").read_text()
    assert "Traceback" not in errors and errors.endswith("stopped\n")
    assert run_conversion(source, tmp_path / "out", SMALL).samples == 900


@pytest.mark.usefixtures("own_interpreters")
def test_killed_worker_is_an_error_that_says_how_to_resume(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", 200)

    def kill_one(done: int, total: int, size: int) -> None:
        for worker in living(tmp_path / "out")[:1] if done else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)

    with pytest.raises(WorkerError, match="Run the command again"):
        run_conversion(source, tmp_path / "out", Options(shard_samples=1), workers=2, progress=kill_one)
    assert run_conversion(source, tmp_path / "out", Options(shard_samples=1), workers=1).samples == 200


def test_conversion_waits_for_the_workers_of_a_killed_one(tmp_path: Path) -> None:
    work = tmp_path / "out/.nv-meta/savable.convert"
    work.mkdir(parents=True)
    held = os.open(work, os.O_RDONLY)  # as each worker does
    fcntl.flock(held, fcntl.LOCK_SH)
    begin = time.monotonic()
    threading.Timer(0.3, os.close, (held,)).start()
    run_conversion(write_captioned_images(tmp_path / "in", 2), tmp_path / "out", SMALL)
    assert time.monotonic() - begin > 0.3


def test_a_worker_shares_the_lock_of_the_folder_while_it_lives(tmp_path: Path) -> None:
    worker = ChildProcess("savable_pipeline.tools.convert.jobs:serve_ranges", str(tmp_path))
    deadline = time.monotonic() + 60
    with pytest.raises(SavableError, match="a worker has it"):
        while time.monotonic() < deadline:
            with locked(tmp_path, "a worker has it"):
                time.sleep(0.01)
    worker.close()
    with locked(tmp_path, "a worker has it"):
        pass


def test_concurrent_conversions_into_one_folder_are_excluded(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 2)
    (tmp_path / "out/.nv-meta").mkdir(parents=True)
    with (
        claimed(tmp_path / "out/.nv-meta", tmp_path / "out/.nv-meta/savable.convert"),
        pytest.raises(SavableError, match="another conversion is writing here"),
    ):
        run_conversion(source, tmp_path / "out", SMALL)


@pytest.mark.usefixtures("own_interpreters")
def test_sigterm_ends_the_workers_first_and_leaves_nothing(tmp_path: Path) -> None:
    source = texts(tmp_path / "in", 800, 20_000)
    told = ["convert", str(source), str(tmp_path / "out"), "--workers", "2", "--shard-bytes", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *told],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and not list((tmp_path / "out").rglob("*.tar")):
        time.sleep(0.01)
    process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM, said
    assert b"leaked semaphore" not in said and b"Traceback" not in said
    wait_until_gone(tmp_path / "out")
    assert run_conversion(source, tmp_path / "out", Options(shard_bytes=100_000)).samples == 800


SIGNAL_AT = """
import concurrent.futures, os, sys
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import ranges

ranges.LEAST_BYTES = 1

place, line, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
lines = 0


def trace(frame, event, _arg):
    global lines
    if f"{os.path.basename(frame.f_code.co_filename)} {frame.f_code.co_name}" != place:
        return None
    lines += event == "line"
    if lines == line and event == "line":
        sys.settrace(None)
        os.kill(os.getpid(), number)
    return trace


sys.settrace(trace)
app(sys.argv[4:])
"""


@pytest.mark.landing
@pytest.mark.usefixtures("own_interpreters")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("index_making.py each_job", 3),
        ("index_making.py each_job", 60),
        ("jobs.py _in_workers", 10),
        ("child_process.py kill", 1),
    ],
    ids=["start", "wait", "loop", "close"],
)
def test_a_signal_anywhere_in_the_pool_ends_the_conversion(
    place: str, line: int, number: signal.Signals, tmp_path: Path
) -> None:
    source = texts(tmp_path / "in", 400, 2_000)
    told = ["convert", str(source), str(tmp_path / "out"), "--workers", "2", "--shard-bytes", "20000"]
    ended = subprocess.run(
        [sys.executable, "-c", SIGNAL_AT, place, str(line), str(int(number)), *told],
        capture_output=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )
    assert ended.returncode == 128 + number, ended.stderr
    assert b"leaked semaphore" not in ended.stderr and b"Traceback" not in ended.stderr
    wait_until_gone(tmp_path / "out")
    assert run_conversion(source, tmp_path / "out", Options(shard_bytes=20_000)).samples == 400
