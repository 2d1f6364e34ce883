"""Results of stress tests as a table, and functions that inspect and kill processes through /proc."""

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
    """Result of one case.

    Args:
        proof: The name of the stress test.
        case: The setting that varied.
        done: The number of kills, inputs or other repetitions.
        compared: How much was compared.
        problem: What differs; "" if nothing does.
    """

    proof: str
    case: str
    done: str
    compared: str
    problem: str = ""


def make_table(rows: Sequence[Row]) -> Table:
    """Format rows as a table, with a verdict on each."""
    table = Table("proof", "case", "done", "compared", "result", title="soak")
    for row in rows:
        verdict = f"[bold red]{row.problem}[/]" if row.problem else "[green]equal[/]"
        table.add_row(row.proof, row.case, row.done, row.compared, verdict)
    return table


def difference(expected: Sequence[object], found: Sequence[object]) -> str:
    """Describe the first difference between two sequences; "" if they are equal."""
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"differs at {index} of {len(expected)}"
    return "" if len(expected) == len(found) else f"{len(found)} instead of {len(expected)}"


def children(pid: int) -> list[int]:
    """Return the running children of a process, without Python's resource tracker."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        started = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in started if _is_running(child)]
    return []


def descendants(pid: int) -> list[int]:
    """Return all running descendants of a process."""
    return [process for child in children(pid) for process in (child, *descendants(child))]


def _is_running(pid: int) -> bool:
    """Return whether a process is neither a zombie nor Python's resource tracker."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
        return state != "Z" and b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(pid: int, parent: int) -> bool:
    """Kill a process if it is still a running child of `parent`. Return whether it was killed."""
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
