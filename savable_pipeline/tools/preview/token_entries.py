"""Token sequences of a batch as spans: loss, documents, decoded text.

    tokens  a b c d   labels  b - d -        labels are one ahead: b and d contribute to the loss, as targets of a and c
                      labels  - b - d        labels are at their own tokens: b and d contribute to the loss, too

An image is linked to its document, which has the image's first token. That token is known from `image_index`, (rows,
length), the index of each token's image, or from the encoder's `vision`, whose tiles have their tokens in the order of
`grids`. Rows that are not packs have one image each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.stages.task_encoder import TaskEncoder
from savable_pipeline.tools.preview.image_entries import as_array, describe_array
from savable_pipeline.tools.preview.page import CardEntry, Thumbnail, TokenRow, TokenSpan, shorten

Mask = NDArray[np.bool_]

_TOKENS = ("tokens", "input_ids", "token_ids")
_LABELS = ("labels", "targets", "target_ids")
_LOSS_MASKS = ("loss_mask", "loss_weights", "target_mask")
_DOCUMENTS = ("document_ids", "doc_ids", "segment_ids", "sequence_ids", "seq_idx")
_POSITIONS = ("position_ids", "positions")
_IGNORED_LABEL = -100
_MOST_ROWS = 8
_LONGEST_ROW = 1024  # tokens of a row that are shown
_LEAST_REPEATS = 6  # equal tokens without loss, from which they are shown as one


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Rows of tokens, int (rows, length), and masks of the same shape."""

    tokens: NDArray[Any]
    loss: Mask | None  # tokens that contribute to the loss; None: unknown
    begins: Mask  # tokens that start a document
    labels: NDArray[Any] | None
    other_target: Mask  # tokens with loss whose label, which is one ahead, is not the next token of the row


def tokens_name(fields: Mapping[str, Any]) -> str | None:
    """Return the field of tokens, integers (length,) or (rows, length); or None."""
    for name in _TOKENS:
        array = as_array(fields.get(name))
        if array is not None and array.dtype.kind in "iu" and array.ndim in (1, 2) and array.size:
            return name
    return None


class PackDocuments:
    """Documents in the rows of a batch, numbered from 0 in each row.

    `begins` says which tokens start a document. `anchor_prefix` starts the `id` of each document in the page.
    """

    def __init__(self, tokens: NDArray[Any], begins: Mask, anchor_prefix: str = "") -> None:
        self.tokens, self._anchor_prefix = tokens, anchor_prefix
        self.rows, self.length = tokens.shape
        self.size = tokens.size
        self._numbers = np.cumsum(begins, axis=1) - 1  # the document of each token, int64 (rows, length)

    def document_at(self, position: int) -> tuple[int, int]:
        """Return the row of a token, and the number of its document in this row.

        The token is given by its position among all tokens.
        """
        row, column = divmod(position, self.length)
        return row, int(self._numbers[row, column])

    def anchor(self, row: int, number: int) -> str:
        """Return the `id` of a document's start, or "" if it is not on the page."""
        is_shown = row < _MOST_ROWS and number <= self._numbers[row, :_LONGEST_ROW][-1]
        return f"{self._anchor_prefix}-{row}-{number}" if self._anchor_prefix and is_shown else ""


def documents_of(name: str, fields: Mapping[str, Any], anchors: str) -> PackDocuments:
    """Return the documents of the tokens in field `name`.

    `anchors` is the prefix of their anchors.
    """
    tokens = np.atleast_2d(_array(fields, name))
    return PackDocuments(tokens, _document_starts(tokens, fields), anchors)


def _array(fields: Mapping[str, Any], name: str) -> NDArray[Any]:
    """Return a field as an array, which the caller has checked to be one."""
    array = as_array(fields[name])
    assert array is not None
    return array


