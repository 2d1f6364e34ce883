"""Global generators of Python, NumPy and torch: seeded for users, restored after.

A *row* is a number of calls of a user's function, one after the other. With `global_rng=None`, a row is watched for
draws from these generators. That costs 10 µs per row in a hot loop, and as much again where the trainer's states must
be restored. Seeding would cost 7 µs per call. A watched row has three phases:

    start    the generators get states of this process and row, which no function can restore by chance
    calls    nothing is seeded
    end      if a state has changed, the row is repeated with seeds, and all later calls are seeded
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from operator import attrgetter
from typing import Any, Self

import numpy as np

from savable_pipeline.core.keyed_random import derive_key
from savable_pipeline.core.named_object import imported
from savable_pipeline.errors import EncodeError

KINDS = ("python", "numpy", "torch")
_SHORTEST_ROW = 16  # calls; shorter rows are seeded, which is cheaper than watching
_SECOND_RUNS = 8  # calls of watched rows that are repeated from a second state, for each function and process
_MAX_TRIES = 8  # of a row in a thread, if the generators' states change each time
_BITS = 128  # bits of output to compare; two different states agree in them with a probability of 2**-128
_bit_generator = attrgetter("mtrand._rand._bit_generator")  # NumPy 1.24 has `get_bit_generator` for it
_python: Any = attrgetter("__self__")(random.getstate)
_START_STATES = 4  # how many states rows start from, in turn
_TWISTER_BYTES = 624 * 4 + 4  # size of the words and position of a Mersenne Twister


def kinds(setting: bool | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the generators that a setting seeds.

    Raises ValueError for an invalid setting.
    """
    if setting is None or isinstance(setting, bool):
        return () if setting is False else KINDS
    if isinstance(setting, str) or not set(setting) <= set(KINDS):
        raise ValueError(f"global_rng={setting!r}: expected None, True, False or a tuple of some of {KINDS}")
    return tuple(setting)


def seeder(setting: bool | tuple[str, ...] | None) -> Callable[[int], None] | None:
    """Return a function that seeds these generators with a 64-bit key, or None."""
    if not (chosen := kinds(setting)):
        return None
    seeds: list[Callable[[int], object]] = [random.seed] if "python" in chosen else []
    if "numpy" in chosen:
        seeds.append(lambda key: np.random.seed(key & 0xFFFFFFFF))
    if "torch" in chosen:
        import torch

        seeds.append(torch.default_generator.manual_seed)

    def seed(key: int) -> None:
        for each in seeds:
            each(key)

    return seed


class DrawFound(BaseException):
    """Interrupts a row of calls that drew unseeded. The row is repeated with seeds."""


