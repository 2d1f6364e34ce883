"""Workers killed at any moment, by the hundred: the stream of batches is that of a run in which nothing happened."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline import Dying, Moment, soak_pipeline
from report import Row, children, difference, kill

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest

SEED, LANES, WORKERS = 3, 12, 3
LARGE = 4000  # copies in a batch: 8 MB, which take milliseconds to write
WRITE_S = 0.006  # a worker that writes one is killed within this time
MOMENTS: dict[Moment, str] = {
    "restore": "while a lane is restored",
    "build": "while a lane is built",
    "birth": "while a worker starts",
}
_ANY = "at any moment"
_NEWBORN = "a replacement just born"
_STUCK_S = 900.0


class Undisturbed:
    """The hashes of the batches of a run in one process, made as far as they are asked for."""

    def __init__(self, shards: Path, copies: int) -> None:
        self._loader = sp.SavableLoader(partial(soak_pipeline, str(shards), copies=copies), seed=SEED, lanes=LANES)
        self._hashes: list[str] = []

    def first(self, n: int) -> list[str]:
        missing = islice(self._loader, n - len(self._hashes)) if n > len(self._hashes) else ()
        self._hashes += [digest(batch) for batch in missing]
        return self._hashes[:n]


class Witness(logging.Handler):
    """Counts what the loader says about each worker that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "ended by signal SIGKILL" not in text:
            self.texts["otherwise"] += 1
        for when in ("before it had started", "while it made a batch", "between two batches"):
            self.texts[when] += when in text

    def __enter__(self) -> Witness:
        logging.getLogger("savable_pipeline.run.engine.pool").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("savable_pipeline.run.engine.pool").removeHandler(self)


class Killer(threading.Thread):
    """Kills workers from outside while the trainer goes on; `progress` says how many batches that has been given.

    A loader gives up when one batch kills four workers, or four in a row do not start. So between two kills the trainer
    is given two batches, and after two kills of workers that had not started all of them do start.
    """

    def __init__(self, parent: int, progress: Callable[[], int], *, gap_s: float, newborn: bool = False) -> None:
        super().__init__(daemon=True)
        self._parent = parent  # of the workers
        self._progress = progress
        self._gap_s = gap_s
        self._newborn = newborn
        self._draw = random.Random(os.urandom(8))
        self._over = threading.Event()
        self.killed: set[int] = set()
        self._unborn = 0  # kills in a row of workers that had not started
        self.newborn_kills = 0

    @property
    def kills(self) -> int:
        """How many in all."""
        return len(self.killed)

    def run(self) -> None:
        last = 0
        while not self._over.wait(self._draw.uniform(0, self._gap_s)):
            alive = self._living()
            all_started = len(alive) == WORKERS and all(map(_has_started, alive))
            if self._progress() < last + 2 or not alive or (not all_started and (self._newborn or self._unborn >= 2)):
                continue
            last = self._progress()
            self._kill(self._draw.choice(alive))
            if self._newborn:
                self._kill_newborn(set(alive))

    def _living(self) -> list[int]:
        """The workers that are not dying already."""
        return [child for child in children(self._parent) if child not in self.killed]

    def _kill(self, pid: int) -> None:
        started = _has_started(pid)
        if kill(pid, self._parent):
            self.killed.add(pid)
            self._unborn = 0 if started else self._unborn + 1

    def _kill_newborn(self, alive: set[int]) -> None:
        while not self._over.is_set():
            if born := set(self._living()) - alive:
                time.sleep(self._draw.choice([0, 0.0005, 0.002, 0.01]))
                self._kill(born.pop())
                self.newborn_kills += 1
                return

    def stop(self) -> None:
        self._over.set()
        self.join()


