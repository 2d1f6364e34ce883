"""`InterleavedEncoder`: documents with images, videos and audio between texts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from savable_pipeline import Rng, Sample, Skip
from task_encoders.parts.data_formats import parse_document
from task_encoders.parts.image_text_tokens import MixedEncoder, MixedTokens, media_spans
from task_encoders.parts.token_packing import with_target
from task_encoders.parts.vision import Vision


class InterleavedEncoder(MixedEncoder):
    """Predicts the text of a document that has images between its texts.

    Documents are JSON in the format of OBELICS or MMC4 (parts/data_formats.py), with images, videos and audio as parts
    of the sample. The texts are tokenized as a whole, with the text of `token` in place of each image.

    Args:
        tokenizer: A function from text to token ids, an object with `encode(text)` as of Hugging Face, tiktoken or
            SentencePiece, or a `Tokenizer` to add special ids. None takes the UTF-8 bytes, 259 ids in all.
        vision: How images become tokens.
        max_length: The most tokens of an item, and the length of a batch's rows. A longer document becomes several
            items, but no image, video or audio is cut. None (default): documents are not cut, and rows are as long as
            the longest.
        part: The part that holds the document.
        multiple: Each document of a pack, and each row, is padded to a multiple of this many tokens: 2 · cp for context
            parallelism over cp ranks. `length` counts the padding.
        video: How videos become tokens: `VideoTokens` or, as images, `VideoFrames`. None (default): videos among the
            parts are ignored.
        audio: How audio becomes tokens. None (default): audio parts are ignored.
        rope: `MRope()` adds positions in time, height and width. None (default): none.
        eos: The end of a document, for a tokenizer that adds none: True for its own `eos_token`, a token as text or id,
            False for none. It is required where such a tokenizer has special tokens. It is added once, at the true end.

    An item has `tokens` and `labels`, int64 (n,): a label is the next token, -100 if it does not contribute to the
    loss. A batch of B rows has `tokens`, `labels` and `position_ids`, int64 (B, T), and of B items that are not packed
    `lengths`, int64 (B,), the tokens of each. A batch of packs has `cu_seqlens`, int32 (segments + 1,), where each
    document and each row's padding starts among the B * T tokens; and `max_seqlen`, int, the longest of them.

    An item also has `patches`, uint8 (p, 3, patch, patch); `grids`, int64 (tiles, 2), the rows and columns of patches
    in each tile; and `tile_counts`, int64 (images,). A batch has `patches`, float32 and normalized, `grids` and
    `tile_counts` of all rows in order; `image_counts`, int64 (B,), the images of each row; and for attention within
    tiles `patch_cu_seqlens`, int32 (tiles + 1,), and `patch_max_seqlen`, int.

    With `VideoTokens`, an item also has `video_patches`, uint8 (p, 3, step, patch, patch), in the order of Qwen2.5-VL's
    `pixel_values_videos`; `video_grids`, int64 (videos, 3), its `video_grid_thw`; and `video_seconds`, float64
    (videos,), its `second_per_grid_ts`. With `audio`, `audio_mels`, float32 (frames, bins), and `audio_frames`, int64
    (sounds,). With `rope`, `mrope_ids`, int64 (n, 3). A batch has those of all rows in order, `video_patches` float32
    and normalized; `video_counts` and `audio_counts`, int64 (B,), of each row; and `mrope_ids`, int64 (B, T, 3).

    A sample is skipped as "no json" (the name of `part`), "empty", or "image longer than max_length" (or
    "video", or "audio"); an item of images alone as "no target".

    Raises:
        ValueError: A setting or a field is invalid, or a video or audio part is damaged. The message names it.
        JSONDecodeError: The document is no JSON.
        OSError: An image is damaged.

    Example:
        ```python
        from task_encoders import InterleavedEncoder, NativeSize, Vision
        encoder = InterleavedEncoder(vision=Vision(NativeSize(), token=300))
        lane = sp.Lane()  # to inspect batches; a loader calls a pipeline function with its own lanes
        items = sp.Encode(sp.TarShardReader("shards/", lane), encoder)
        batch = next(sp.Batcher(items, size=2))
        batch["image_counts"]     # tensor([1, 1])
        batch["patches"].shape    # torch.Size([32, 3, 14, 14])
        ```
    """

    vision: Vision  # required here

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip | Iterator[dict[str, Any] | Skip]:
        """Return one item, an iterator of items for a long document, or `Skip`."""
        if self.part not in sample:
            return Skip(f"no {self.part}")
        document = parse_document(sample.json(self.part), self.media_of(sample))
        if not document:
            return Skip("empty")
        mixed = MixedTokens(self.tokenizer, *self.media, rope=self.rope, is_document=True)
        for part in document:
            if isinstance(part, str):
                mixed.add_text(part, target=True)
            else:
                mixed.add(self.pieces(sample, part))
        item = mixed.item()
        if self.max_length is None or len(item["tokens"]) <= self.max_length:
            return with_target(item)
        return self._cut(item, self.max_length)

    def _cut(self, item: dict[str, Any], max_length: int) -> Skip | Iterator[dict[str, Any] | Skip]:
        """Cut an item into items of at most `max_length` tokens, but not within an image, video or audio."""
        start = 0
        borders = [start]
        spans = [(first, end, medium.kind) for medium in self.media for first, end in media_spans(item, medium)]
        for first, end, kind in spans:
            if end - first > max_length:
                return Skip(f"{kind} longer than max_length")
        while start < len(item["tokens"]):
            stop = min(start + max_length, len(item["tokens"]))
            # if `stop` is within a medium, the cut is before that medium
            start = next((first for first, end, _ in spans if first < stop < end), stop)
            borders.append(start)
        return (with_target(self.cut(item, start, stop)) for start, stop in pairwise(borders))
