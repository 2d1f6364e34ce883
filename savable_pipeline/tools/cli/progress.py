"""How far a command is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.console import Console

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.tools.cli.console import printable, visible

Progress: TypeAlias = Callable[..., None]  # of the things done, of all, and of the bytes done if they are known
_LINE_EVERY_S = 10.0


@contextlib.contextmanager
def progress_of(console: Console, before: str, things: str, during: str = "") -> Iterator[Progress]:
    """A function that is told how many things are done, of how many, and their bytes: a bar, or lines.

    `before` is printed at once; `during` (by default the same) as soon as the number of things is known.
    """
    during = during or before
    if not console.is_terminal:
        console.print(printable(before))
        yield _Lines(console, f"{during}: {{:,}} of {{:,}} {things}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    rate = TextColumn("{task.fields[rate]}", markup=False)
    with Progress(*columns, rate, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(visible(before), total=None, rate="")
        speed = _Rate()

        def update(done: int, total: int, size: int = 0) -> None:
            bar.update(task, description=visible(during), completed=done, total=total, rate=speed.text(done, size))

        yield update


class _Rate:
    """Things and bytes a second, since the first call."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._before = 0

    def text(self, done: int, size: int) -> str:
        """`1,204/s, 45.1 MB, 9.3 MB/s`; without the bytes where they are not known."""
        now = time.monotonic()
        if not self._begin:
            self._begin, self._before = now, done
            return ""
        seconds = max(now - self._begin, 1e-9)
        things = f"{(done - self._before) / seconds:,.0f}/s"
        return f"{things}, {human_bytes(size)}, {human_bytes(size / seconds)}/s" if size else things


class _Lines:
    """Progress in plain lines: the first, the last, and one every ten seconds between."""

    def __init__(self, console: Console, line: str) -> None:
        self._console = console
        self._line = line
        self._rate = _Rate()
        self._next = 0.0

    def __call__(self, done: int, total: int, size: int = 0) -> None:
        rate = self._rate.text(done, size)
        now = time.monotonic()
        if now >= self._next or done == total:
            shown = f" ({rate})" if rate and done < total else ""
            self._console.print(self._line.format(done, total) + shown)
            self._next = now + _LINE_EVERY_S