def tokens_entry(
    shown_name: str, name: str, fields: Mapping[str, Any], decoder: Decoder, documents: PackDocuments | None = None
) -> CardEntry:
    """Return the card entry that shows the tokens of the field `name`, row by row.

    `shown_name` is its heading. Labels, the loss mask and the borders of documents are found in the other fields.
    """
    array = _array(fields, name)
    sequences = _sequences(np.atleast_2d(array), fields)
    documents = documents or PackDocuments(sequences.tokens, sequences.begins)
    row_count = len(sequences.tokens)
    rows = [_token_row(sequences, row, decoder, documents) for row in range(min(_MOST_ROWS, row_count))]
    limit = f", the first {_MOST_ROWS} rows" if row_count > _MOST_ROWS else ""
    return CardEntry(shown_name, describe_array(fields[name], array) + limit, rows=rows)


def _sequences(tokens: NDArray[Any], fields: Mapping[str, Any]) -> _Sequences:
    """Find out which tokens contribute to the loss, and where documents start."""
    labels, mask = _find_field(tokens, fields, _LABELS), _find_field(tokens, fields, _LOSS_MASKS)
    begins = _document_starts(tokens, fields)
    other_target = np.zeros(tokens.shape, dtype=bool)
    if labels is None and mask is None:
        return _Sequences(tokens, None, begins, None, other_target)
    loss = np.ones(tokens.shape, dtype=bool)
    if labels is not None:
        loss &= labels != _IGNORED_LABEL
    if mask is not None:
        loss &= mask != 0
    if labels is not None:
        is_next_token = loss[:, :-1] & (labels[:, :-1] == tokens[:, 1:])
        if is_next_token.sum() > (loss & (labels == tokens)).sum():  # labels are one ahead
            targets = np.zeros(tokens.shape, dtype=bool)
            targets[:, 1:] = is_next_token
            other_target = loss.copy()
            other_target[:, :-1] &= ~is_next_token
            loss = targets
    return _Sequences(tokens, loss, begins, labels, other_target)


def _find_field(tokens: NDArray[Any], fields: Mapping[str, Any], names: Sequence[str]) -> NDArray[Any] | None:
    """Return the first of these fields with a number per token, or None."""
    for name in names:
        array = as_array(fields.get(name))
        if array is not None and array.size == tokens.size and np.atleast_2d(array).shape == tokens.shape:
            return np.atleast_2d(array)
    return None


def _document_starts(tokens: NDArray[Any], fields: Mapping[str, Any]) -> Mask:
    """Return which tokens start a document, from `cu_seqlens`, document ids or positions."""
    begins = np.zeros(tokens.shape, dtype=bool)
    begins[:, 0] = True
    borders = as_array(fields.get("cu_seqlens"))
    documents, positions = _find_field(tokens, fields, _DOCUMENTS), _find_field(tokens, fields, _POSITIONS)
    if borders is not None and borders.dtype.kind in "iu" and borders.ndim == 1:
        begins.reshape(-1)[_inside(borders, tokens.size)] = True
    elif borders is not None and borders.dtype.kind in "iu" and borders.ndim == 2 and len(borders) == len(tokens):
        for row, row_borders in zip(begins, borders, strict=True):
            row[_inside(row_borders, len(row))] = True
    elif documents is not None:
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    elif positions is not None:
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return begins