def _has_started(pid: int) -> bool:
    """Whether a worker has mapped its note, which it does just before its first word."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "savable_pipeline note" in Path(f"/proc/{pid}/maps").read_text()
    return False


class Executioner(threading.Thread):
    """Kills those that ask for it through the pipe `kill me`, at some moment of the next milliseconds."""

    def __init__(self, folder: Path, parent: int) -> None:
        super().__init__(daemon=True)
        os.mkfifo(folder / "kill me")
        self._pipe = (folder / "kill me").open("r+b", buffering=0)
        self._parent = parent
        self.killed: set[int] = set()

    @property
    def kills(self) -> int:
        """How many in all."""
        return len(self.killed)

    def run(self) -> None:
        while pid := struct.unpack("I", self._pipe.read(4))[0]:
            time.sleep(random.uniform(0, WRITE_S))
            if kill(pid, self._parent):
                self.killed.add(pid)

    def stop(self) -> None:
        """From now on, who asks lives on."""
        self._pipe.write(struct.pack("I", 0))
        self.join()


def faults(shards: Path, *, kills: dict[str, int], each: int) -> Iterator[Row]:
    """Runs killed at any moment, `kills` times under each start method, and `each` times at chosen moments."""
    small, large = Undisturbed(shards, 40), Undisturbed(shards, LARGE)
    for method, number in kills.items():
        slow = method == "spawn"
        yield _killed_outside(shards, method, small, _ANY, number, gap_s=0.4 if slow else 0.05)
        yield _killed_outside(shards, method, small, _NEWBORN, each, gap_s=0.1)
        yield _killed_in_writing(shards, method, large, each)
        for moment in MOMENTS:
            yield _killed_at(shards, method, small, moment, each)


def _killed_outside(shards: Path, method: str, expected: Undisturbed, kind: str, times: int, gap_s: float) -> Row:
    found: list[str] = []
    newborn = kind == _NEWBORN
    with Witness() as witness, _loader(shards, method) as (loader, parent):
        killer = Killer(parent, lambda: len(found), gap_s=gap_s, newborn=newborn)
        killer.start()
        _take(loader, found, lambda: (killer.newborn_kills if newborn else killer.kills) >= times)
        killer.stop()
        _take_the_rest(loader, found, killer.kills)
    done = f"{killer.newborn_kills} of {killer.kills}" if newborn else f"{killer.kills}"
    return _row(f"{method}: {kind}", done, found, expected, witness, killer.kills)


def _killed_at(shards: Path, method: str, expected: Undisturbed, moment: Moment, times: int) -> Row:
    """Workers that die at one moment, `times` times; since most only come after a death, killed outside as well."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        dying = Dying(moment, times, Path(name), os.getpid())
        dying.watch_births()
        with Witness() as witness, _loader(shards, method, dying=dying) as (loader, parent):
            killer = Killer(parent, lambda: len(found), gap_s=0.4 if method == "spawn" else 0.1)
            killer.start()
            _take(loader, found, lambda: len(dying.deaths()) >= times)
            killer.stop()
            deaths, kills = len(dying.deaths()), len(killer.killed.union(dying.deaths()))
            _take_the_rest(loader, found, kills)
    return _row(f"{method}: {MOMENTS[moment]}", f"{deaths} of {kills}", found, expected, witness, kills)


def _killed_in_writing(shards: Path, method: str, expected: Undisturbed, times: int) -> Row:
    """Killed while large batches are written; counted are those of which the loader says that a batch was lost."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        dying = Dying("write", 1 << 30, Path(name), os.getpid())
        with Witness() as witness, _loader(shards, method, dying=dying, copies=LARGE) as (loader, parent):
            killer = Executioner(Path(name), parent)
            killer.start()
            _take(loader, found, lambda: witness.texts["while it made a batch"] >= times)
            killer.stop()
            _take_the_rest(loader, found, killer.kills)
    done = f"{witness.texts['while it made a batch']} of {killer.kills}"
    return _row(f"{method}: while a batch is written", done, found, expected, witness, killer.kills)


class _loader:
    """A loader that may lose as many workers as there will be, and the process whose children they are."""

    def __init__(self, shards: Path, method: str, **settings: Any) -> None:
        before = children(os.getpid())
        self._loader = sp.SavableLoader(
            partial(soak_pipeline, str(shards), **settings),
            seed=SEED,
            lanes=LANES,
            num_workers=WORKERS,
            workers=sp.Workers(start_method=method, max_restarts=1 << 30),
        )
        servers = [child for child in children(os.getpid()) if child not in before]
        self._parent = os.getpid() if method == "spawn" else servers[0]

    def __enter__(self) -> tuple[sp.SavableLoader, int]:
        return self._loader, self._parent

    def __exit__(self, *_: object) -> None:
        self._loader.close()


def _take(loader: sp.SavableLoader, found: list[str], enough: Callable[[], bool]) -> None:
    """Take batches until there is enough of whatever is waited for."""
    deadline = time.monotonic() + _STUCK_S
    for batch in loader:
        found.append(digest(batch))
        if enough():
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"in {_STUCK_S:g} s and {len(found)} batches it did not happen often enough")


def _take_the_rest(loader: sp.SavableLoader, found: list[str], kills: int) -> None:
    """Until the loader has noticed each of so many kills, and then two batches of each lane."""
    _take(loader, found, lambda: loader.stats()["restarts"] >= kills)
    enough = len(found) + 2 * LANES
    _take(loader, found, lambda: len(found) >= enough)


def _row(case: str, done: str, found: list[str], expected: Undisturbed, witness: Witness, kills: int) -> Row:
    texts = witness.texts
    when = ", ".join(f"{texts[text]} {short}" for text, short in _SHORT.items() if texts[text])
    wrong = difference(expected.first(len(found)), found)
    ended = sum(texts[text] for text in _SHORT)
    if texts["otherwise"] or ended != kills:
        wrong = wrong or f"{kills} were killed, {ended} ended, {texts['otherwise']} of them otherwise"
    return Row("faults", case, f"{done} kills; {when}", f"{len(found):,} batches", wrong)


_SHORT = {
    "before it had started": "starting",
    "while it made a batch": "at a batch",
    "between two batches": "between two",
}
