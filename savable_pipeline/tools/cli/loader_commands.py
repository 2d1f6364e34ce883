"""Commands on a loader: `savable plan`, `verify-resume`, `state` and `serve`."""

from __future__ import annotations

import json
import logging
import re
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from savable_pipeline.core.wording import counted, human_bytes
from savable_pipeline.tools.cli.console import (
    JsonOption,
    SeedOption,
    TargetArgument,
    err,
    errors_as_lines,
    escape_markup,
    input_option,
    out,
    output_option,
    parallel_option,
    progress_shown,
)

if TYPE_CHECKING:  # a command imports what it needs when it is called
    from savable_pipeline.run.state.summary import StateSummary
    from savable_pipeline.tools.plan.run_plan import RunPlan
    from savable_pipeline.tools.verify.comparison import Mismatch, Verdict, VerifyPlan
    from savable_pipeline.tools.verify.segment import Explained

_MOST_SAMPLES = 8  # samples of a batch that are listed


def plan(
    target: TargetArgument,
    seed: SeedOption = None,
    lanes: Annotated[int | None, input_option(help="Pipelines: the number of lanes. Default: by the data.")] = None,
    ranks: Annotated[int, parallel_option(help="Data-parallel ranks.")] = 1,
    nodes: Annotated[int, parallel_option(help="Machines for these ranks.")] = 1,
    batch_s: Annotated[float | None, parallel_option(help="Measured seconds to build a batch.")] = None,
    step_s: Annotated[float | None, parallel_option(help="Measured seconds of a training step.")] = None,
    node_workers: Annotated[int, parallel_option(help="Workers on a CPU node of savable serve.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Plan steps, lanes, memory and traffic of a run.

    The plan comes from the index and the settings. TARGET is imported, so its code runs, but no sample is encoded.
    --batch-s is work_s / batches of loader.stats(); give it with --step-s to plan the number of workers.
    """
    from savable_pipeline.tools.plan.run_plan import WorkersNeeded, plan_run
    from savable_pipeline.tools.verify.target import load_target

    with errors_as_lines():
        workers = None
        if batch_s is not None or step_s is not None:
            workers = WorkersNeeded.of(batch_s or 0.0, step_s or 0.0, ranks=ranks, workers_per_node=node_workers)
        settings = load_target(target, seed=seed, lanes=lanes, default_lanes=None)
        _print_plan(plan_run(settings, ranks=ranks, nodes=nodes, target=target, workers=workers), as_json=as_json)


def _print_plan(plan: RunPlan, *, as_json: bool) -> None:
    """Print whether the run can start, the numbers of the plan, and advice."""
    from savable_pipeline.tools.plan.report import advice, lanes_rows, sections, verdict

    if as_json:
        out.print(
            json.dumps({**asdict(plan), "verdict": verdict(plan), "advice": advice(plan)}, indent=2), markup=False
        )
        return
    out.print(escape_markup(verdict(plan)))
    facts = Table("", "", "known from", box=None)
    for section in sections(plan):
        facts.add_row(f"[bold]{section.title}[/]")
        for name, *rest in section.facts:
            facts.add_row(escape_markup(f"  {name}"), *map(escape_markup, rest))
    out.print(facts)
    column_names, *rows = lanes_rows(plan)
    lanes_table = Table(*column_names, box=None)
    for row in rows:
        lanes_table.add_row(*map(escape_markup, row))
    out.print(lanes_table)
    for tip in advice(plan):
        out.print(escape_markup(f"tip: {tip}"))


def verify_resume(
    target: TargetArgument,
    seed: SeedOption = None,
    lanes: Annotated[int | None, input_option(help="Pipelines: the number of lanes. Default: 12.")] = None,
    steps: Annotated[int | None, input_option(help="Batches. Default: two of each lane.")] = None,
    cut: Annotated[list[int] | None, input_option(help="Interrupt after this batch (repeatable).")] = None,
    random_cuts: Annotated[int, input_option(help="Further interruptions.")] = 3,
    draw: Annotated[int, input_option(help="The seed of these interruptions.")] = 0,
    workers: Annotated[
        list[int] | None, parallel_option(help="num_workers of a segment (repeatable). Default: 2, 0.")
    ] = None,
    pictures: Annotated[Path, output_option(help="The folder for images that differ.")] = Path(),
) -> None:
    """Check that your loader resumes exactly.

    The loader runs once uninterrupted, and once interrupted and resumed, and every byte of every batch is compared.
    After each interruption a new Python process continues from the saved state, with another PYTHONHASHSEED and
    another number of workers. TARGET is imported, so its code runs. The exit code is 1 if a batch differs.
    """
    from savable_pipeline.tools.verify.comparison import VerifyPlan, verify

    with errors_as_lines():
        if not pictures.is_dir():
            raise ValueError(f"{pictures}: there is no folder {pictures} for images. Create it, or pass another")
        plan = VerifyPlan(
            target,
            steps=steps,
            cuts=tuple(cut or ()),
            random_cuts=random_cuts,
            cut_seed=draw,
            workers=tuple(workers or (2, 0)),
            seed=seed,
            lanes=lanes,
            pictures=pictures,
        )
        err.print(escape_markup(f"each segment of {target} starts a new Python process, which can take seconds"))
        with progress_shown(err, f"importing {target}", "batches", "comparing") as progress:
            verdict = verify(plan, progress)
        _print_verdict(plan, verdict)
    if verdict.mismatch:
        raise typer.Exit(1)


def _print_verdict(plan: VerifyPlan, verdict: Verdict) -> None:
    """Print the first difference, or if there is none, how much was compared."""
    if verdict.mismatch is not None:
        _print_mismatch(verdict, verdict.mismatch)
        return
    segments = verdict.segments
    cuts = _join_words([str(segment.start) for segment in segments[1:]])
    out.print(
        escape_markup(
            f"OK: {plan.target} resumes exactly. {_batches_text(verdict)} are equal in every byte, interrupted after "
            f"{cuts} of them."
        )
    )
    workers = _join_words([str(segment.workers) for segment in segments])
    out.print(
        f"  num_workers: {verdict.loader.workers} uninterrupted, {workers} in the {len(segments)} segments\n"
        "  Each segment was a new process with another PYTHONHASHSEED."
    )
    if verdict.steps < 2 * verdict.loader.own_lanes:
        out.print(
            f"  These are less than two batches of each of the {verdict.loader.own_lanes} lanes. Pass --steps "
            f"{2 * verdict.loader.own_lanes} to also compare what a lane keeps from one batch to the next."
        )


def _print_mismatch(verdict: Verdict, mismatch: Mismatch) -> None:
    """Print where a resumed run differs from the uninterrupted one, and how."""
    segment = mismatch.segment
    since = f"resumed after step {segment.start}" if segment.start else "not interrupted yet"
    text = f"segment {segment.number} (num_workers={segment.workers}, PYTHONHASHSEED={segment.hash_seed}, {since})"
    lines, where = {"error": mismatch.error}, f"step {mismatch.step + 1}"
    if explained := mismatch.explained:
        lines, where = _difference_lines(verdict, explained), f"slot {explained.slot} of lane {explained.lane}"
    out.print(f"[bold red]FAILED:[/] another batch at {where}, in {escape_markup(text)}")
    for name, value in lines.items():
        out.print(f"  {name:<9} " + "\n".join(map(escape_markup, value.splitlines())))
    out.print(f"  {_hint(mismatch)}")
    out.print(
        escape_markup(
            f"  {_batches_text(verdict)} of {verdict.steps} before it are equal. The uninterrupted run had "
            f"num_workers={verdict.loader.workers} and PYTHONHASHSEED=1."
        )
    )


def _difference_lines(verdict: Verdict, explained: Explained) -> dict[str, str]:
    """Return the lines that describe a difference, by title, without empty ones."""
    more = len(explained.samples) - _MOST_SAMPLES
    samples = "; ".join(explained.samples[:_MOST_SAMPLES]) + (f" and {more} more of the batch" if more > 0 else "")
    lines = {
        "field": explained.field + (f" (of its rows {explained.rows})" if explained.rows else ""),
        "sample": samples or "not known: the rebuilt batch has other samples",
        "encoder": ", ".join(verdict.loader.encoders),
        "expected": explained.expected,
        "found": explained.found,
        "picture": explained.picture or "",
    }
    return {name: value for name, value in lines.items() if value}


def _hint(mismatch: Mismatch) -> str:
    """Return advice where to look for the cause of a difference."""
    if mismatch.segment.start:
        return (
            "It differs only after an interruption: something outside the state lives from one call to the next, or "
            "differs between processes."
        )
    return (
        "Nothing was interrupted yet: look for a clock, an unseeded generator, the order of a set, or state that a "
        "worker keeps from call to call."
    )


def _batches_text(verdict: Verdict) -> str:
    """Format the numbers of equal batches, and of ends of epochs among them."""
    epoch_ends = f" and {counted(verdict.epoch_ends, 'end')} of an epoch" if verdict.epoch_ends else ""
    return f"{verdict.equal_batches} batches{epoch_ends}"


def _join_words(words: list[str]) -> str:
    """Join words by commas, and the last one by "and"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def state(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A state, or a checkpoint that contains one.")],
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="A second state to compare with.")] = None,
) -> None:
    """Show a saved state, or how two states differ.

    With two files, the exit code is 1 if the states differ.
    """
    from savable_pipeline.run.state.summary import differences, read_checkpoint, summarize

    with errors_as_lines():
        summary = summarize(read_checkpoint(file))
        if other is None:
            _print_state(summary)
            return
        second = summarize(read_checkpoint(other))
        found = differences(summary, second)
    _print_differences(summary, second, found)
    if found:
        raise typer.Exit(1)


def _print_state(state: StateSummary) -> None:
    """Print the position of a saved run, its settings, and the lanes that have started."""
    started = {lane: fields for lane, fields in state.lanes.items() if fields}
    epochs = {value for fields in started.values() for name, value in fields.items() if name.endswith("Reader.epoch")}
    # endless readers count epochs of their own, which may differ
    epoch = "" if epochs - {state.numbers["epoch"]} else f" of epoch {state.numbers['epoch']}"
    out.print(
        f"slot {state.numbers['slot']:,}{epoch}; {len(state.lanes)} of "
        f"{state.numbers['lanes']} lanes, {len(started)} have started; {human_bytes(sum(state.lane_bytes.values()))}"
    )
    settings = Table("setting", "value", title="the run", title_justify="left")
    for name, value in state.settings.items():
        if value is not None:
            settings.add_row(escape_markup(name), escape_markup(_format_setting(name, value)))
    out.print(settings)
    versions = [f"{name} {version}" for name, version in state.environment.items()]
    out.print(escape_markup(f"written with {', '.join(versions)}"), soft_wrap=False)
    if started:
        out.print(_lanes_table(started, state.lane_bytes))


def _format_setting(name: str, value: object) -> str:
    """Format a setting. Of a list of shards, only the numbers of shards and samples are shown."""
    if name.endswith("Reader.shards") and isinstance(value, list | dict):
        from savable_pipeline.data.dataset.shard_digests import count, sample_count

        return f"{counted(count(value), 'shard')}, {counted(sample_count(value), 'sample')}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _lanes_table(lanes: dict[int, dict[str, Any]], sizes: dict[int, int]) -> Table:
    """Return a table with a row per stage of each lane, with the saved fields that are not empty."""
    from savable_pipeline.run.state.summary import shown

    table = Table("lane", Column("stage", overflow="fold"), "saved", title="the lanes", title_justify="left")
    for lane, fields in lanes.items():
        by_stage: dict[str, list[str]] = {}
        for field, value in fields.items():
            stage, _, name = field.rpartition(".")
            if stage and (value or value == 0):
                by_stage.setdefault(stage, []).append(f"{name} {shown(field, value)}".strip())
        summary = f"{counted(fields['batches'], 'batch', 'batches')}, {sizes[lane]:,} bytes"
        for number, (stage, texts) in enumerate({"": [summary], **by_stage}.items()):
            cells = "" if number else str(lane), escape_markup(stage), escape_markup(", ".join(texts))
            table.add_row(*cells, end_section=number == len(by_stage))
    return table


def _print_differences(left: StateSummary, right: StateSummary, found: list[tuple[str, str, str]]) -> None:
    """Print the cause, the settings that differ, the first lane that differs, and versions that differ.

    `found` has the name and both values of each field that differs.
    """
    if not found:
        out.print("the two states are equal: both resume with the same batches")
        return
    versions = {name: pair for name, *pair in found if name in {*left.environment, *right.environment}}
    by_lane: dict[str, dict[str, list[str]]] = {}
    settings: dict[str, list[str]] = {}
    for name, *pair in found:
        if match := re.match(r"lane \d+", name):
            by_lane.setdefault(match[0], {})[name.removeprefix(match[0]).strip() or "state"] = pair
        elif name not in versions:
            settings[name] = pair
    first_path, second_path = (summary.settings.get("stages", []) for summary in (left, right))
    if first_path != second_path:  # lanes of different pipelines cannot be compared
        out.print(f"different pipelines: {counted(len(first_path), 'stage')} against {len(second_path)}")
        settings["stages"] = [" > ".join(path) for path in (first_path, second_path)]
        by_lane = {}
    elif settings.keys() - {"slot", "epoch", "in flight"}:
        out.print("the same stages with different settings")
    elif settings:
        out.print("the same run at different positions")
    else:
        out.print(f"the same run at the same position, {'but lanes differ' if by_lane else 'with other versions'}")
    _print_pairs("", settings)
    for lane, fields in list(by_lane.items())[:1]:
        _print_pairs(lane, fields)
        if len(by_lane) > 1:
            out.print(f"{counted(len(by_lane) - 1, 'more lane differs', 'more lanes differ')}")
    _print_pairs("versions", versions)


def _print_pairs(title: str, pairs: dict[str, list[str]]) -> None:
    """Print the values of each field in two states, on two lines if they are long."""
    if pairs and title:
        out.print(f"{title}:")
    width = max(map(len, pairs), default=0)
    for name, (one, other) in pairs.items():
        between = " against " if len(one) + len(other) < 60 - width else f"\n  {'against':>{width}} "
        out.print(f"  {escape_markup(name):<{width}} {escape_markup(one)}{between}{escape_markup(other)}")


def serve_workers(
    listen: Annotated[str, input_option(metavar="HOST:PORT", help="The address. Port 0 is a free one.")],
    key_file: Annotated[Path, input_option(help="The key, in a file that only you can read.")],
    workers: Annotated[int, parallel_option(help="Worker processes of this machine.")],
) -> None:
    """Serve workers of this machine to loaders on others.

    A loader connects with sp.SocketWorkers(["HOST:PORT"], key_file=...). Anyone with the key can run code here, as
    you. The traffic is not encrypted, so use a private network or a tunnel.
    """
    from savable_pipeline.run.nodes.agent import Agent
    from savable_pipeline.run.nodes.wire import read_key

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with errors_as_lines():
        agent = Agent(listen, read_key(key_file), workers)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        out.print(f"listening on {agent.address}", markup=False, soft_wrap=True)
        try:
            while True:
                agent.step()
        except KeyboardInterrupt:
            pass
        finally:
            agent.close()
