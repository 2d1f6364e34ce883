"""`ContrastiveEncoder`: pairs of an image or video clip and a text, as for CLIP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from savable_pipeline import Clips, Rng, Sample, Skip, TaskEncoder
from task_encoders.parts.sample_parts import Field, named_part
from task_encoders.parts.square_crop import SquareCrop
from task_encoders.parts.token_packing import pad_rows
from task_encoders.parts.tokenizer import Tokenize, Tokenizer, as_tokenizer


class ContrastiveEncoder(TaskEncoder):
    """Predicts which text of a batch belongs to which image or video.

    See Radford et al.: CLIP, 2021.

    Args:
        tokenizer: A function from text to token ids, an object with `encode(text)` as of Hugging Face, tiktoken or
            SentencePiece, or a `Tokenizer` to add special ids. None takes the UTF-8 bytes, 259 ids in all.
        text: The part that has the text, or the field of a JSON part: "txt", "json[caption]". If the field is a list
            of texts, one is drawn per sample and epoch.
        crop: The size and augmentation of the images. None (default): `SquareCrop()`. Frames of a clip are cropped by
            the same box.
        max_tokens: A longer text is truncated to this many tokens. The text's last token stays, because models use it
            as the end of the text.
        clips: Pair the text with clips of the sample's video: `sp.Clips(length_s=2.0, fps=8)` draws one per sample and
            epoch. Several clips of a video are several items. None (default): pair it with an image.
        video: The part that has the video. None (default): the first part that is a video by its name.

    An item has `image`, uint8 (3, size, size), and `tokens`, int64 (n,). A batch of B pairs has `image`, float32 (B, 3,
    size, size), normalized; `tokens`, int64 (B, T), padded; and `lengths`, int64 (B,), the number of tokens of each
    text. With `clips`, they have `video` instead of `image`: uint8 (frames, 3, size, size), and float32 (B, frames, 3,
    size, size).

    A sample is skipped as "no image", as "no video", or as "no text" (missing or empty).

    Raises:
        ValueError: A setting is out of its range, the field is neither a text nor a list of texts, or a video is
            damaged.
        JSONDecodeError: A part is not JSON.
        OSError: An image is damaged.
        ImportError: `clips` is set, but PyAV is not installed.

    Example:
        ```python
        from task_encoders import ContrastiveEncoder, SquareCrop
        lane = sp.Lane()  # to inspect batches; a loader calls a pipeline function with its own lanes
        samples = sp.TarShardReader("shards/", lane, shuffle=False)
        batch = next(sp.Batcher(sp.Encode(samples, ContrastiveEncoder(crop=SquareCrop(32))), size=2))
        batch["image"].shape    # torch.Size([2, 3, 32, 32])
        batch["tokens"].shape   # torch.Size([2, 11])
        batch["lengths"]        # tensor([11, 11])
        ```
    """

    global_rng = False

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        text: str = "txt",
        crop: SquareCrop | None = None,
        max_tokens: int = 77,
        clips: Clips | None = None,
        video: str | None = None,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        self.tokenizer = as_tokenizer(tokenizer)
        self.text = Field(text)
        self.crop = crop or SquareCrop()
        self.max_tokens = max_tokens
        self.clips, self.video = clips, video

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip | Iterator[dict[str, Any] | Skip]:
        """Return one item, an iterator of the items of clips, or `Skip`."""
        if self.clips is None:
            image = self.crop.image(sample, rng)
            return Skip("no image") if image is None else self._pair("image", image, sample, rng)
        part = named_part(sample, self.video, "video")
        if part is None:
            return Skip("no video")

        def pair(clip: Any) -> dict[str, Any] | Skip:
            return self._pair("video", self.crop.clip(clip.frames, rng), sample, rng)

        items: Iterator[dict[str, Any] | Skip] = self.clips.of(sample.video(part), rng, make=pair)
        return items

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build a batch of B pairs."""
        texts = [item["tokens"] for item in items]
        medium = "image" if self.clips is None else "video"
        return {
            medium: self.crop.normalize(torch.stack([item[medium] for item in items])),
            "tokens": pad_rows(texts, self.tokenizer.pad, max(map(len, texts))),
            "lengths": torch.tensor([len(text) for text in texts]),
        }

    def settings(self) -> dict[str, Any]:
        """Return every argument, and for the tokenizer its identity and special ids."""
        own = {"text": self.text.name, "max_tokens": self.max_tokens}
        clips = {} if self.clips is None else {"clips": self.clips.settings(), "video": self.video}
        return {**self.tokenizer.settings(), **self.crop.settings(), **own, **clips}

    def _pair(self, name: str, medium: torch.Tensor, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """Return the item of an image or clip and its text, which is cut to `max_tokens`."""
        tokens = self.tokenizer(self._text(sample, rng))
        if len(tokens) == 0:
            return Skip("no text")
        if len(tokens) > self.max_tokens:
            tokens = torch.cat([tokens[: self.max_tokens - 1], tokens[-1:]])
        return {name: medium, "tokens": tokens}

    def _text(self, sample: Sample, rng: Rng) -> str:
        """Return the text of a sample, or one at random if it has several."""
        value = self.text.read(sample)
        texts = value if isinstance(value, list) else [value or ""]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{self.text.name}: expected text or a list of texts, found {value!r:.80}")
        return rng.choice(texts) if texts else ""
