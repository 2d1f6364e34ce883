"""Read thousands of hostile states, indexes, tars and YAML files.

Each is a valid input with one to three changes and corrected checksums. It must be read completely, or be rejected by
an error of ours with a message. Other errors and slow reads are failures. The seed is fixed, so a number always means
the same input.
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

_SLOW_S = 20  # limit for one input; even a busy machine needs less than 1 s
_SHARD_SIZES = (20, 7, 30)


def fuzz(folder: Path, count: int, *, seed: int = 0) -> Iterator[Row]:
    """Try `count` inputs of each kind, and yield one row per kind."""
    _write_shards(folder / "shards")
    for kind, attempts in (("state", states), ("index", indexes), ("tar", tars), ("YAML", yaml_files)):
        rng = random.Random(f"{kind} {seed}")
        problem, rejected, start = "", 0, time.perf_counter()
        for number, attempt in enumerate(attempts(folder, rng, count)):
            failure, is_rejected = _outcome(attempt)
            rejected += is_rejected
            if failure:
                problem = problem or f"input {number}: {failure}"
        seconds = time.perf_counter() - start
        yield Row("fuzz", kind, f"{count} inputs", f"{rejected} rejected, {seconds:.0f} s", problem)


def _outcome(attempt: Callable[[], None]) -> tuple[str, bool]:
    """Run an attempt. Return a description of its failure, or "", and whether the input was rejected."""
    before = signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(_SLOW_S)
    try:
        attempt()
    except Exception as error:
        if isinstance(error, sp.SavableError) or type(error) is ValueError:
            return "" if str(error) else f"a {type(error).__name__} without a message", True
        if isinstance(error, OSError) and error.filename:  # such as a file name that is too long
            return "", True
        return f"{type(error).__name__}: {str(error)[:200]}", False
    except _TooSlowError as error:
        return str(error), False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return "", False


class _TooSlowError(BaseException):
    """Raised after _SLOW_S. It is no Exception, because pipelines with on_error="skip" would skip it."""


def _too_slow(signal_number: int, frame: FrameType | None) -> None:
    location = "" if frame is None else f", now in {frame.f_code.co_filename}, line {frame.f_lineno}"
    raise _TooSlowError(f"more than {_SLOW_S} s for one input{location}")


def _write_shards(folder: Path) -> None:
    first = 0
    for number, size in enumerate(_SHARD_SIZES):
        samples = range(first, first + size)
        write_tar(folder / f"{number}.tar", [(f"s{i}.json", json.dumps({"id": i}).encode()) for i in samples])
        first += size
