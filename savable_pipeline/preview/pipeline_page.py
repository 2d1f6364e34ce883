"""The page of a pipeline: its data path, and the first batches of a lane with the samples they were made of."""

from __future__ import annotations

from itertools import islice
from typing import Any

from savable_pipeline.errors import SavableError
from savable_pipeline.host import LaneHost, Pipeline
from savable_pipeline.preview.fields import MOST_FIELDS, Fields
from savable_pipeline.preview.page import render
from savable_pipeline.preview.shown import Card, Entry, first_line
from savable_pipeline.stage import Stage
from savable_pipeline.trace import data_path, traced_rows

MOST_BATCHES = 50
_MOST_SOURCES = 64  # samples of a batch that are named


def preview_pipeline(
    pipeline: Pipeline, name: str, *, batches: int = 3, seed: int = 0, lane: int = 0, lanes: int = 1
) -> bytes:
    """A page with the first batches of one lane of a run with this seed and so many lanes; UTF-8.

    An error of the pipeline stands in the place of the batch, and ends them. Raises ValueError for a wrong number, and
    what the pipeline function raises.
    """
    if not 1 <= batches <= MOST_BATCHES:
        raise ValueError(f"a page shows 1 to {MOST_BATCHES} batches, not {batches}")
    if not 0 <= lane < lanes:
        raise ValueError(f"lane {lane}: a run of {lanes} lanes has 0 to {lanes - 1}")
    stage, _ = LaneHost(pipeline, seed=seed, lanes=lanes, shared={}).build(lane, 0)
    return render(
        "pipeline.html.jinja",
        title=name,
        path=data_path(stage),
        encoder=type(stage.encoder).__name__ if stage.encoder is not None else "none",
        seed=seed,
        lane=lane,
        lanes=lanes,
        population=stage.population,
        cards=_cards(stage, batches),
    )


def _cards(stage: Stage, batches: int) -> list[Card]:
    fields = Fields(stage.encoder)
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
        found = [sample for row in traced_rows(stage) for sample in row]
    except SavableError as error:
        return Card(f"batch {number}", f"its samples are not known: {first_line(error)}", entries)
    sources = [f"{sample.shard} · {sample.key} · sample {sample.ref.index:,}" for sample in found[:_MOST_SOURCES]]
    if len(found) > _MOST_SOURCES:
        sources.append(f"{len(found) - _MOST_SOURCES:,} more")
    return Card(f"batch {number}", f"{len(found):,} samples", entries, sources=sources)
