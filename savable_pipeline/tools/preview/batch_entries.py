"""The fields of a batch as entries: tokens, images, numbers, samples, and anything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from savable_pipeline.core.containers import listed_parts, named_parts
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.task_encoder import TaskEncoder
from savable_pipeline.tools.preview.page_model import Entry, cut, first_line
from savable_pipeline.tools.preview.sample_entries import part_entry
from savable_pipeline.tools.preview.tensor_entries import array_entry, as_array, tiles_entry
from savable_pipeline.tools.preview.token_decoder import Decoder
from savable_pipeline.tools.preview.token_entries import tokens_entry, tokens_name

MOST_FIELDS = 60  # of a batch that are shown
_MOST_ITEMS = 8  # of a list
_SHORT = 100  # characters of a value shown in its heading
_DEEPEST = 6  # fields within fields


class Fields:
    """Makes entries of the fields of a batch; `encoder` tells how tokens are decoded and images were normalized."""

    def __init__(self, encoder: TaskEncoder | None) -> None:
        self._encoder = encoder
        self._decoder = Decoder(encoder)

    def entries(self, batch: Any) -> Iterator[Entry]:
        """An entry for every field, named by a path such as `items[0].tokens`; a field that fails is a fault."""
        yield from self._of("", batch, 0)

    def _of(self, name: str, value: Any, depth: int) -> Iterator[Entry]:
        try:
            inner = _inner(value) if depth < _DEEPEST else None
            if isinstance(value, Sample):
                yield from self._sample(name, value)
            elif isinstance(inner, Mapping):
                yield from self._mapping(name, inner, depth)
            elif inner is not None:
                yield from self._list(name, inner, depth)
            else:
                yield self._leaf(name or "batch", value)
        except Exception as error:  # a fault of one field, such as a type whose repr raises, is not one of the page
            yield Entry(name or "batch", type(value).__name__, fault=first_line(error))

    def _mapping(self, name: str, fields: Mapping[Any, Any], depth: int) -> Iterator[Entry]:
        """Tokens first, with their labels and borders; then the other fields."""
        tokens = tokens_name(fields)
        if tokens is not None:
            yield tokens_entry(_path(name, tokens), tokens, fields, self._decoder)
        tiles = tiles_entry(_path(name, "patches"), fields, self._encoder)
        if tiles is not None:
            yield tiles
        for field, value in fields.items():
            if field != tokens and (tiles is None or field != "patches"):
                yield from self._of(_path(name, field), value, depth + 1)

    def _list(self, name: str, items: list[Any], depth: int) -> Iterator[Entry]:
        for number, item in enumerate(items[:_MOST_ITEMS]):
            yield from self._of(f"{name}[{number}]", item, depth + 1)
        if len(items) > _MOST_ITEMS:
            yield Entry(name or "batch", f"{len(items) - _MOST_ITEMS:,} more")

    def _sample(self, name: str, sample: Sample) -> Iterator[Entry]:
        for extension in sample:
            entry = part_entry(sample, extension)
            yield dataclasses.replace(entry, name=f"{name} {entry.name}".strip())

    def _leaf(self, name: str, value: Any) -> Entry:
        array = as_array(value)
        if array is not None:
            return array_entry(name, value, array, self._encoder)
        if isinstance(value, str):
            return Entry(name, f"{len(value):,} characters", text=cut(value))
        if isinstance(value, bytes):
            return Entry(name, f"{len(value):,} bytes, beginning with {value[:12].hex(' ')}")
        text = cut(repr(value))
        short = len(text) <= _SHORT and "\n" not in text
        kind = type(value).__name__
        return Entry(name, f"{kind}: {text}") if short else Entry(name, kind, text=text)


def _inner(value: Any) -> Mapping[Any, Any] | list[Any] | None:
    """The parts of a container, by name or in order; None of a leaf, and of a list of plain numbers."""
    named = named_parts(value)
    if named is not None:
        return named
    listed = listed_parts(value)
    return None if listed is None or all(isinstance(item, int | float | None) for item in listed) else listed


def _path(name: str, field: Any) -> str:
    return f"{name}.{field}" if name else str(field)
