"""Page of a pipeline: its data path, and the first batches of a lane."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any, NamedTuple

from savable_pipeline.core.containers import listed_parts, named_parts
from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.lane_runner import LaneRunner
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.loader.observers import traced_rows
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.pipeline import PipelineFunction, upstream
from savable_pipeline.stages.stage import Stage
from savable_pipeline.stages.task_encoder import TaskEncoder
from savable_pipeline.tools.preview.image_entries import array_entry, as_array, tiles_entry
from savable_pipeline.tools.preview.page import PAGE_BYTES, Budget, Card, CardEntry, first_line, render, shorten
from savable_pipeline.tools.preview.sample_entries import part_entry
from savable_pipeline.tools.preview.sound_entries import sound_entry
from savable_pipeline.tools.preview.token_entries import (
    Decoder,
    documents_of,
    tokens_entry,
    tokens_name,
    with_documents,
)

MOST_BATCHES = 50
_MOST_SOURCES = 64  # samples of a batch that are named


class PipelinePage(NamedTuple):
    """Page in UTF-8, and the error that ended its batches or ""."""

    html: bytes
    fault: str


def preview_pipeline(
    pipeline: PipelineFunction, name: str, *, batches: int = 3, seed: int = 0, lane: int = 0, lanes: int = 1
) -> PipelinePage:
    """Return a page with the first batches of one lane of a run.

    If a batch cannot be built, its error is shown, and no batch follows. Raises ValueError for an invalid number, and
    errors of the pipeline function itself.
    """
    if not 1 <= batches <= MOST_BATCHES:
        raise ValueError(f"a page shows 1 to {MOST_BATCHES} batches, not {batches}")
    if not 0 <= lane < lanes:
        raise ValueError(f"lane {lane}: a run of {lanes} lanes has 0 to {lanes - 1}")
    stage, built_lane = LaneRunner(LaneJob(pipeline, seed, lanes), shared={}).build(lane, epoch=0)
    cards = _cards(stage, batches)
    return PipelinePage(_page(stage, built_lane, name, cards), cards[-1].fault)


def batch_page(stage: Stage, lane: Lane, title: str, number: int, batch: Any) -> bytes:
    """Return a page with the last batch of a lane's last stage.

    It is batch `number` of the lane.
    """
    return _page(stage, lane, title, [_card(stage, number, batch, Fields(stage.info.encoder))])


def _page(stage: Stage, lane: Lane, title: str, cards: list[Card]) -> bytes:
    """Render a page with cards of batches."""
    return render(
        "pipeline.html.jinja",
        title=title,
        path=list(map(_stage_description, upstream(stage))),
        encoder=type(stage.info.encoder).__name__ if stage.info.encoder is not None else "none",
        seed=lane.seed,
        lane=lane.index,
        lanes=lane.count,
        population=stage.info.population,
        cards=cards,
    )


_SHOWN_SETTINGS = 4  # a stage with more settings has them folded


def _stage_description(stage: Stage) -> tuple[str, str, list[str]]:
    """Return (name with the branch, settings to show, settings to fold) of a stage.

    All settings are shown if they are few, and otherwise all are folded.
    """
    stage_name = "/".join(filter(None, [stage.info.branch, type(stage).__name__]))
    settings = [f"{name}={value!r}" for name, value in stage.settings().items()]
    return (stage_name, ", ".join(settings), []) if len(settings) <= _SHOWN_SETTINGS else (stage_name, "", settings)


def _cards(stage: Stage, batches: int) -> list[Card]:
    """Return cards of the first batches of a lane. The card of an error of the pipeline is the last one."""
    fields = Fields(stage.info.encoder)
    cards: list[Card] = []
    for number in range(batches):
        try:
            batch = next(stage)
        except StopIteration:
            cards.append(Card("the end", f"the lane has {number:,} batches"))
            break
        except SavableError as error:
            cards.append(Card(f"batch {number}", "could not be built", fault=first_line(error)))
            break
        cards.append(_card(stage, number, batch, fields))
    return cards


def _card(stage: Stage, number: int, batch: Any, fields: Fields) -> Card:
    """Return the card of a batch. Call this before the next batch is built, which may reuse the same objects."""
    entries: list[CardEntry] = list(islice(fields.entries(batch), MOST_FIELDS))
    if len(entries) == MOST_FIELDS:
        entries.append(CardEntry("…", "and perhaps more"))
    try:
        samples = [sample for row in traced_rows(stage, BatchSamples(stage.ref)) for sample in row]
    except SavableError as error:
        return Card(f"batch {number}", f"its samples are not known: {first_line(error)}", entries)
    sources = [
        ("" if sample.shard == "." else f"{sample.shard} · ") + f"{sample.key} · sample {sample.ref.index:,}"
        for sample in samples[:_MOST_SOURCES]  # the shard of a folder of files is "."
    ]
    if len(samples) > _MOST_SOURCES:
        sources.append(f"{len(samples) - _MOST_SOURCES:,} more")
    return Card(f"batch {number}", f"{len(samples):,} samples", entries, sources=sources)


MOST_FIELDS = 60  # fields of a batch that are shown
_MOST_ITEMS = 8  # items of a list that are shown
_SHORT_VALUE = 100  # characters of a value shown in its heading
_DEEPEST = 6  # levels of fields within fields


class Fields:
    """Builds the entries of a card from the fields of a batch.

    `encoder` says how tokens are decoded and how images were normalized.
    """

    def __init__(self, encoder: TaskEncoder | None) -> None:
        self._encoder = encoder
        self._decoder = Decoder(encoder)
        self._budget = Budget(PAGE_BYTES)
        self._sequence_numbers = count()  # numbers of the token fields in the page, for anchors

    def entries(self, batch: Any) -> Iterator[CardEntry]:
        """Yield an entry for every field, named by a path such as `items[0].tokens`.

        The entry of a field that cannot be shown has the error.
        """
        yield from self._entries_of("", batch, 0)

    def _entries_of(self, name: str, value: Any, depth: int) -> Iterator[CardEntry]:
        """Yield entries of a value, and of the values in it."""
        try:
            contained = _contained_values(value) if depth < _DEEPEST else None
            if isinstance(value, Sample):
                yield from self._sample_entries(name, value)
            elif isinstance(contained, Mapping):
                yield from self._mapping_entries(name, contained, depth)
            elif contained is not None:
                yield from self._list_entries(name, contained, depth)
            else:
                yield self._leaf_entry(name or "batch", value)
        except Exception as error:  # an error of one field, such as a type whose repr raises, must not prevent the page
            yield CardEntry(name or "batch", type(value).__name__, fault=first_line(error))

    def _mapping_entries(self, name: str, fields: Mapping[Any, Any], depth: int) -> Iterator[CardEntry]:
        """Yield an entry of the tokens with their labels and documents, and then entries of the other fields."""
        tokens_field = tokens_name(fields)
        documents = None
        if tokens_field is not None:
            documents = documents_of(tokens_field, fields, f"t{next(self._sequence_numbers)}")
            yield tokens_entry(_field_path(name, tokens_field), tokens_field, fields, self._decoder, documents)
        tiles = tiles_entry(_field_path(name, "patches"), fields, self._encoder)
        if tiles is not None:
            yield with_documents(tiles, fields["grids"], documents, fields, self._encoder)
        for field, value in fields.items():
            if field != tokens_field and (tiles is None or field != "patches"):
                for entry in self._entries_of(_field_path(name, field), value, depth + 1):
                    yield with_documents(entry, value, documents, fields, self._encoder)

    def _list_entries(self, name: str, items: list[Any], depth: int) -> Iterator[CardEntry]:
        """Yield entries of the first items of a list."""
        for number, item in enumerate(items[:_MOST_ITEMS]):
            yield from self._entries_of(f"{name}[{number}]", item, depth + 1)
        if len(items) > _MOST_ITEMS:
            yield CardEntry(name or "batch", f"{len(items) - _MOST_ITEMS:,} more")

    def _sample_entries(self, name: str, sample: Sample) -> Iterator[CardEntry]:
        """Yield entries of the parts of a sample."""
        for extension in sample:
            entry = part_entry(sample, extension, self._budget)
            yield dataclasses.replace(entry, name=f"{name} {entry.name}".strip())

    def _leaf_entry(self, name: str, value: Any) -> CardEntry:
        """Return the entry of a value that is not a container."""
        array = as_array(value)
        if array is not None:
            sound = sound_entry(name, value, array, self._budget)
            return sound or array_entry(name, value, array, self._encoder)
        if isinstance(value, str):
            return CardEntry(name, f"{len(value):,} characters", text=shorten(value))
        if isinstance(value, bytes):
            return CardEntry(name, f"{len(value):,} bytes, beginning with {value[:12].hex(' ')}")
        text = shorten(repr(value))
        is_short = len(text) <= _SHORT_VALUE and "\n" not in text
        type_name = type(value).__name__
        return CardEntry(name, f"{type_name}: {text}") if is_short else CardEntry(name, type_name, text=text)


def _contained_values(value: Any) -> Mapping[Any, Any] | list[Any] | None:
    """Return the values in a container, by name or in order. Return None for other values and lists of numbers."""
    named = named_parts(value)
    if named is not None:
        return named
    listed = listed_parts(value)
    return None if listed is None or all(isinstance(item, int | float | None) for item in listed) else listed


def _field_path(name: str, field: Any) -> str:
    return f"{name}.{field}" if name else str(field)
