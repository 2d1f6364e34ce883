"""Global generators of Python, NumPy and torch: seeded for users, restored after.

A *series* is a number of calls of a user's function, one after the other. With `global_rng=None`, a series is watched
for draws from these generators. That costs 6 µs per series in a hot loop, and 4 µs where the trainer's states must be
restored. Seeding would cost 7 µs per call. A watched series has three phases:

    start    the generators get states of this process and series, which no function can restore by chance
    calls    nothing is seeded
    end      if a state has changed, the series is repeated with seeds, and all later calls are seeded
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
import struct
import time
from collections.abc import Callable, Collection, Iterator
from functools import cache, lru_cache, partial
from itertools import cycle
from operator import attrgetter
from typing import Any, Self, TypeAlias

import numpy as np

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.named_object import imported
from savable_pipeline.errors import EncodeError

KINDS = ("python", "numpy", "torch")
_SHORTEST_SERIES = 16  # calls; a shorter series is seeded, which is cheaper than watching
_SECOND_RUNS = 8  # watched calls that are repeated from a second state, for each function and process
_MAX_TRIES = 8  # most tries of a series in a thread, if the generators' states change each time
_bit_generator = partial(attrgetter("mtrand._rand._bit_generator"), np.random)  # a function since NumPy 1.24
_START_STATES = 4  # number of states that series start from, in turn
_TWISTER_BYTES = 624 * 4 + 4  # size of the words and position of a Mersenne Twister
_TWISTER = np.random.MT19937(0)  # for NumPy's functions, if the trainer has replaced their bit generator
_Access: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]  # functions that read and set a state


def seeded_generators(setting: bool | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the kinds of generators that a setting of `global_rng` seeds.

    Raises ValueError for an invalid setting.
    """
    if setting is None or isinstance(setting, bool):
        return () if setting is False else KINDS
    if isinstance(setting, str) or not set(setting) <= set(KINDS):
        raise ValueError(f"global_rng={setting!r}: expected None, True, False or a tuple of some of {KINDS}")
    return tuple(setting)


def seeder(setting: bool | tuple[str, ...] | None) -> Callable[[int], None] | None:
    """Return a function that seeds a setting's generators with a 64-bit key, or None."""
    if not (chosen := seeded_generators(setting)):
        return None
    seeds: list[Callable[[int], object]] = [random.seed] if "python" in chosen else []
    seeds += [_seed_numpy] if "numpy" in chosen else []
    if "torch" in chosen:
        import torch

        seeds.append(torch.default_generator.manual_seed)

    def seed(key: int) -> None:
        for each in seeds:
            each(key)

    return seed


def _seed_numpy(key: int) -> None:
    """Seed NumPy's functions. They draw from a Mersenne Twister then, as in a new process."""
    if not isinstance(_bit_generator(), np.random.MT19937):  # the trainer, or a function, has replaced it
        np.random.set_bit_generator(_TWISTER)  # type: ignore[attr-defined]
    np.random.seed(key & 0xFFFFFFFF)


class DrawFound(BaseException):
    """Interrupts a series of calls that drew unseeded, to repeat it with seeds."""


