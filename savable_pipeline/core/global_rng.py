"""Seeds the global generators of Python, NumPy and torch for one call, and restores the trainer's own afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np

from savable_pipeline.core.named_object import imported

KINDS = ("python", "numpy", "torch")


def kinds(setting: bool | tuple[str, ...]) -> tuple[str, ...]:
    """The generators to seed by a setting of `TaskEncoder.global_rng`. Raises ValueError for a wrong setting."""
    if isinstance(setting, bool):
        return KINDS if setting else ()
    unknown = [name for name in setting if name not in KINDS]
    if unknown or isinstance(setting, str):
        raise ValueError(f"global_rng={setting!r}: expected True, False or a tuple of some of {KINDS}")
    return tuple(setting)


def seeder(setting: bool | tuple[str, ...]) -> Callable[[int], None] | None:
    """A function that seeds the generators in `setting` with a 64-bit key; None if there are none."""
    named = kinds(setting)
    if not named:
        return None
    python, numpy, torch_ = (kind in named for kind in KINDS)
    seed_python, seed_numpy, seed_torch = random.seed, np.random.seed, _seed_torch() if torch_ else None

    def seed(key: int) -> None:
        if python:
            seed_python(key)
        if numpy:
            seed_numpy(key & 0xFFFFFFFF)
        if seed_torch is not None:
            seed_torch(key)

    return seed


def _seed_torch() -> Callable[[int], object]:
    import torch

    return torch.default_generator.manual_seed


@contextlib.contextmanager
def as_in_a_worker(seeded: set[str]) -> Iterator[None]:
    """Within this context torch has one thread, as in a worker, since the bits of some sums depend on the number.

    Afterwards, restores torch's number of threads and the trainer's global generators named in `seeded`.
    """
    torch = imported("torch")  # if nothing has imported torch, it has no state to restore
    threads = torch.get_num_threads() if torch else 1
    python = random.getstate() if "python" in seeded else None
    numpy = np.random.get_state() if "numpy" in seeded else None
    torch_ = torch.default_generator.get_state() if torch and "torch" in seeded else None
    if torch and threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if python is not None:
            random.setstate(python)
        if numpy is not None:
            np.random.set_state(numpy)
        if torch and torch_ is not None:
            torch.default_generator.set_state(torch_)
        if torch and threads != 1:
            torch.set_num_threads(threads)
