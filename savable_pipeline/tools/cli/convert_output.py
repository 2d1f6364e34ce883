"""What `savable convert` prints at its end."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.tools.cli.console import print_counts, print_warnings, printable
from savable_pipeline.tools.convert import Report

_SHOWN = 10  # rejects printed one by one; the file has all


def print_report(console: Console, report: Report, path: str) -> None:
    """How much was written, what was rejected, and why; `path` is the file with all rejects."""
    if report.already:
        console.print("all is there already, nothing was written:")
    console.print(
        f"{counted(report.samples, 'sample')} in {counted(report.shards, 'shard')}, {human_bytes(report.size)}"
    )
    if report.hidden:
        console.print(f"{counted(report.hidden, 'hidden file or folder', 'hidden files or folders')} skipped")
    print_warnings(console, report.warnings)
    print_counts(console, "null, and so no part", report.nulls)
    if not report.rejected:
        console.print("no sample rejected" if report.nulls else "nothing rejected")
        return
    console.print(f"{len(report.rejected):,} rejected and left out:")
    for reason, count in Counter(reject.reason for reject in report.rejected).most_common():
        console.print(f"  {count:>7,} × {printable(reason)}")
    for reject in report.rejected[:_SHOWN]:
        detail = f" ({reject.detail})" if reject.detail else ""
        console.print(printable(f"  {reject.file}: {reject.reason}{detail}"))
    if len(report.rejected) > _SHOWN:
        console.print(f"  … {len(report.rejected) - _SHOWN:,} more")
    console.print(printable(f"all of them: {path}"))
