"""Hostile inputs by the thousand: states, indexes, tars and YAML with one or two things changed, checksums made right.

Each is read to its end, or refused by an error that says where: any other error, and a minute of work for a few
kilobytes, is a fault. The seed is fixed, so that a number names the same input for ever.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from fuzz_files import indexes, tars, write_tar, yaml_files
from fuzz_states import states
from report import Row

import savable_pipeline as sp

_SLOW_S = 20  # for one input; a busy machine needs less than one
_SHARD_SIZES = (20, 7, 30)


def fuzz(folder: Path, count: int, *, seed: int = 0) -> Iterator[Row]:
    """One row for each kind of input, of which `count` are tried."""
    _write_shards(folder / "shards")
    for kind, tried in (("state", states), ("index", indexes), ("tar", tars), ("YAML", yaml_files)):
        draw = random.Random(f"{kind} {seed}")
        wrong, refused, began = "", 0, time.perf_counter()
        for number, attempt in enumerate(tried(folder, draw, count)):
            fault, was_refused = _outcome(attempt)
            refused += was_refused
            if fault:
                wrong = wrong or f"input {number}: {fault}"
        seconds = time.perf_counter() - began
        yield Row("fuzz", kind, f"{count} inputs", f"{refused} refused, {seconds:.0f} s", wrong)


def _outcome(attempt: Callable[[], None]) -> tuple[str, bool]:
    """What is wrong with the end of an attempt, empty if nothing is; and whether the input was refused."""
    before = signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(_SLOW_S)
    try:
        attempt()
    except Exception as error:
        if isinstance(error, sp.SavableError) or type(error) is ValueError:
            return "" if str(error) else f"a {type(error).__name__} without a word", True
        if isinstance(error, OSError) and error.filename:  # a name too long for the disk, say
            return "", True
        return f"{type(error).__name__}: {str(error)[:200]}", False
    except _TooSlowError as error:
        return str(error), False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return "", False


class _TooSlowError(BaseException):
    """No Exception: a pipeline that skips errors would skip it."""


def _too_slow(signal_number: int, frame: FrameType | None) -> None:
    location = "" if frame is None else f", now in {frame.f_code.co_filename}, line {frame.f_lineno}"
    raise _TooSlowError(f"more than {_SLOW_S} s for one input{location}")


def _write_shards(folder: Path) -> None:
    first = 0
    for number, size in enumerate(_SHARD_SIZES):
        samples = range(first, first + size)
        write_tar(folder / f"{number}.tar", [(f"s{i}.json", json.dumps({"id": i}).encode()) for i in samples])
        first += size
