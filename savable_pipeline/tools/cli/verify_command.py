"""`savable verify-resume`, and its verdict in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from savable_pipeline.tools.cli.console import TargetArgument, err, errors_as_lines, out, printable, progress_of

if TYPE_CHECKING:  # a command imports what it needs when it is called
    from savable_pipeline.tools.verify.comparison import Mismatch, Verdict, VerifyPlan
    from savable_pipeline.tools.verify.leg import Explained

_SHOWN = 8  # samples named


def verify_resume(
    target: TargetArgument,
    steps: Annotated[int | None, typer.Option(help="Batches to compare. Default: two of each lane.")] = None,
    cut: Annotated[list[int] | None, typer.Option(help="Cut after this many batches; repeatable.")] = None,
    random_cuts: Annotated[int, typer.Option(help="More cuts, at random steps.")] = 3,
    draw: Annotated[int, typer.Option(help="The seed of the random steps.")] = 0,
    workers: Annotated[
        list[int] | None, typer.Option(help="num_workers of each leg, in turn; repeatable. Default: 2, then 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed, for a pipeline function. Default: 0.")] = None,
    lanes: Annotated[
        int | None, typer.Option(help="The number of lanes, for a pipeline function. Default: 12.")
    ] = None,
    pictures: Annotated[Path, typer.Option(help="The folder for a picture of two images that differ.")] = Path(),
) -> None:
    """Run your loader whole, and again cut and resumed, and compare every byte of every batch.

    TARGET is imported, so its code runs. A leg is the run between two cuts: a new interpreter with another
    PYTHONHASHSEED and another number of workers, which continues from a state that torch.save wrote and torch.load
    read. The first difference is shown with its slot, sample, field and both values; the exit code is then 1.
    """
    from savable_pipeline.tools.verify.comparison import VerifyPlan, verify

    with errors_as_lines():
        if not pictures.is_dir():
            raise ValueError(f"{pictures}: there is no folder {pictures} for pictures; make it, or name another")
        plan = VerifyPlan(
            target,
            steps=steps,
            cuts=tuple(cut or ()),
            random_cuts=random_cuts,
            draw=draw,
            workers=tuple(workers or (2, 0)),
            seed=seed,
            lanes=lanes,
            pictures=pictures,
        )
        with progress_of(err, f"importing {target}", "batches", "comparing") as progress:
            verdict = verify(plan, progress)
        _print_verdict(plan, verdict)
    if verdict.mismatch:
        raise typer.Exit(1)


def _print_verdict(plan: VerifyPlan, verdict: Verdict) -> None:
    """Print the first difference; without one, what was compared."""
    if verdict.mismatch is not None:
        _print_mismatch(verdict, verdict.mismatch)
        return
    legs = verdict.legs
    cuts = _listed([str(leg.start) for leg in legs[1:]])
    workers = _listed([str(leg.workers) for leg in legs])
    out.print(
        printable(
            f"equal: {plan.target} gave {_batches(verdict)} with num_workers={verdict.begun.workers}, and the same in "
            f"every byte when it was cut and resumed after step {cuts}: {len(legs)} legs with num_workers {workers}, "
            "each in a fresh interpreter with another PYTHONHASHSEED"
        )
    )
    if verdict.steps < 2 * verdict.begun.own_lanes:
        out.print(
            f"that is less than two batches of each of the {verdict.begun.own_lanes} lanes: what a lane keeps from one "
            f"batch to the next may not have shown; --steps {2 * verdict.begun.own_lanes} or more shows it"
        )


def _print_mismatch(verdict: Verdict, mismatch: Mismatch) -> None:
    leg = mismatch.leg
    since = f"resumed after step {leg.start}" if leg.start else "not cut yet"
    ran = f"leg {leg.number} (num_workers={leg.workers}, PYTHONHASHSEED={leg.hash_seed}, {since})"
    lines = _difference_lines(verdict, mismatch.where) if mismatch.where else {"error": mismatch.error}
    place = (
        f"slot {mismatch.where.slot} of lane {mismatch.where.lane}" if mismatch.where else f"step {mismatch.step + 1}"
    )
    out.print(f"[bold red]different:[/] {place}, in {printable(ran)}")
    for name, value in lines.items():
        out.print(f"  {name:<9} " + "\n".join(map(printable, value.splitlines())))
    out.print(f"  {_hint(mismatch)}")
    out.print(
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
