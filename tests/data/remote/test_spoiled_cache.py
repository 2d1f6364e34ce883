"""Whatever a crash, a disk, a full disk or a kill has spoiled of the cache, no wrong byte is read, and it works on."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.core.child_process import ChildProcess
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.remote import session
from savable_pipeline.data.remote.cache_space import bytes_in_use
from savable_pipeline.errors import RemoteError
from tests.conftest import write_tar
from tests.support.full_disk import DISK_BYTES
from tests.support.toy_remote_stores import write_jsonl, write_tokens
from tests.support.toy_server import ToyServer, serving, use_as_s3

KINDS = ["indexed", "unindexed", "long", "jsonl", "tokens"]
Samples = list[tuple[str, dict[str, bytes]]]


def write_tars(folder: Path, shards: int, samples: int, sizes: tuple[int, int]) -> None:
    """Samples of random bytes."""
    draw = np.random.default_rng(3)
    for shard in range(shards):
        members = []
        for number in range(samples):
            members.append((f"{shard}-{number:03d}.bin", draw.bytes(int(draw.integers(*sizes)))))
            members.append((f"{shard}-{number:03d}.json", b'{"id": %d}' % number))
        write_tar(folder / f"{shard:04d}.tar", members)


WRITERS: dict[str, Callable[[Path], None]] = {
    "indexed": functools.partial(write_tars, shards=3, samples=12, sizes=(100, 20_000)),
    "unindexed": functools.partial(write_tars, shards=3, samples=12, sizes=(100, 20_000)),
    "long": functools.partial(write_tars, shards=1, samples=2, sizes=(9 << 20, 10 << 20)),
    "jsonl": write_jsonl,
    "tokens": write_tokens,
}


@pytest.fixture(scope="module")
def www(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("www")
    for kind, write in WRITERS.items():
        (folder / kind).mkdir()
        write(folder / kind)
        if kind in ("indexed", "long"):
            open_any(str(folder / kind))
    return folder


@pytest.fixture(scope="module")
def expected(www: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Samples]:
    local = tmp_path_factory.mktemp("local")
    shutil.copytree(www, local, dirs_exist_ok=True)  # indexes are written beside the files
    return {kind: samples_of(open_any(str(local / kind))) for kind in KINDS}


@pytest.fixture
def server(www: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "20")  # a busy machine is no fault
    with serving(www) as server:
        use_as_s3(server, monkeypatch)
        yield server


def samples_of(dataset: Dataset, order: list[int] | None = None) -> Samples:
    """Key and parts of samples, of all in their order if none are named."""
    refs = np.zeros(dataset.count, REF)
    refs["index"] = np.arange(dataset.count)
    refs = refs if order is None else refs[order]
    return [(sample.key, {part: sample[part] for part in sample}) for sample in dataset.open_samples(refs)]


def read(kind: str) -> Samples:
    try:
        return samples_of(open_any(f"s3://{kind}/"))
    finally:
        gc.collect()  # now no one reads from there any more


def read_or_again(kind: str) -> tuple[Samples, int]:
    """What is read, after how many errors: an index cannot be left in the midst of a run; the next has another."""
    try:
        return read(kind), 0
    except sp.ShardError as error:
        assert "is damaged. Start again to rebuild it" in str(error)
        return read(kind), 1


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def zero(path: Path, draw: random.Random) -> None:
    size = path.stat().st_size
    begin = draw.choice([0, draw.randrange(size)]) // 4096 * 4096  # as a disk loses blocks
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(min(draw.choice([4096, 65536, size]), size - begin)))


def scribble(path: Path, draw: random.Random) -> None:
    """Other bytes from a random place on."""
    with path.open("r+b") as file:
        file.seek(draw.randrange(path.stat().st_size))
        file.write(draw.randbytes(draw.choice([1, 3, 500])))


HARMS = [cut, zero, scribble]


def files_of(cache: Path) -> list[Path]:
    """The files of the cache with bytes in them."""
    return [path for path in sorted(cache.rglob("*")) if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize(
    ("seed", "trials"), [(1, 10), *(pytest.param(seed, 50, marks=pytest.mark.long) for seed in range(2, 12))]
)
def test_damaged_cache_files_yield_no_wrong_byte_and_are_repaired(
    server: ToyServer, expected: dict[str, Samples], tmp_path: Path, seed: int, trials: int
) -> None:
    draw, errors = random.Random(seed), 0
    for trial in range(trials):
        kind = draw.choice(KINDS)
        got, told = read_or_again(kind)
        assert got == expected[kind], (seed, trial, "before")
        errors += told
        harm = [(draw.choice(files_of(tmp_path / "cache")), draw.choice(HARMS)) for _ in range(draw.choice([1, 3]))]
        for path, spoil in harm:
            if path.stat().st_size:
                spoil(path, draw)
        got, told = read_or_again(kind)
        assert got == expected[kind], (seed, trial, harm)
        errors += told
    assert errors < trials / 4
    sent = server.requests
    for kind in KINDS:
        assert read_or_again(kind)[0] == expected[kind]
    assert server.requests < sent + 200


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bit_in_the_cache_is_reported_once_and_only_its_row_downloaded(
    server: ToyServer, expected: dict[str, Samples], tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(kind) == expected[kind]
    (path, *_) = sorted(
        path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".tar", ".bytes") and path.stat().st_blocks
    )
    size = path.stat().st_size
    flips = [size // 3, size // 2]
    with path.open("r+b") as file:
        for at in flips:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 4]))
    sent = len(server.ranges)
    dataset = open_any(f"s3://{kind}/")
    for _ in range(2):
        assert samples_of(dataset) == expected[kind]
    (message,) = (message for message in caplog.messages if "were changed by a crash, the disk or a program" in message)
    assert message.startswith(f"{path}: bytes ")
    begin, _, end = message.split()[2:5]
    assert any(int(begin) <= at <= int(end) for at in flips)
    names = {"jsonl": "0000.jsonl", "tokens": "0000.bin"}
    again = [extent for name, *extent in server.ranges[sent:] if name == f"/{kind}/{names.get(kind, '0000.tar')}"]
    assert all(any(start <= at < stop for start, stop in again) for at in flips)
    assert sum(stop - start for start, stop in again) < size / 2


def test_cache_of_an_older_release_is_rebuilt_with_one_line(
    server: ToyServer, expected: dict[str, Samples], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read("indexed") == expected["indexed"]
    (flags,) = (tmp_path / "cache").rglob("flags")
    flags.write_bytes(b"7d1cd7f3".ljust(64, b"\0") + bytes(8 * 3) + bytes([1]) * 36 + bytes(36) + bytes([1]) * 3)
    for path in flags.parent.glob("*.tar"):
        path.write_bytes(bytes(path.stat().st_size))
    for _ in range(2):
        assert read("indexed") == expected["indexed"]
    (line,) = caplog.messages
    assert line == f"{flags.parent}: the cache is damaged or of another release. Its files are downloaded again"


@pytest.mark.parametrize(("kind", "disk"), [("indexed", 0), ("indexed", 50_000), ("jsonl", 150_000)])
def test_full_disk_yields_right_bytes_or_a_clear_error(
    server: ToyServer, expected: dict[str, Samples], monkeypatch: pytest.MonkeyPatch, kind: str, disk: int
) -> None:
    read(kind)  # its index
    for path in files_of(Path(os.environ["SAVABLE_CACHE"])):
        if path.suffix in (".tar", ".bytes"):
            path.unlink()
    monkeypatch.setenv(DISK_BYTES, str(disk))
    full = functools.partial(ChildProcess, "tests.support.full_disk:serve")
    with monkeypatch.context() as patch:
        patch.setattr(session, "ChildProcess", lambda target, *settings: full(*settings))
        dataset, right = open_any(f"s3://{kind}/"), 0
        for number in random.Random(disk).choices(range(dataset.count), k=40):
            try:
                assert samples_of(dataset, [number]) == [expected[kind][number]]
                right += 1
            except RemoteError as error:
                assert "No space left on device. Free space there" in str(error)
    assert right == 0 if not disk else right > 15
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8 + 1))  # which has a downloading process of its own
    assert read(kind) == expected[kind]


def test_too_small_cache_is_an_error_that_names_the_least_size(server: ToyServer, expected: dict[str, Samples]) -> None:
    longest = max(range(36), key=lambda number: len(expected["indexed"][number][1]["bin"]))
    dataset = open_any("s3://indexed/", cache=(None, 5000))
    with pytest.raises(RemoteError, match=r"Set cache_bytes= or SAVABLE_CACHE_BYTES to at least [0-9]+$") as error:
        samples_of(dataset, [longest])
    least = int(str(error.value).rpartition(" ")[2])
    assert 20_000 < least < 40_000
    dataset = open_any("s3://indexed/", cache=(None, least))
    assert samples_of(dataset, [longest]) == [expected["indexed"][longest]]
    assert bytes_in_use(Path(os.environ["SAVABLE_CACHE"])) <= least


def read_at_random(kind: str, expected: Samples, seed: int, limit: int) -> None:
    """The reader that is killed. Exits with 7 once it has read what it should not."""
    draw = random.Random(seed)
    while True:
        try:
            dataset = open_any(f"s3://{kind}/", cache=(None, limit))
            for _ in range(40):
                order = draw.choices(range(len(expected)), k=5)
                if samples_of(dataset, order) != [expected[number] for number in order]:
                    os._exit(7)
        except RemoteError as error:  # it is replaced, but not while a dataset is opened, nor again and again
            if "the process that downloads shards ended with code -9" not in str(error):
                raise


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


@pytest.mark.parametrize(
    ("kills", "limit"),
    [(6, 100_000), *(pytest.param(250, 100_000 << 5 * (seed % 2), marks=pytest.mark.long) for seed in range(4))],
)
@pytest.mark.timeout(1800)
def test_kill_at_any_point_leaves_a_working_cache(
    server: ToyServer, expected: dict[str, Samples], kills: int, limit: int
) -> None:
    draw, fork, done = random.Random(kills + limit), multiprocessing.get_context("fork"), [0, 0]
    readers: list[Any] = [None, None]  # of one cache
    while sum(done) < kills:
        for place, reader in enumerate(readers):
            if reader is None or not reader.is_alive():
                assert reader is None or reader.exitcode == -signal.SIGKILL, (done, reader.exitcode)
                kind = draw.choice(["indexed", "unindexed", "jsonl"])
                arguments = kind, expected[kind], draw.random(), limit
                readers[place] = fork.Process(target=read_at_random, args=arguments, daemon=False)
                readers[place].start()
        time.sleep(draw.random() ** 2)  # no wait for something: the moment is at random
        reader = draw.choice(readers)
        victims = children(reader.pid)
        is_reader = not victims or draw.random() < 0.4
        with contextlib.suppress(ProcessLookupError):
            os.kill(reader.pid if is_reader else draw.choice(victims), signal.SIGKILL)
            done[is_reader] += 1
        if is_reader:
            reader.join()
    for reader in readers:
        reader.kill()
        reader.join()
    print(f"killed {done[0]} downloading processes and {done[1]} readers")
    for kind in ("indexed", "unindexed", "jsonl"):
        assert read(kind) == expected[kind]


@pytest.mark.parametrize("by_another", [False, True])
def test_a_cache_that_is_removed_between_two_loaders_of_a_process_is_rebuilt(
    server: ToyServer, expected: dict[str, Samples], tmp_path: Path, by_another: bool
) -> None:
    first = open_any("s3://indexed/")
    shutil.copytree(tmp_path / "cache", tmp_path / "fresh")  # as another process makes it
    assert samples_of(first, [0]) == expected["indexed"][:1]
    shutil.rmtree(tmp_path / "cache")
    if by_another:
        shutil.copytree(tmp_path / "fresh", tmp_path / "cache")
    assert samples_of(open_any("s3://indexed/")) == expected["indexed"]
    with pytest.raises(RemoteError, match=r"was removed during the run\. Create a new loader"):
        samples_of(first)
