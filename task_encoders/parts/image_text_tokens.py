"""Sequences of text, image, video and audio tokens, with packs and batches.

`MixedEncoder` is the base class of encoders of such sequences. An example is the text `ab`, an image of 2 × 4 patches
with 2 × 2 patches per token (`#`), and the text `c`. The model predicts `b` and `c`:

    tokens       a b # # c
    labels       b - - c -     an image is never predicted
    patches      8 of them, row by row
    grids        2 4           rows and columns of each tile
    tile_counts  1             tiles of each image

The model puts image features at the tokens `#`, in order. The order of these tokens in a batch, row by row, is that of
`patches`. The same holds for the features of videos and audio.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from savable_pipeline import Rng, Sample, TaskEncoder
from task_encoders.parts.audio_tokens import AudioTokens
from task_encoders.parts.medium import Grid, MediaHeader, Medium, MediumTokens, MRope, join_fields, pad_positions
from task_encoders.parts.sample_parts import MediaPart, ReadImage, SampleImages, SampleMedia, ShownMedia, media_kind
from task_encoders.parts.token_packing import (
    IGNORED,
    batch_documents,
    batch_tokens,
    check_multiple,
    is_packed,
    multiple_setting,
    pack_tokens,
    padded_length,
)
from task_encoders.parts.tokenizer import Ids, Tokenize, Tokenizer, as_tokenizer, joined
from task_encoders.parts.video_tokens import VideoFrames, VideoTokens
from task_encoders.parts.vision import Vision


class MixedTokens:
    """Sequence under construction: add texts and media in order, then call `item`.

    The texts are tokenized together, with the text of a medium's token in place of each image, video or audio. If the
    tokenizer is a function, which has no such text, the texts before and after a medium are tokenized separately.

    Args:
        tokenizer: The tokenizer of all texts.
        media: The media whose fields an item has.
        rope: Computes the `mrope_ids` of the tokens. None (default): an item has none.
        is_document: Whether to add `bos`, `eos` and the ids that the tokenizer adds around a text (default False).
    """

    def __init__(
        self, tokenizer: Tokenizer, *media: Medium, rope: MRope | None = None, is_document: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._media = media
        self._rope = rope
        self._is_document = is_document
        self._text = ""  # text that is not tokenized yet
        self._ranges: list[tuple[int, int]] = []  # ranges of characters of `_text` that contribute to the loss
        self._media_in_text: list[MediumTokens] = []  # media whose tokens are in `_text`
        self._pieces: list[Ids] = []
        self._targets: list[NDArray[np.bool_]] = []  # for each piece, which tokens contribute to the loss
        self._runs: list[int | Grid] = []  # lengths of runs of plain tokens, and grids of media, in order
        self._media_tokens: list[MediumTokens] = []
        if is_document:
            self._append(tokenizer.before, target=False)

    def add_text(self, text: str, *, target: bool) -> None:
        """Append a text, whose tokens contribute to the loss if `target`."""
        start, end = len(self._text), len(self._text) + len(text)
        self._text += text
        if target and text:
            is_continued = bool(self._ranges) and self._ranges[-1][1] == start
            self._ranges.append((self._ranges.pop()[0] if is_continued else start, end))

    def add(self, pieces: Iterable[str | MediumTokens]) -> None:
        """Append the texts and tokens that `medium.pieces(…)` yields.

        They do not contribute to the loss.
        """
        for piece in pieces:
            if isinstance(piece, str):
                self.add_text(piece, target=False)
            elif (text := self._tokenizer.text_of(piece.medium.token)) is not None:
                self.add_text(text, target=False)
                self._media_in_text.append(piece)
            else:
                self._tokenize()
                self._append_medium(piece)

    @property
    def size(self) -> tuple[int, int]:
        """The number of tokens, and that of image tiles and video steps together."""
        self._finish()
        grids = [grid for medium_tokens in self._media_tokens for grid in medium_tokens.grids]
        return sum(map(len, self._pieces)), sum(grid.steps for grid in grids)

    def item(self) -> dict[str, Any]:
        """Return the item of the sequence.

        It has `tokens` and `labels`, int64 (n,), the fields of all media, and with `rope` `mrope_ids`, int64 (n, 3).
        """
        self._finish()
        tokens = joined(self._pieces) if self._pieces else torch.empty(0, dtype=torch.int64)
        is_target = torch.from_numpy(np.concatenate([*self._targets, np.empty(0, np.bool_)]))
        labels = torch.full_like(tokens, IGNORED)
        labels[:-1] = torch.where(is_target[1:], tokens[1:], IGNORED)
        fields: dict[str, Any] = {"tokens": tokens, "labels": labels}
        if self._rope is not None:
            fields["mrope_ids"] = self._rope.positions(self._runs)
        for medium in self._media:
            fields_of_kind = [own.fields for own in self._media_tokens if own.medium.kind == medium.kind]
            fields |= join_fields([medium.empty(), *fields_of_kind])
        return fields

    def _finish(self) -> None:
        """Tokenize the remaining text, and add the tokens after a document."""
        self._tokenize()
        if self._is_document:
            self._append(self._tokenizer.after(self._pieces[-1] if self._pieces else ()), target=True)
            self._is_document = False

    def _tokenize(self) -> None:
        """Tokenize the pending text. Raises ValueError if the text itself has a token of a medium."""
        ids, mask = self._tokenizer.marked(self._text, self._ranges)
        media = self._media_in_text
        self._text, self._ranges, self._media_in_text = "", [], []
        kinds = {medium.token: medium.kind for medium in self._media}
        positions = [position for position, token in enumerate(ids) if token in kinds]
        expected = [piece.medium.token for piece in media]
        if [ids[position] for position in positions] != expected:
            token = next(token for token in kinds if expected.count(token) != list(ids).count(token))
            raise ValueError(
                f"the text itself has the {kinds[token]} token {token}, which stands for {kinds[token]}s. Remove it"
            )
        start = 0  # of the text after the last medium
        for position, piece in zip(positions, media, strict=True):
            self._append(ids[start:position], target=mask[start:position])
            self._append_medium(piece)
            start = position + 1
        self._append(ids[start:], target=mask[start:])

    def _append_medium(self, piece: MediumTokens) -> None:
        """Append the tokens of a medium, and their grids or, of audio, their number."""
        self._append([piece.medium.token] * piece.tokens, target=False, runs=piece.grids or [piece.tokens])
        self._media_tokens.append(piece)

    def _append(self, ids: Ids, *, target: bool | NDArray[np.bool_], runs: Sequence[int | Grid] = ()) -> None:
        """Append ids, which are one run of text unless `runs` has others.

        `target` says which of the ids, or whether all of them, contribute to the loss.
        """
        if len(ids):
            self._pieces.append(ids)
            self._targets.append(np.broadcast_to(np.asarray(target), (len(ids),)))
            self._runs += runs or [len(ids)]


_TOKEN_FIELDS = ("tokens", "labels", "mrope_ids")  # fields with a row per token


def media_spans(item: dict[str, Any], medium: Medium) -> list[tuple[int, int]]:
    """Return the start and the end of the tokens of each image, video or audio.

    The span of an image includes the texts between its tiles.
    """
    positions = (item["tokens"] == medium.token).nonzero().flatten().tolist()
    spans = []
    first = 0  # index in `positions` of the first token of a medium
    for count in medium.token_counts(item):
        spans.append((positions[first], positions[first + count - 1] + 1))
        first += count
    return spans


class MixedEncoder(TaskEncoder):
    """Base class of encoders whose items are built by `MixedTokens`.

    Without `vision`, `video` and `audio`, items have only text. The rows of a batch have `max_length` tokens or,
    without it, the length of the longest row. Each document of a pack, and each row, is padded to a multiple of
    `multiple` tokens.
    """

    global_rng = False  # no random numbers are drawn

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        vision: Vision | None,
        max_length: int | None = None,
        part: str = "json",
        multiple: int = 1,
        video: VideoTokens | VideoFrames | None = None,
        audio: AudioTokens | None = None,
        rope: MRope | None = None,
        eos: bool | int | str | None = None,
    ) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1 token, not {max_length}")
        check_multiple(multiple, max_length)
        self.tokenizer = as_tokenizer(tokenizer).ending(eos)
        self.multiple = multiple
        self.vision = vision
        self.max_length = max_length
        self.part = part
        self.video = video
        self.audio = audio
        self.rope = rope
        chosen = [vision, video if isinstance(video, VideoTokens) else None, audio]
        self.media: tuple[Medium, ...] = tuple(medium for medium in chosen if medium is not None)
        _check_media(self.media, vision, video)
        for medium in self.media:
            self.tokenizer.text_of(medium.token)

    def media_of(self, sample: Sample, *, headers: bool = False) -> SampleMedia:
        """Return the parts of a sample to which its text may refer.

        With `headers`, images are not decoded, but are the headers that `sample.media(part)` returns.
        """
        read = Sample.media if headers else self.vision.image if self.vision else Sample.image
        texts = {"video": self.video.text if self.video else "", "audio": self.audio.text if self.audio else ""}
        named = {kind: text for kind, text in texts.items() if text}
        images = SampleImages(sample, cast(ReadImage, read), exif=self.vision.exif if self.vision else True)
        return SampleMedia(images, sample, takes_images=self.vision is not None, **named)

    def pieces(self, sample: Sample, part: ShownMedia) -> Iterator[str | MediumTokens]:
        """Yield the texts and tokens of an image, video or audio of a sample.

        Raises ValueError if it is damaged, or if the encoder does not take it.
        """
        if not isinstance(part, MediaPart):
            yield from self._medium("image").pieces(self._medium("image").tokenize(part))
        elif isinstance(self.video, VideoFrames) and part.kind == "video":
            assert self.vision is not None
            with sample.video(part.name) as video:
                yield from self.video.pieces(self.video.tokenize(video, self.vision), self.vision)
        else:
            medium = self._medium(part.kind)
            with sample.video(part.name) if part.kind == "video" else sample.audio(part.name) as opened:
                yield from medium.pieces(medium.tokenize(opened))

    def measured_pieces(self, sample: Sample, part: ShownMedia) -> Iterator[str | MediumTokens]:
        """Yield the texts and tokens from the header of a medium alone, without tensors.

        Raises `Unmeasured` if the header does not suffice.
        """
        info = cast(MediaHeader, sample.media(part.name) if isinstance(part, MediaPart) else part)
        if isinstance(self.video, VideoFrames) and media_kind(part) == "video":
            assert self.vision is not None
            return self.video.pieces(self.video.measure(info, self.vision), self.vision)
        medium = self._medium(media_kind(part))
        return medium.pieces(medium.measure(info))

    def _medium(self, kind: str) -> Medium:
        """Return the encoder's `Vision`, `VideoTokens` or `AudioTokens` for this kind."""
        return next(medium for medium in self.media if medium.kind == kind)

    def length(self, item: dict[str, Any]) -> int:
        """Return the number of tokens, with media and the padding to a multiple."""
        return padded_length(len(item["tokens"]), self.multiple)

    def images(self, item: dict[str, Any]) -> int:
        """Return the number of image tiles and video steps, the inputs of a vision model."""
        steps = int(item["video_grids"][:, 0].sum()) if isinstance(self.video, VideoTokens) else 0
        return steps + (len(item["grids"]) if self.vision else 0)

    def cut(self, item: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the tokens `start` to `stop - 1` of an item, as an item.

        The last label is the token after them. Raises ValueError if an image, video or audio would be cut.
        """
        fields = {name: item[name][start:stop] for name in _TOKEN_FIELDS if name in item}
        if len(fields.get("mrope_ids", ())):
            fields["mrope_ids"] = fields["mrope_ids"] - fields["mrope_ids"].min()
        for medium in self.media:
            inside = []  # indices of the media within the range
            for index, (first, end) in enumerate(media_spans(item, medium)):
                if start <= first and end <= stop:
                    inside.append(index)
                elif first < stop and start < end:
                    where = f"the {medium.kind} at {first} to {end}"
                    raise ValueError(f"tokens {start} to {stop} cut through {where}. Pack such items whole")
            fields |= medium.select(item, inside[0], inside[-1] + 1) if inside else medium.select(item, 0, 0)
        return fields

    def pack(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build one pack, with the tokens of `pack_tokens` and all media in order."""
        pack = pack_tokens(items, pad=self.tokenizer.pad, multiple=self.multiple)
        if self.rope is not None:
            pack["mrope_ids"] = torch.cat([pad_positions(item["mrope_ids"], self.length(item)) for item in items])
        media = [{name: field for name, field in item.items() if name not in _TOKEN_FIELDS} for item in items]
        return {**pack, **join_fields(media)}

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build a batch of packs or items, with the fields of each medium.

        `batch_tokens` builds it of B packs, and `batch_documents` of B items.

        With `rope`, it also has `mrope_ids`, int64 (B, T, 3).
        """
        pad, length = self.tokenizer.pad, self.max_length
        if is_packed(items):
            items = [item if "cu_seqlens" in item else self.pack([item], rng) for item in items]
            batch = batch_tokens(items, pad=pad, length=length)
        else:
            batch = batch_documents(items, pad=pad, length=length, multiple=self.multiple)
        if self.rope is not None:
            width = batch["tokens"].shape[1]
            batch["mrope_ids"] = torch.stack([pad_positions(row["mrope_ids"], width, start=0) for row in items])
        for medium in self.media:
            joint = join_fields([{name: row[name] for name in medium.empty()} for row in items])
            batch |= medium.batch(joint, torch.tensor([len(medium.token_counts(row)) for row in items]))
        return batch

    def settings(self) -> dict[str, Any]:
        """Return every argument, and for the tokenizer its identity and special ids."""
        vision = self.vision.settings() if self.vision else {"tiles": None}
        own = {"max_length": self.max_length, "part": self.part, **multiple_setting(self.multiple)}
        optional = {"video": self.video, "audio": self.audio, "mrope": self.rope}
        media = {name: part.settings() for name, part in optional.items() if part is not None}
        return {**self.tokenizer.settings(), **vision, **own, **media}


def _check_media(media: Sequence[Medium], vision: Vision | None, video: VideoTokens | VideoFrames | None) -> None:
    """Raise ValueError unless the kinds of media have different tokens and placeholders, and frames fit `vision`."""
    if isinstance(video, VideoFrames):
        if vision is None:
            raise ValueError("VideoFrames shows frames as images. Pass vision=Vision(...) to the encoder too")
        frame_tiles, image_tiles = video.tiles, vision.tiles
        if (frame_tiles.patch, frame_tiles.merge) != (image_tiles.patch, image_tiles.merge):
            raise ValueError(
                f"VideoFrames has tiles of patch={frame_tiles.patch} and merge={frame_tiles.merge}, Vision of "
                f"{image_tiles.patch} and {image_tiles.merge}. Pass the tiles of Vision as tiles="
            )
    texts = [medium.text for medium in media] + ([video.text] if isinstance(video, VideoFrames) else [])
    if len(set(texts)) < len(texts) or len({medium.token for medium in media}) < len(media):
        raise ValueError("vision, video and audio share a token or text=. Give each its own")
