"""Kill hundreds of workers at random moments. The batches must equal those of an undisturbed run."""

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
LARGE = 4000  # copies in a batch, so that it has 8 MB and takes milliseconds to write
WRITE_S = 0.006  # seconds, within which a worker is killed after it starts to write such a batch
MOMENTS: dict[Moment, str] = {
    "restore": "while a lane is restored",
    "build": "while a lane is built",
    "birth": "while a worker starts",
}
_ANY_MOMENT = "at any moment"
_NEWBORN = "a replacement that has just started"
_STUCK_S = 900.0  # the program fails after so many seconds without enough kills


class Undisturbed:
    """Hashes of the batches of a run without workers."""

    def __init__(self, shards: Path, copies: int) -> None:
        self._loader = sp.SavableLoader(partial(soak_pipeline, str(shards), copies=copies), seed=SEED, lanes=LANES)
        self._hashes: list[str] = []

    def first(self, n: int) -> list[str]:
        """Return the hashes of the first `n` batches."""
        missing = islice(self._loader, n - len(self._hashes)) if n > len(self._hashes) else ()
        self._hashes += [digest(batch) for batch in missing]
        return self._hashes[:n]


class DeathLog(logging.Handler):
    """Log handler that counts the loader's warnings about dead workers, by their words."""

    def __init__(self) -> None:
        super().__init__()
        # The number of warnings by a part of their text. "otherwise" counts workers that ended, but not by a kill.
        self.texts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "ended by signal SIGKILL" not in text:
            self.texts["otherwise"] += 1
        for part in _DEATHS:
            self.texts[part] += part in text

    def __enter__(self) -> DeathLog:
        logging.getLogger("savable_pipeline.run.engine.pool").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("savable_pipeline.run.engine.pool").removeHandler(self)


class Killer(threading.Thread):
    """Thread that kills random workers while the trainer runs.

    A loader fails if one batch kills four workers, or if four workers in a row do not start. So the trainer gets two
    batches between kills, and after two kills of workers that had not started, all workers may start.

    Args:
        parent: The process id of the workers' parent.
        progress: Returns the number of batches that the trainer has got.
        gap_s: The longest time between two kills.
        newborn: Also kill the replacement of each killed worker as soon as it exists.
    """

    def __init__(self, parent: int, progress: Callable[[], int], *, gap_s: float, newborn: bool = False) -> None:
        super().__init__(daemon=True)
        self._parent = parent
        self._progress = progress
        self._gap_s = gap_s
        self._newborn = newborn
        self._rng = random.Random(os.urandom(8))
        self._should_stop = threading.Event()
        self.killed: set[int] = set()
        self._early_kills = 0  # kills in a row of workers that had not started
        self.newborn_kills = 0

    @property
    def kills(self) -> int:
        """The number of workers killed."""
        return len(self.killed)

    def run(self) -> None:
        last = 0
        while not self._should_stop.wait(self._rng.uniform(0, self._gap_s)):
            alive = self._living()
            all_started = len(alive) == WORKERS and all(map(_has_started, alive))
            must_wait = not all_started and (self._newborn or self._early_kills >= 2)
            if self._progress() < last + 2 or not alive or must_wait:
                continue
            last = self._progress()
            self._kill(self._rng.choice(alive))
            if self._newborn:
                self._kill_newborn(set(alive))

    def _living(self) -> list[int]:
        """Return the workers that were not killed."""
        return [child for child in children(self._parent) if child not in self.killed]

    def _kill(self, pid: int) -> None:
        """Kill a worker, unless it has just ended, and count the kill."""
        started = _has_started(pid)
        if kill(pid, self._parent):
            self.killed.add(pid)
            self._early_kills = 0 if started else self._early_kills + 1

    def _kill_newborn(self, alive: set[int]) -> None:
        """Kill the next worker that was not alive before, at a random stage of its start."""
        while not self._should_stop.is_set():
            if new := set(self._living()) - alive:
                time.sleep(self._rng.choice([0, 0.0005, 0.002, 0.01]))
                self._kill(new.pop())
                self.newborn_kills += 1
                return

    def stop(self) -> None:
        self._should_stop.set()
        self.join()


