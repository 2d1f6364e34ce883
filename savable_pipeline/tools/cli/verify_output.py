"""The verdict of `savable verify-resume`, in words."""

from __future__ import annotations

from rich.console import Console

from savable_pipeline.tools.cli.console import printable
from savable_pipeline.tools.verify.comparison import Mismatch, Plan, Verdict
from savable_pipeline.tools.verify.leg import Explained

_SHOWN = 8  # samples named


def print_verdict(console: Console, plan: Plan, verdict: Verdict) -> None:
    """Print the first difference; without one, what was compared."""
    if verdict.mismatch is not None:
        _print_mismatch(console, verdict, verdict.mismatch)
        return
    legs = verdict.legs
    cuts = _listed([str(leg.start) for leg in legs[1:]])
    workers = _listed([str(leg.workers) for leg in legs])
    console.print(
        printable(
            f"equal: {plan.target} gave {_batches(verdict)} with num_workers={verdict.begun.workers}, and the same in "
            f"every byte when it was cut and resumed after step {cuts}: {len(legs)} legs with num_workers {workers}, "
            "each in a fresh interpreter with another PYTHONHASHSEED"
        )
    )
    if verdict.steps < 2 * verdict.begun.own_lanes:
        console.print(
            f"that is less than two batches of each of the {verdict.begun.own_lanes} lanes: what a lane keeps from one "
            f"batch to the next may not have shown; --steps {2 * verdict.begun.own_lanes} or more shows it"
        )


def _print_mismatch(console: Console, verdict: Verdict, mismatch: Mismatch) -> None:
    leg = mismatch.leg
    since = f"resumed after step {leg.start}" if leg.start else "not cut yet"
    ran = f"leg {leg.number} (num_workers={leg.workers}, PYTHONHASHSEED={leg.hash_seed}, {since})"
    lines = _difference_lines(verdict, mismatch.where) if mismatch.where else {"error": mismatch.error}
    place = (
        f"slot {mismatch.where.slot} of lane {mismatch.where.lane}" if mismatch.where else f"step {mismatch.step + 1}"
    )
    console.print(f"[bold red]different:[/] {place}, in {printable(ran)}")
    for name, value in lines.items():
        console.print(f"  {name:<9} " + "\n".join(map(printable, value.splitlines())))
    console.print(f"  {_hint(mismatch)}")
    console.print(
        printable(
            f"before it {_batches(verdict)} of {verdict.steps} to compare are equal; the uninterrupted run had "
            f"num_workers={verdict.begun.workers} and PYTHONHASHSEED=1"
        )
    )


def _difference_lines(verdict: Verdict, where: Explained) -> dict[str, str]:
    rest = len(where.samples) - _SHOWN
    samples = "; ".join(where.samples[:_SHOWN]) + (f" and {rest} more of the batch" if rest > 0 else "")
    lines = {
        "field": where.field + (f" (of its rows {where.rows})" if where.rows else ""),
        "sample": samples or "not known: made again, the batch is of other samples",
        "encoder": ", ".join(verdict.begun.encoders),
        "expected": where.expected,
        "found": where.found,
        "picture": where.picture or "",
    }
    return {name: value for name, value in lines.items() if value}


def _hint(mismatch: Mismatch) -> str:
    if mismatch.leg.start:
        return (
            "It differs after a cut and not before: something outside the state is kept from one call to the next, or "
            "differs between processes."
        )
    return (
        "Nothing had been cut yet: look for a clock, an unseeded generator, the order of a set, or what one worker "
        "keeps from call to call."
    )


def _batches(verdict: Verdict) -> str:
    ends = f" and {verdict.ends} end{'s' * (verdict.ends > 1)} of an epoch" if verdict.ends else ""
    return f"{verdict.equal} batches{ends}"


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
