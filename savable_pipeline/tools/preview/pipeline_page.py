"""The page of a pipeline: its data path, and the first batches of a lane with the samples they were made of."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

from savable_pipeline.core.lane import Lane
from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.loader.trace import traced_rows
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.pipeline import Pipeline, data_path
from savable_pipeline.stages.stage import Stage
from savable_pipeline.tools.preview.batch_entries import MOST_FIELDS, Fields
from savable_pipeline.tools.preview.page import render
from savable_pipeline.tools.preview.page_model import Card, Entry, first_line

MOST_BATCHES = 50
_MOST_SOURCES = 64  # samples of a batch that are named


class PipelinePage(NamedTuple):
    """A page, UTF-8, and the error that ended its batches; empty without one."""

    html: bytes
    fault: str


def preview_pipeline(
    pipeline: Pipeline, name: str, *, batches: int = 3, seed: int = 0, lane: int = 0, lanes: int = 1
) -> PipelinePage:
    """A page with the first batches of one lane of a run with `seed` and `lanes`; UTF-8.

    An error of the pipeline is shown in the place of its batch, and no batch follows. Raises ValueError for a wrong
    number, and any error of the pipeline function itself.
    """
    if not 1 <= batches <= MOST_BATCHES:
        raise ValueError(f"a page shows 1 to {MOST_BATCHES} batches, not {batches}")
    if not 0 <= lane < lanes:
        raise ValueError(f"lane {lane}: a run of {lanes} lanes has 0 to {lanes - 1}")
    stage, lane_of_run = LaneRunner(pipeline, seed=seed, lanes=lanes, shared={}).build(lane, 0)
    cards = _cards(stage, batches)
    return PipelinePage(_page(stage, lane_of_run, name, cards), cards[-1].fault)


def batch_page(stage: Stage, lane: Lane, title: str, number: int, batch: Any) -> bytes:
    """A page with the batch that a lane's last stage gave last, its `number`-th; UTF-8."""
    return _page(stage, lane, title, [_card(stage, number, batch, Fields(stage.info.encoder))])


def _page(stage: Stage, lane: Lane, title: str, cards: list[Card]) -> bytes:
    return render(
        "pipeline.html.jinja",
        title=title,
        path=data_path(stage),
        encoder=type(stage.info.encoder).__name__ if stage.info.encoder is not None else "none",
        seed=lane.seed,
        lane=lane.index,
        lanes=lane.count,
        population=stage.info.population,
        cards=cards,
    )


def _cards(stage: Stage, batches: int) -> list[Card]:
    fields = Fields(stage.info.encoder)
    cards: list[Card] = []
    for number in range(batches):
        try:
            batch = next(stage)
        except StopIteration:
            cards.append(Card("the end", f"the lane has {number:,} batches"))
            break
        except SavableError as error:
            cards.append(Card(f"batch {number}", "could not be made", fault=first_line(error)))
            break
        cards.append(_card(stage, number, batch, fields))
    return cards


def _card(stage: Stage, number: int, batch: Any, fields: Fields) -> Card:
    """A batch, shown before the lane goes on: a stage may give again what it has given."""
    entries: list[Entry] = list(islice(fields.entries(batch), MOST_FIELDS))
    if len(entries) == MOST_FIELDS:
        entries.append(Entry("…", "and perhaps more"))
    try:
        found = [sample for row in traced_rows(stage, BatchSamples.of(stage.ref)) for sample in row]
    except SavableError as error:
        return Card(f"batch {number}", f"its samples are not known: {first_line(error)}", entries)
    sources = [f"{sample.shard} · {sample.key} · sample {sample.ref.index:,}" for sample in found[:_MOST_SOURCES]]
    if len(found) > _MOST_SOURCES:
        sources.append(f"{len(found) - _MOST_SOURCES:,} more")
    return Card(f"batch {number}", f"{len(found):,} samples", entries, sources=sources)
