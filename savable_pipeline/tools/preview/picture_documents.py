"""Which document of a pack a picture belongs to, so that it can be linked to where the document begins.

A picture belongs to the document with the first token that is about it: by `image_index`, (rows, length), the number of
the picture of each token; or by the encoder's `vision`, the tokens of whose tiles stand in the order of `grids`. Rows
that are no packs have a picture each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.stages.task_encoder import TaskEncoder
from savable_pipeline.tools.preview.image_entries import as_array
from savable_pipeline.tools.preview.page import CardEntry, Thumbnail
from savable_pipeline.tools.preview.token_entries import PackDocuments

Places = NDArray[np.int64]


def with_documents(
    entry: CardEntry,
    value: Any,
    documents: PackDocuments | None,
    fields: Mapping[str, Any],
    encoder: TaskEncoder | None,
) -> CardEntry:
    """The entry of pictures, of which `value` has one in each row, with a link below each whose document is known."""
    array = as_array(value)
    if documents is None or not entry.thumbnails or array is None or array.ndim > 4:
        return entry
    places = _places(documents, fields, encoder, len(array))
    linked = [
        _linked(thumbnail, documents, int(place)) for thumbnail, place in zip(entry.thumbnails, places, strict=False)
    ]
    return dataclasses.replace(entry, thumbnails=[*linked, *entry.thumbnails[len(linked) :]])


def _linked(thumbnail: Thumbnail, documents: PackDocuments, place: int) -> Thumbnail:
    row, number = documents.at(place)
    where = f"row {row}, document {number}" if documents.rows > 1 else f"document {number}"
    return dataclasses.replace(thumbnail, caption=where, link=documents.anchor(row, number))


def _places(
    documents: PackDocuments, fields: Mapping[str, Any], encoder: TaskEncoder | None, pictures: int
) -> Places | Sequence[int]:
    """The place of the first token of each picture among those of all rows; empty where that is not known."""
    index = as_array(fields.get("image_index"))
    if index is not None and index.size == documents.size:
        numbers, first = np.unique(index.reshape(-1), return_index=True)
        known = first[numbers >= 0]
        return known if len(known) == pictures else ()
    vision, grids = getattr(encoder, "vision", None), fields.get("grids")
    if vision is not None and grids is not None and len(grids) == pictures:
        return _of_tiles(documents, vision, grids)
    return np.arange(pictures) * documents.length if pictures == documents.rows else ()


def _of_tiles(documents: PackDocuments, vision: Any, grids: Any) -> Places | Sequence[int]:
    try:
        sizes = [int(vision.tiles.tokens(grids[number : number + 1])) for number in range(len(grids))]
        places = np.flatnonzero(documents.tokens.reshape(-1) == int(vision.token))
    except (AttributeError, TypeError, ValueError):  # an encoder of one's own, with another idea of vision
        return ()
    begins = np.cumsum([0, *sizes])
    return places[begins[:-1]] if begins[-1] == len(places) and min(sizes, default=0) > 0 else ()