def _inside(borders: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the borders from 0 to below `size`."""
    return borders[(borders >= 0) & (borders < size)]


def _token_row(sequences: _Sequences, row: int, decoder: Decoder, documents: PackDocuments) -> TokenRow:
    """Return a row of tokens as spans, with a note of its numbers of tokens, segments and tokens with loss."""
    length = sequences.tokens.shape[1]
    shown = min(length, _LONGEST_ROW)
    spans: list[TokenSpan] = []
    start = 0
    while start < shown:
        stop = _stretch_end(sequences, row, start, shown)
        stretch = _spans(sequences, row, start, stop, decoder)
        if sequences.begins[row, start]:
            _, number = documents.document_at(row * length + start)
            stretch[0] = dataclasses.replace(stretch[0], anchor=documents.anchor(row, number))
        spans += stretch
        start = stop
    note = f"row {row}: {length:,} tokens"
    note += f", {int(sequences.begins[row].sum()):,} segments" if sequences.begins[row, 1:].any() else ""
    if sequences.loss is not None:
        count = int(sequences.loss[row].sum() + sequences.other_target[row].sum())
        note += f", {count:,} with loss ({count / length:.0%})"
    note += f"; the first {shown:,} are shown" if shown < length else ""
    return TokenRow(note, spans)


def _stretch_end(sequences: _Sequences, row: int, start: int, shown: int) -> int:
    """Return the end of the stretch at `start`: of tokens in one document that all have loss, or all have none."""
    stop = start + 1
    while (
        stop < shown
        and not sequences.begins[row, stop]
        and not sequences.other_target[row, stop - 1]
        and (sequences.loss is None or sequences.loss[row, stop] == sequences.loss[row, start])
    ):
        stop += 1
    return stop


def _spans(sequences: _Sequences, row: int, start: int, stop: int, decoder: Decoder) -> list[TokenSpan]:
    """Return the tokens of a stretch, from `start` to `stop` in a row, as spans of text."""
    ids: list[int] = sequences.tokens[row, start:stop].tolist()
    kind = "unknown" if sequences.loss is None else "loss" if sequences.loss[row, start] else "ignored"
    spans: list[TokenSpan] = []
    for begin, end in _split_at_repeats(ids, kind):
        is_repeat = end - begin >= _LEAST_REPEATS and len(set(ids[begin:end])) == 1
        for text, count in decoder.pieces(ids[begin : begin + 1] if is_repeat else ids[begin:end]):
            title = f"{' '.join(map(str, ids[begin : begin + count]))} at {start + begin}"
            begins = begin == 0 and bool(sequences.begins[row, start])
            spans.append(TokenSpan(shorten(text, 80), kind, title, begins, end - begin if is_repeat else 1))
            begin += count
    if sequences.other_target[row, stop - 1] and sequences.labels is not None:
        target = int(sequences.labels[row, stop - 1])
        target_text, _ = decoder.pieces([target])[0]
        spans[-1] = dataclasses.replace(spans[-1], next=target_text)
    return spans


def _split_at_repeats(ids: Sequence[int], kind: str) -> list[tuple[int, int]]:
    """Split tokens into ranges, so that a token that is often repeated, such as padding, has its own range.

    Tokens with loss are not split.
    """
    if kind == "loss":
        return [(0, len(ids))]
    ranges = []
    begin, repeats_begin = 0, 0  # of the tokens that are in no range yet, and of the last of them that are equal
    for end in range(1, len(ids) + 1):
        if end < len(ids) and ids[end] == ids[repeats_begin]:
            continue
        if end - repeats_begin >= _LEAST_REPEATS:
            ranges += [(begin, repeats_begin), (repeats_begin, end)]
            begin = end
        repeats_begin = end
    return [(begin, end) for begin, end in [*ranges, (begin, len(ids))] if begin < end]


_LONGEST_CHARACTER = 8  # tokens of one character, at most


class Decoder:
    """Decodes tokens to pieces of text, or to their ids if there is no text.

    It calls `decode(ids)` of the encoder's `tokenizer`, or of its attribute `tokenize`. The ids `bos`, `eos` and `pad`
    of the tokenizer are shown by these names.
    """

    def __init__(self, encoder: TaskEncoder | None) -> None:
        tokenizer = getattr(encoder, "tokenizer", None)
        wrapped = getattr(tokenizer, "tokenize", None)
        decode: Any = getattr(tokenizer, "decode", None) or getattr(wrapped, "decode", None)
        self._decode = decode if callable(decode) else None
        special = {name: getattr(tokenizer, name, None) for name in ("pad", "eos", "bos")}
        self._names = {token: name for name, token in special.items() if type(token) is int}

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Return text and number of tokens of each piece.

        A piece is one token, or the few that share a character.
        """
        pieces: list[tuple[str, int]] = []
        start, context_start = 0, 0  # the starts of this piece, and of the previous one, which is its context
        for end in range(1, len(ids) + 1):
            text = self._decode_in_context(ids, context_start, start, end)
            if not text.endswith("\ufffd") or end - start >= _LONGEST_CHARACTER or end == len(ids):
                pieces.append((text or self._display_name(ids[start]), end - start))
                context_start, start = start, end
        return pieces

    def _decode_in_context(self, ids: Sequence[int], context_start: int, start: int, end: int) -> str:
        """Decode `ids[start:end]` with the previous tokens as context, because some tokenizers only then add spaces."""
        context, both = self._text(ids[context_start:start]), self._text(ids[context_start:end])
        return both.removeprefix(context) if both.startswith(context) else self._text(ids[start:end])

    def _text(self, ids: Sequence[int]) -> str:
        """Decode ids as text, or return "" if that fails."""
        if self._decode is None or not ids:
            return ""
        try:
            return str(_decoded(self._decode, list(ids)))
        except Exception:  # such as an id out of range, which must not prevent the page
            return ""

    def _display_name(self, token: int) -> str:
        return f"‹{self._names.get(token, token)}›"


def _decoded(decode: Any, ids: list[int]) -> Any:
    """Decode ids, including special tokens if the tokenizer supports it."""
    try:
        return decode(ids, skip_special_tokens=False)  # tokenizers leave them out otherwise
    except TypeError:
        return decode(ids)


TokenPositions = NDArray[np.int64]


def with_documents(
    entry: CardEntry,
    value: Any,
    documents: PackDocuments | None,
    fields: Mapping[str, Any],
    encoder: TaskEncoder | None,
) -> CardEntry:
    """Add a link to its document below each image, if the document is known.

    `value` is the field of the entry, with one image per row.
    """
    array = as_array(value)
    if documents is None or not entry.thumbnails or array is None or array.ndim > 4:
        return entry
    positions = _first_token_positions(documents, fields, encoder, len(array))
    linked = [
        _linked(thumbnail, documents, int(position))
        for thumbnail, position in zip(entry.thumbnails, positions, strict=False)
    ]
    return dataclasses.replace(entry, thumbnails=[*linked, *entry.thumbnails[len(linked) :]])


def _linked(thumbnail: Thumbnail, documents: PackDocuments, position: int) -> Thumbnail:
    """Add the document of a token to a thumbnail, as its caption and link."""
    row, number = documents.document_at(position)
    where = f"row {row}, document {number}" if documents.rows > 1 else f"document {number}"
    return dataclasses.replace(thumbnail, caption=where, link=documents.anchor(row, number))


def _first_token_positions(
    documents: PackDocuments, fields: Mapping[str, Any], encoder: TaskEncoder | None, image_count: int
) -> TokenPositions | Sequence[int]:
    """Return the position of each image's first token among the tokens of all rows, or () if it is unknown."""
    index = as_array(fields.get("image_index"))
    if index is not None and index.size == documents.size:
        numbers, first = np.unique(index.reshape(-1), return_index=True)
        known = first[numbers >= 0]
        return known if len(known) == image_count else ()
    vision, grids = getattr(encoder, "vision", None), fields.get("grids")
    if vision is not None and grids is not None and len(grids) == image_count:
        return _tile_positions(documents, vision, grids)
    return np.arange(image_count) * documents.length if image_count == documents.rows else ()


def _tile_positions(documents: PackDocuments, vision: Any, grids: Any) -> TokenPositions | Sequence[int]:
    """Return the position of each image's first token, from the numbers of tokens of tiles; () if that is unknown."""
    try:
        sizes = [int(vision.tiles.tokens(grids[number : number + 1])) for number in range(len(grids))]
        positions = np.flatnonzero(documents.tokens.reshape(-1) == int(vision.token))
    except (AttributeError, TypeError, ValueError):  # a custom encoder with another kind of vision
        return ()
    starts = np.cumsum([0, *sizes])
    return positions[starts[:-1]] if starts[-1] == len(positions) and min(sizes, default=0) > 0 else ()
