"""Tokens of text, images, videos and audio in one sequence, and their packs.

It also has batches of these, and the base class of their encoders.

`ab`, an image of 2 × 4 patches, 2 × 2 to a token (`#`), and `c`; predicted are `b` and `c`:

    tokens       a b # # c
    labels       b - - c -     never an image
    patches      8 of them, row by row
    grids        2 4           rows and columns of each tile
    tile_counts  1             tiles of each image

Image features take the places of `#` in order: those of a batch, read row by row, are those of `patches`. So do the
features of videos and of sounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from savable_pipeline import Rng, Sample, TaskEncoder
from task_encoders.parts.audio_tokens import AudioTokens
from task_encoders.parts.medium import Grid, MediaHeader, Medium, MediumTokens, MRope, join_fields, lengthened
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

    The texts are tokenized together, with the text of the medium's token in the place of each image, video or sound. A
    function, which has no such text, tokenizes what is before and behind it by itself.

    Args:
        tokenizer: The tokenizer of all texts.
        media: Those whose fields an item has.
        rope: Gives each token its `mrope_ids`; None: there are none.
        is_document: The sequence gets what the tokenizer adds around a text, `bos` and `eos`.
    """

    def __init__(
        self, tokenizer: Tokenizer, *media: Medium, rope: MRope | None = None, is_document: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._media = media
        self._rope = rope
        self._is_document = is_document
        self._text = ""  # of one tokenization
        self._ranges: list[tuple[int, int]] = []  # of its characters that are targets
        self._due: list[MediumTokens] = []  # whose places are in this text
        self._pieces: list[Ids] = []
        self._targets: list[NDArray[np.bool_]] = []  # of each piece
        self._runs: list[int | Grid] = []  # the numbers of tokens that follow each other, and the grids of others
        self._media_tokens: list[MediumTokens] = []
        if is_document:
            self._append(tokenizer.before, False)

    def add_text(self, text: str, *, target: bool) -> None:
        """Append a text, whose tokens contribute to the loss if `target`."""
        begin, end = len(self._text), len(self._text) + len(text)
        self._text += text
        if target and text:
            is_continued = bool(self._ranges) and self._ranges[-1][1] == begin
            self._ranges.append((self._ranges.pop()[0] if is_continued else begin, end))

    def add(self, pieces: Iterable[str | MediumTokens]) -> None:
        """Append texts and what a medium made, none of it learned: `medium.pieces(thing)`."""
        for piece in pieces:
            if isinstance(piece, str):
                self.add_text(piece, target=False)
            elif (text := self._tokenizer.text_of(piece.medium.token)) is not None:
                self.add_text(text, target=False)
                self._due.append(piece)
            else:
                self._tokenize()
                self._append_medium(piece)

    @property
    def size(self) -> tuple[int, int]:
        """The number of tokens, and of tiles and steps of videos."""
        self._finish()
        return sum(map(len, self._pieces)), sum(grid.steps for each in self._media_tokens for grid in each.grids)

    def item(self) -> dict[str, Any]:
        """Return the item of the sequence.

        It has `tokens` and `labels`, int64 (n,), the fields of all media, and with `rope` `mrope_ids`, int64 (n, 3).
        """
        self._finish()
        tokens = joined(self._pieces) if self._pieces else torch.empty(0, dtype=torch.int64)
        target = torch.from_numpy(np.concatenate([*self._targets, np.empty(0, np.bool_)]))
        labels = torch.full_like(tokens, IGNORED)
        labels[:-1] = torch.where(target[1:], tokens[1:], IGNORED)
        fields: dict[str, Any] = {"tokens": tokens, "labels": labels}
        if self._rope is not None:
            fields["mrope_ids"] = self._rope.positions(self._runs)
        for medium in self._media:
            fields |= join_fields(
                [medium.empty(), *(each.fields for each in self._media_tokens if each.medium.kind == medium.kind)]
            )
        return fields

    def _finish(self) -> None:
        self._tokenize()
        if self._is_document:
            self._append(self._tokenizer.after(self._pieces[-1] if self._pieces else ()), True)
            self._is_document = False

    def _tokenize(self) -> None:
        """Append the tokens of the texts. Raises ValueError if one of them stands for an image, video or sound."""
        ids, mask = self._tokenizer.marked(self._text, self._ranges)
        due, self._text, self._ranges, self._due = self._due, "", [], []
        kinds = {medium.token: medium.kind for medium in self._media}
        positions = [position for position, token in enumerate(ids) if token in kinds]
        wanted = [piece.medium.token for piece in due]
        if [ids[position] for position in positions] != wanted:
            token = next(token for token in kinds if wanted.count(token) != list(ids).count(token))
            raise ValueError(
                f"the text itself has the {kinds[token]} token {token}, which stands for {kinds[token]}s. Remove it"
            )
        done = 0
        for position, piece in zip(positions, due, strict=True):
            self._append(ids[done:position], mask[done:position])
            self._append_medium(piece)
            done = position + 1
        self._append(ids[done:], mask[done:])

    def _append_medium(self, piece: MediumTokens) -> None:
        self._append([piece.medium.token] * piece.tokens, False, piece.grids or [piece.tokens])
        self._media_tokens.append(piece)

    def _append(self, ids: Ids, target: bool | NDArray[np.bool_], runs: Sequence[int | Grid] = ()) -> None:
        if len(ids):
            self._pieces.append(ids)
            self._targets.append(np.broadcast_to(np.asarray(target), (len(ids),)))
            self._runs += runs or [len(ids)]


_OF_TOKENS = ("tokens", "labels", "mrope_ids")


def places(item: dict[str, Any], medium: Medium) -> list[tuple[int, int]]:
    """Return the ranges of the tokens of each image, video or audio.

    They include texts between tiles.
    """
    tokens = (item["tokens"] == medium.token).nonzero().flatten().tolist()
    found, first = [], 0
    for count in medium.token_counts(item):
        found.append((tokens[first], tokens[first + count - 1] + 1))
        first += count
    return found


class MixedEncoder(TaskEncoder):
    """Base class of encoders whose items are those of `MixedTokens`.

    Without `vision`, `video` or `audio`, they are text alone.

    Batches are `max_length` long; without it, as long as their longest row. Each document of a pack, and each row, is
    padded to a multiple of `multiple` tokens.
    """

    global_rng = False  # draws nothing

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
        own = [vision, video if isinstance(video, VideoTokens) else None, audio]
        self.media: tuple[Medium, ...] = tuple(medium for medium in own if medium is not None)
        _check_media(self.media, vision, video)
        for medium in self.media:
            self.tokenizer.text_of(medium.token)

    def media_of(self, sample: Sample, *, headers: bool = False) -> SampleMedia:
        """Return the parts of a sample to which its text may refer.

        With `headers`, images are `sample.media(part)`.
        """
        read = Sample.media if headers else self.vision.image if self.vision else Sample.image
        texts = {"video": self.video.text if self.video else "", "audio": self.audio.text if self.audio else ""}
        named = {kind: text for kind, text in texts.items() if text}
        images = SampleImages(sample, cast(ReadImage, read), exif=self.vision.exif if self.vision else True)
        return SampleMedia(images, sample, sees=self.vision is not None, **named)

    def pieces(self, sample: Sample, part: ShownMedia) -> Iterator[str | MediumTokens]:
        """What stands in the tokens for an image, a video or a sound of a sample.

        Raises ValueError where it is damaged, or the encoder cannot see it.
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
        """Return the same without fields, by headers alone.

        Raises `Unmeasured` if these do not say enough.
        """
        info = cast(MediaHeader, sample.media(part.name) if isinstance(part, MediaPart) else part)
        if isinstance(self.video, VideoFrames) and media_kind(part) == "video":
            assert self.vision is not None
            return self.video.pieces(self.video.measure(info, self.vision), self.vision)
        medium = self._medium(media_kind(part))
        return medium.pieces(medium.measure(info))

    def _medium(self, kind: str) -> Medium:
        return next(medium for medium in self.media if medium.kind == kind)

    def length(self, item: dict[str, Any]) -> int:
        """The number of tokens, those of images and the padding to a multiple among them."""
        return padded_length(len(item["tokens"]), self.multiple)

    def images(self, item: dict[str, Any]) -> int:
        """The number of tiles, and of steps of videos: what a vision model sees."""
        steps = int(item["video_grids"][:, 0].sum()) if isinstance(self.video, VideoTokens) else 0
        return steps + (len(item["grids"]) if self.vision else 0)

    def cut(self, item: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the tokens `start` to `stop - 1` of an item, as an item.

        The last label is the token after them.

        Raises ValueError where that cuts through an image, a video or a sound.
        """
        cut = {name: item[name][start:stop] for name in _OF_TOKENS if name in item}
        if len(cut.get("mrope_ids", ())):
            cut["mrope_ids"] = cut["mrope_ids"] - cut["mrope_ids"].min()
        for medium in self.media:
            inside = []
            for number, (begin, end) in enumerate(places(item, medium)):
                if start <= begin and end <= stop:
                    inside.append(number)
                elif begin < stop and start < end:
                    where = f"the {medium.kind} at {begin} to {end}"
                    raise ValueError(f"tokens {start} to {stop} cut through {where}. Pack such items whole")
            cut |= medium.select(item, inside[0], inside[-1] + 1) if inside else medium.select(item, 0, 0)
        return cut

    def pack(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build one pack: T tokens as in `pack_tokens`, and all media in order."""
        pack = pack_tokens(items, pad=self.tokenizer.pad, multiple=self.multiple)
        if self.rope is not None:
            pack["mrope_ids"] = torch.cat([lengthened(item["mrope_ids"], self.length(item)) for item in items])
        others = [{name: field for name, field in item.items() if name not in _OF_TOKENS} for item in items]
        return {**pack, **join_fields(others)}

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build a batch of B packs (`batch_tokens`) or B items (`batch_documents`).

        It has the fields of each medium too.

        With `rope`, also `mrope_ids`, int64 (B, T, 3).
        """
        pad, length = self.tokenizer.pad, self.max_length
        if is_packed(items):
            items = [item if "cu_seqlens" in item else self.pack([item], rng) for item in items]
            batch = batch_tokens(items, pad=pad, length=length)
        else:
            batch = batch_documents(items, pad=pad, length=length, multiple=self.multiple)
        if self.rope is not None:
            width = batch["tokens"].shape[1]
            batch["mrope_ids"] = torch.stack([lengthened(row["mrope_ids"], width, begin=0) for row in items])
        for medium in self.media:
            joint = join_fields([{name: row[name] for name in medium.empty()} for row in items])
            batch |= medium.batch(joint, torch.tensor([len(medium.token_counts(row)) for row in items]))
        return batch

    def settings(self) -> dict[str, Any]:
        """Every argument; the tokenizer by its identity and special ids."""
        vision = self.vision.settings() if self.vision else {"tiles": None}
        own = {"max_length": self.max_length, "part": self.part, **multiple_setting(self.multiple)}
        added = {"video": self.video, "audio": self.audio, "mrope": self.rope}
        later = {name: part.settings() for name, part in added.items() if part is not None}
        return {**self.tokenizer.settings(), **vision, **own, **later}


def _check_media(media: Sequence[Medium], vision: Vision | None, video: VideoTokens | VideoFrames | None) -> None:
    """Raise ValueError unless each medium can be told from the others."""
    if isinstance(video, VideoFrames):
        if vision is None:
            raise ValueError("VideoFrames shows frames as images. Pass vision=Vision(...) to the encoder too")
        (patch, merge), (own_patch, own_merge) = ((tiles.patch, tiles.merge) for tiles in (video.tiles, vision.tiles))
        if (patch, merge) != (own_patch, own_merge):
            raise ValueError(
                f"VideoFrames has tiles of patch={patch} and merge={merge}, Vision of {own_patch} and {own_merge}. "
                "Pass the tiles of Vision as tiles="
            )
    texts = [medium.text for medium in media] + ([video.text] if isinstance(video, VideoFrames) else [])
    if len(set(texts)) < len(texts) or len({medium.token for medium in media}) < len(media):
        raise ValueError("vision, video and audio share a token or text=. Give each its own")
