"""What a soak run found, as rows of a table; and looks at processes from outside, through /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One case: what was done to it, how much was compared, and what differs; empty if nothing does."""

    proof: str
    case: str
    done: str
    compared: str
    wrong: str = ""


def make_table(rows: Sequence[Row]) -> Table:
    """The rows, with a verdict on each."""
    table = Table("proof", "case", "done", "compared", "result", title="soak")
    for row in rows:
        verdict = f"[bold red]{row.wrong}[/]" if row.wrong else "[green]equal[/]"
        table.add_row(row.proof, row.case, row.done, row.compared, verdict)
    return table


def difference(expected: Sequence[object], found: Sequence[object]) -> str:
    """Where two streams differ first; empty if they do not."""
    for index, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            return f"differs at {index} of {len(expected)}"
    return "" if len(expected) == len(found) else f"{len(found)} instead of {len(expected)}"


def children(pid: int) -> list[int]:
    """The living children of a process, without the helper that Python's spawned processes share."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        born = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in born if _lives(child)]
    return []


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
        return state != "Z" and b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(pid: int, parent: int) -> bool:
    """Send SIGKILL to a process, if it is still a living child of `parent`; whether it was sent."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if pid not in children(parent):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