class Seeding:
    """Seeding of the global generators for one function in one process.

    With the setting None, all calls are seeded from the first series on in which the function draws. Before, only
    series of less than 16 calls are. Threads cannot seed the generators. A thread repeats a series with draws, since
    another thread may have drawn, and raises `EncodeError` after eight tries.

    Args:
        name: Names the function in errors.
        setting: `TaskEncoder.global_rng`.
        in_thread: Whether several threads call it.

    Attributes:
        seed: Seeds the generators for the next call of the series, or None if calls are not seeded.
    """

    def __init__(self, name: str, setting: bool | tuple[str, ...] | None, *, in_thread: bool) -> None:
        self._name, self._in_thread = name, in_thread
        self._seeder = cache(lambda: seeder(setting))  # only a seeded call imports torch
        self.seed: Callable[[int], None] | None = None
        self._may_watch, self._watches, self._tries = setting is None, False, 0
        self._remaining_second_runs = 0 if in_thread else _SECOND_RUNS

    def series(self, calls: int) -> Self:
        """Return a context for a series of `calls` calls, which yields `seed`.

        It raises `DrawFound` after the calls, or after an error, if they drew unseeded.
        """
        self._watches = self._may_watch and (calls >= _SHORTEST_SERIES or self._in_thread)
        self.seed = None if self._watches else self._seeder()
        self._start()
        return self

    def __enter__(self) -> Callable[[int], None] | None:
        return self.seed

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        try:
            if kind is None or issubclass(kind, Exception):
                self.check(ends=True)
        finally:
            self._watches = False

    def _start(self) -> None:
        """Set this series' start states, which have no cached normal draw. In a thread, only read the states."""
        if self._watches and self._in_thread:
            self._before: Any = _all_states()
        elif self._watches:
            starts, self._before = next(_start_states(os.getpid(), imported("torch") is not None, _bit_generator()))
            for start in starts:
                start()

    def check(self, *, ends: bool = False) -> None:
        """Raise `DrawFound` if the calls of this series drew from an unseeded generator.

        `ends` is whether the series has no more calls.
        """
        if self._watches:
            if _all_states() != self._before:
                self.seed_from_now()
            if ends:
                self._watches, self._tries = False, 0
            else:
                self._start()

    def seed_from_now(self) -> None:
        """Seed all later calls.

        Raise `DrawFound` if the series is watched, because its calls have drawn.
        """
        if self._watches:
            self._watches, self._may_watch = False, self._in_thread
            self._tries += 1
            if self._in_thread and self._tries > _MAX_TRIES:
                raise EncodeError(
                    f"{self._name} draws from global random generators, which worker threads cannot seed. Use only "
                    "`rng`, or start_method='fork', or global_rng=False if only the trainer draws."
                )
            raise DrawFound

    def wants_second_run(self) -> bool:
        """Return whether to run the call again from other start states, to compare."""
        return self._watches and self._remaining_second_runs > 0

    def start_second_run(self) -> None:
        """Set start states for a second run. Raises `DrawFound` if the first one drew."""
        self.check()
        if self._watches:
            self._remaining_second_runs -= 1

    def call_alone(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function as a series of its own, and return its result.

        The function must itself call `seed` before it draws.
        """
        while True:
            with contextlib.suppress(DrawFound), self.series(1):
                return call(*arguments)


@lru_cache(maxsize=2)
def _start_states(process: int, has_torch: bool, generator: Any) -> Iterator[tuple[list[partial[object]], Any]]:
    """Return an endless iterator over start states of this process: functions that set one, and its `_all_states`.

    `generator` is NumPy's present bit generator. Setting a prepared state is faster than seeding.
    """
    states, seed = [], seeder(KINDS if has_torch else KINDS[:2])
    assert seed is not None
    for number in range(_START_STATES):
        seed(derive_key("watch", process, time.time_ns(), number))
        states.append(([partial(write, read()) for read, write in _accesses()], _all_states()))
    return cycle(states)


def _accesses(chosen: Collection[str] = KINDS) -> list[_Access]:
    """Return how to read and set the states of these generators, as far as they are imported."""
    found = [_python_access()] if "python" in chosen else []
    if "numpy" in chosen:
        found.append(_numpy_access(_bit_generator()))
    if "torch" in chosen and (torch := imported("torch")):
        found.append((torch.default_generator.get_state, torch.default_generator.set_state))
    return found


def _all_states() -> list[Any]:
    """Return the whole states of the imported generators, to be compared with earlier ones."""
    states = [read() for read, _ in _accesses()]
    if len(states) == len(KINDS):  # torch's as bytes; `numpy` would take 2 µs longer
        states[-1] = ctypes.string_at(states[-1].data_ptr(), states[-1].nbytes)
    return states


@cache
def _python_access() -> _Access:
    """Return how to read and set Python's state with its cached normal.

    In memory this takes less than 1 µs. `getstate` and `setstate`, for versions that store it in another form, would
    take 30 µs.
    """
    generator: Any = attrgetter("__self__")(random.getstate)
    words = (ctypes.c_char * _TWISTER_BYTES).from_address(id(generator) + object.__basicsize__)
    *numbers, position = random.getstate()[1]
    has_room = random.Random.__basicsize__ >= object.__basicsize__ + _TWISTER_BYTES
    if not has_room or words.raw != struct.pack("=i624I", position, *numbers):
        return random.getstate, random.setstate

    def write(state: Any) -> None:
        words.raw, generator.gauss_next = state

    return lambda: (words.raw, generator.gauss_next), write


@cache
def _numpy_access(generator: Any) -> _Access:
    """Return how to read and set NumPy's state with its cached normal, for its bit generator.

    In memory this takes less than 1 µs. `get_state` and `set_state`, for generators other than the Mersenne Twister,
    would take 45 µs.
    """
    owner, at = attrgetter("mtrand._rand")(np.random), -1
    memory = (ctypes.c_char * type(owner).__basicsize__).from_address(id(owner))
    if type(generator) is np.random.MT19937:  # find the cached normal by its value
        state = np.random.get_state(legacy=False)
        np.random.set_state({**state, "has_gauss": 1, "gauss": np.pi})
        at = memory.raw.find(struct.pack("=qd", 1, np.pi))
        np.random.set_state(state)
    if at < 0:
        return lambda: pickle.dumps(np.random.get_state(False)), lambda raw: np.random.set_state(pickle.loads(raw))
    words = (ctypes.c_char * _TWISTER_BYTES).from_address(generator.ctypes.state_address)
    normal = (ctypes.c_char * 16).from_address(id(owner) + at)

    def write(state: Any) -> None:
        words.raw, normal.raw = state

    return lambda: (words.raw, normal.raw), write


@contextlib.contextmanager
def as_in_a_worker(seeded: Collection[str]) -> Iterator[None]:
    """Run the block as a worker would, then restore the generators in `seeded`.

    Within this context torch has one thread, because the bits of some sums depend on the number of threads.
    """
    torch = imported("torch")
    restores: list[Callable[[], object]] = [partial(write, read()) for read, write in _accesses(seeded)]
    if "numpy" in seeded and not isinstance(generator := _bit_generator(), np.random.MT19937):
        restores.insert(0, partial(np.random.set_bit_generator, generator))  # type: ignore[attr-defined]
        np.random.set_bit_generator(_TWISTER)  # type: ignore[attr-defined]
    if torch and (threads := torch.get_num_threads()) != 1:
        torch.set_num_threads(1)
        restores.append(partial(torch.set_num_threads, threads))
    try:
        yield
    finally:
        for restore in restores:
            restore()
        if not torch and (torch := imported("torch")):
            torch.default_generator.seed()  # as after an import, because there is no state to restore