def _has_started(pid: int) -> bool:
    """Return whether a worker has mapped its status page, which it does just before its first message."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "savable_pipeline status" in Path(f"/proc/{pid}/maps").read_text()
    return False


class KillServer(threading.Thread):
    """Thread that kills each worker that writes its process id to the pipe `kill me`, within WRITE_S."""

    def __init__(self, folder: Path, parent: int) -> None:
        super().__init__(daemon=True)
        os.mkfifo(folder / "kill me")
        self._pipe = (folder / "kill me").open("r+b", buffering=0)
        self._parent = parent
        self.killed: set[int] = set()

    @property
    def kills(self) -> int:
        """The number of workers killed."""
        return len(self.killed)

    def run(self) -> None:
        while pid := struct.unpack("I", self._pipe.read(4))[0]:
            time.sleep(random.uniform(0, WRITE_S))
            if kill(pid, self._parent):
                self.killed.add(pid)

    def stop(self) -> None:
        """Stop killing."""
        self._pipe.write(struct.pack("I", 0))
        self.join()


def faults(shards: Path, *, kills: dict[str, int], each: int) -> Iterator[Row]:
    """Run loaders whose workers are killed.

    Args:
        shards: The folder of the data.
        kills: By start method, the number of kills at random moments.
        each: The number of kills at each of the chosen moments.
    """
    small, large = Undisturbed(shards, 40), Undisturbed(shards, LARGE)
    for method, number in kills.items():
        slow = method == "spawn"
        yield _kill_from_outside(shards, method, small, _ANY_MOMENT, number, gap_s=0.4 if slow else 0.05)
        yield _kill_from_outside(shards, method, small, _NEWBORN, each, gap_s=0.1)
        yield _kill_while_writing(shards, method, large, each)
        for moment in MOMENTS:
            yield _kill_at_moment(shards, method, small, moment, each)


def _kill_from_outside(shards: Path, method: str, expected: Undisturbed, kind: str, times: int, gap_s: float) -> Row:
    """Kill `times` workers at random moments or, if `kind` is `_NEWBORN`, `times` replacements just started."""
    found: list[str] = []
    newborn = kind == _NEWBORN
    with DeathLog() as death_log, _mortal_loader(shards, method) as (loader, parent):
        killer = Killer(parent, lambda: len(found), gap_s=gap_s, newborn=newborn)
        killer.start()
        _take_until(loader, found, lambda: (killer.newborn_kills if newborn else killer.kills) >= times)
        killer.stop()
        _take_after_kills(loader, found, killer.kills)
    done = f"{killer.newborn_kills} of {killer.kills}" if newborn else f"{killer.kills}"
    return _row(f"{method}: {kind}", done, found, expected, death_log, killer.kills)


def _kill_at_moment(shards: Path, method: str, expected: Undisturbed, moment: Moment, times: int) -> Row:
    """Let workers kill themselves at one moment, `times` times.

    They are also killed from outside, because most of these moments only happen after a death.
    """
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        dying = Dying(moment, times, Path(name), os.getpid())
        dying.watch_births()
        with DeathLog() as death_log, _mortal_loader(shards, method, dying=dying) as (loader, parent):
            killer = Killer(parent, lambda: len(found), gap_s=0.4 if method == "spawn" else 0.1)
            killer.start()
            _take_until(loader, found, lambda: len(dying.deaths()) >= times)
            killer.stop()
            deaths, kills = len(dying.deaths()), len(killer.killed.union(dying.deaths()))
            _take_after_kills(loader, found, kills)
    return _row(f"{method}: {MOMENTS[moment]}", f"{deaths} of {kills}", found, expected, death_log, kills)


def _kill_while_writing(shards: Path, method: str, expected: Undisturbed, times: int) -> Row:
    """Kill workers while they write large batches, until `times` kills have lost a batch by the loader's warnings."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        dying = Dying("write", 1 << 30, Path(name), os.getpid())
        with DeathLog() as death_log, _mortal_loader(shards, method, dying=dying, copies=LARGE) as (loader, parent):
            killer = KillServer(Path(name), parent)
            killer.start()
            _take_until(loader, found, lambda: death_log.texts["while it made a batch"] >= times)
            killer.stop()
            _take_after_kills(loader, found, killer.kills)
    done = f"{death_log.texts['while it made a batch']} of {killer.kills}"
    return _row(f"{method}: while a batch is written", done, found, expected, death_log, killer.kills)


@contextlib.contextmanager
def _mortal_loader(shards: Path, method: str, **settings: Any) -> Iterator[tuple[sp.SavableLoader, int]]:
    """Open a loader that may lose any number of workers. Yield it, and the process id of their parent."""
    before = children(os.getpid())
    pipeline = partial(soak_pipeline, str(shards), **settings)
    workers = sp.Workers(WORKERS, start_method=method, max_restarts=1 << 30)
    with sp.SavableLoader(pipeline, seed=SEED, lanes=LANES, workers=workers) as loader:
        servers = [child for child in children(os.getpid()) if child not in before]
        yield loader, os.getpid() if method == "spawn" else servers[0]


def _take_until(loader: sp.SavableLoader, found: list[str], enough: Callable[[], bool]) -> None:
    """Append hashes of batches to `found` until `enough()`."""
    deadline = time.monotonic() + _STUCK_S
    for batch in loader:
        found.append(digest(batch))
        if enough():
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"in {_STUCK_S:g} s and {len(found)} batches it did not happen often enough")


def _take_after_kills(loader: sp.SavableLoader, found: list[str], kills: int) -> None:
    """Take batches until the loader has noticed all kills, and then two of each lane.

    Their hashes are appended to `found`.
    """
    _take_until(loader, found, lambda: loader.stats()["restarts"] >= kills)
    enough = len(found) + 2 * LANES
    _take_until(loader, found, lambda: len(found) >= enough)


def _row(case: str, done: str, found: list[str], expected: Undisturbed, death_log: DeathLog, kills: int) -> Row:
    """Return the row of a case. Its problem is another batch, or a death that was not a kill."""
    texts = death_log.texts
    when = ", ".join(f"{texts[text]} {short}" for text, short in _DEATHS.items() if texts[text])
    problem = difference(expected.first(len(found)), found)
    ended = sum(texts[text] for text in _DEATHS)
    if texts["otherwise"] or ended != kills:
        problem = problem or f"{kills} were killed, {ended} ended, {texts['otherwise']} of them otherwise"
    return Row("faults", case, f"{done} kills; {when}", f"{len(found):,} batches", problem)


_DEATHS = {  # parts of the loader's warnings, and when the worker died
    "before it had started": "starting",
    "while it made a batch": "at a batch",
    "between two batches": "between two",
}