class Seeding:
    """Seeding of the global generators for one function in one process.

    With the setting None, calls are seeded from the first row on in which the function draws, and in rows of less than
    16 calls. Threads cannot seed the generators. They repeat such a row, since another thread may have drawn, and raise
    `EncodeError` after eight tries.

    Args:
        name: Names the function in errors.
        setting: `TaskEncoder.global_rng`.
        in_thread: Whether several threads call it.

    Attributes:
        seed: Seeds the generators for the next call of the row, or None if calls are not seeded.
    """

    def __init__(self, name: str, setting: bool | tuple[str, ...] | None, *, in_thread: bool) -> None:
        self._name, self._in_thread = name, in_thread
        self._seeder = cache(lambda: seeder(setting))  # only a seeded call imports torch
        self.seed: Callable[[int], None] | None = None
        self._may_watch, self._watches, self._rows, self._tries = setting is None, False, 0, 0
        self._second_runs = 0 if in_thread else _SECOND_RUNS

    def row(self, calls: int) -> Self:
        """Return the context of a row of `calls` calls, which yields `seed`.

        It raises `DrawFound` after the calls, or after an error, if they drew unseeded.
        """
        self._watches = self._may_watch and (calls >= _SHORTEST_ROW or self._in_thread)
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
        """Set this row's start states, which have no cached normal draw. In a thread, only read the states."""
        if self._watches and self._in_thread:
            self._before: Any = _all_states()
        elif self._watches:
            self._rows += 1
            starts, self._before = _start_states(os.getpid(), imported("torch") is not None)[self._rows % _START_STATES]
            for start in starts:
                start()

    def check(self, *, ends: bool = False) -> None:
        """Raise `DrawFound` if the calls of this row drew from an unseeded generator.

        `ends` is whether the row has no more calls.
        """
        if self._watches:
            if (_all_states() if self._in_thread else _outputs()) != self._before:
                self.seed_from_now()
            if ends:
                self._watches, self._tries = False, 0
            else:
                self._start()

    def seed_from_now(self) -> None:
        """Raise `DrawFound` if the row is watched, as its results depend on its states."""
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
        """Return whether to repeat a call from another state, to compare the results."""
        return self._watches and self._second_runs > 0

    def start_second_run(self) -> None:
        """Change all states. Raises `DrawFound` if the first run of the call drew."""
        self.check()
        if self._watches:
            self._second_runs -= 1

    def call_alone(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function as a row of its own, and return its result.

        The function itself calls `seed`.
        """
        while True:
            with contextlib.suppress(DrawFound), self.row(1):
                return call(*arguments)


@lru_cache(maxsize=2)
def _start_states(process: int, has_torch: bool) -> list[tuple[list[partial[Any]], Any]]:
    """Return the start states of this process: functions that set them, and the `_outputs` afterwards.

    Setting a prepared state is faster than seeding.
    """
    states, torch = [], imported("torch") if has_torch else None
    for key in [derive_key("watch", process, time.time_ns(), number) for number in range(_START_STATES)]:
        starts = [partial(random.setstate, random.Random(key).getstate()), partial(np.random.seed, key & 0xFFFFFFFF)]
        if torch:
            starts.append(partial(torch.default_generator.set_state, torch.Generator().manual_seed(key).get_state()))
        for start in starts:
            start()
        states.append((starts, _outputs()))
    return states


def _outputs() -> tuple[int, bytes, bytes]:
    """Return values that identify the three states. Reading the whole of Python's state would take 8 µs."""
    return random.getrandbits(_BITS), _numpy_bytes(), _torch_bytes()


def _all_states() -> tuple[Any, bytes, bytes]:
    return random.getstate(), pickle.dumps(np.random.get_state()), _torch_bytes()


@cache
def _python_words() -> Any:
    """Return Python's state in memory, or None if this version stores it in another form."""
    words = (ctypes.c_char * _TWISTER_BYTES).from_address(id(_python) + object.__basicsize__)
    *numbers, position = random.getstate()[1]
    has_room = random.Random.__basicsize__ >= object.__basicsize__ + _TWISTER_BYTES
    return words if has_room and words.raw == struct.pack("=i624I", position, *numbers) else None


def _python_restorers() -> list[Callable[[], object]]:
    """Return functions that restore Python's state. `getstate` and `setstate` would take 30 µs."""
    if (words := _python_words()) is None:
        return [partial(random.setstate, random.getstate())]
    return [partial(setattr, words, "raw", words.raw), partial(setattr, _python, "gauss_next", _python.gauss_next)]


def _numpy_bytes() -> bytes:
    """Return NumPy's state, or b"" if it is not a Mersenne Twister. `get_state` would take 45 µs."""
    generator = _bit_generator(np.random)
    is_twister = type(generator) is np.random.MT19937
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES) if is_twister else b""


def _torch_bytes() -> bytes:
    """Return the state of torch's generator, or b"" if torch is not imported."""
    state = torch.default_generator.get_state() if (torch := imported("torch")) else None
    return b"" if state is None else ctypes.string_at(state.data_ptr(), state.nbytes)  # `numpy` would take 2 µs longer


def _numpy_restorer() -> Callable[[], object]:
    """Return a function that restores NumPy's state. `get_state` and `set_state` would take 45 µs."""
    words, address = _numpy_bytes(), _bit_generator(np.random).ctypes.state_address
    normal = np.random.standard_normal() if words else 0.0
    if words != _numpy_bytes():  # the normal draw changed the words, so there was no cached one
        return lambda: (np.random.seed(0), ctypes.memmove(address, words, len(words)))
    cached = {"has_gauss": 1, "gauss": normal} if words else {}
    return partial(np.random.set_state, {**np.random.get_state(legacy=False), **cached})


@contextlib.contextmanager
def as_in_a_worker(seeded: set[str]) -> Iterator[None]:
    """Run the block as in a worker, then restore the generators in `seeded`.

    Within this context torch has one thread, because the bits of some sums depend on the number of threads.
    """
    torch = imported("torch")
    restores = _python_restorers() if "python" in seeded else []
    if "numpy" in seeded:
        restores.append(_numpy_restorer())
    if torch and "torch" in seeded:
        restores.append(partial(torch.default_generator.set_state, torch.default_generator.get_state()))
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
