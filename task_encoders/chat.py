"""`ChatEncoder`: conversations with images, videos and audio as tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from savable_pipeline import Rng, Sample, Skip
from task_encoders.parts.audio_tokens import AudioTokens
from task_encoders.parts.chat_template import ChatML, ChatTemplate, OwnTemplate, answers_in
from task_encoders.parts.data_formats import CONVERSATIONS, parse_conversation, read_record, reject_preferences
from task_encoders.parts.image_text_tokens import MixedEncoder, MixedTokens
from task_encoders.parts.medium import MediumTokens, MRope, Unmeasured
from task_encoders.parts.sample_parts import SampleMedia, ShownMedia, media_kind
from task_encoders.parts.token_packing import padded_length
from task_encoders.parts.tokenizer import Tokenize, Tokenizer
from task_encoders.parts.video_tokens import VideoFrames, VideoTokens
from task_encoders.parts.vision import Vision


class _ChatText(NamedTuple):
    """A conversation as text, the ranges of the answers to train on, and the media that it shows."""

    text: str
    answers: list[tuple[int, int]]
    shown: list[ShownMedia]


class ChatEncoder(MixedEncoder):
    """Trains on the answers of the assistant in a conversation with media.

    Conversations are JSON in the formats of OpenAI, TRL, LLaVA, LLaMA-Factory, ms-swift or FineVision
    (parts/data_formats.py). Images, videos and audio are parts of the sample and may be anywhere in the text. Each
    process logs the format once, by `logging.info`. The template writes the whole text, with the sample's `tools`, and
    it is tokenized as a whole. A token contributes to the loss if one of its characters belongs to an answer, as in
    `apply_chat_template(…, return_assistant_tokens_mask=True)`.

    Args:
        tokenizer: A function from text to token ids, an object with `encode(text)` as of Hugging Face, tiktoken or
            SentencePiece, or a `Tokenizer` to add special ids. None takes the UTF-8 bytes, 259 ids in all. `bos` and
            `eos` are not added: the chat template adds its own.
        vision: How images become tokens. None (default): a conversation with images is an error.
        template: How messages become text: `ChatML`, `OwnTemplate`, or your own `ChatTemplate`. None (default): the
            template of a tokenizer of `transformers`, else `ChatML()`.
        answers: "all" (default) trains on every answer with its end token or, if the template has `{% generation %}`,
            on the text within. "last" trains on the last answer only. Text after the last answer is dropped.
        max_length: The most tokens of a conversation, and the length of a batch's rows. None (default): any length, and
            rows are as long as the longest.
        part: The part that holds the conversation. Of samples without `json`, as rows of Parquet are, it is the column
            `messages`, `conversations` or `texts`.
        multiple: Each conversation of a pack, and each row, is padded to a multiple of this many tokens: 2 · cp for
            context parallelism over cp ranks. `length` counts the padding.
        video: How videos become tokens: `VideoTokens` or, as images, `VideoFrames`. None (default): `<video>` is text,
            and videos among the parts are ignored.
        audio: How audio becomes tokens. None (default): `<audio>` is text, and audio parts are ignored.
        rope: `MRope()` adds positions in time, height and width. None (default): none.

    An item has `tokens` and `labels`, int64 (n,): a label is the next token, -100 if it does not contribute to the
    loss. A batch of B rows has `tokens`, `labels` and `position_ids`, int64 (B, T), and of B items that are not packed
    `lengths`, int64 (B,), the tokens of each. A batch of packs has `cu_seqlens`, int32 (segments + 1,), where each
    conversation and each row's padding starts among the B * T tokens; and `max_seqlen`, int, the longest of them.

    With `vision`, an item also has `patches`, uint8 (p, 3, patch, patch); `grids`, int64 (tiles, 2), the rows and
    columns of patches in each tile; and `tile_counts`, int64 (images,). A batch has `patches`, float32 and normalized,
    `grids` and `tile_counts` of all rows in order; `image_counts`, int64 (B,), the images of each row; and for
    attention within tiles `patch_cu_seqlens`, int32 (tiles + 1,), and `patch_max_seqlen`, int.

    With `VideoTokens`, an item also has `video_patches`, uint8 (p, 3, step, patch, patch), in the order of Qwen2.5-VL's
    `pixel_values_videos`; `video_grids`, int64 (videos, 3), its `video_grid_thw`; and `video_seconds`, float64
    (videos,), its `second_per_grid_ts`. With `audio`, `audio_mels`, float32 (frames, bins), and `audio_frames`, int64
    (sounds,). With `rope`, `mrope_ids`, int64 (n, 3). A batch has those of all rows in order, `video_patches` float32
    and normalized; `video_counts` and `audio_counts`, int64 (B,), of each row; and `mrope_ids`, int64 (B, T, 3).

    A sample is skipped as "no json or messages or …" (the parts that were searched), "no answer" (none contributes to
    the loss), "no answer, but the role 'bot'" (as before, and one is of another role), "special token in text" (it
    would start or end a message) or "longer than max_length".

    Raises:
        ValueError: A setting or a field is invalid, or a video or audio part is damaged. The message names it.
        JSONDecodeError: The conversation is no JSON.
        OSError: An image is damaged.

    Example:
        ```python
        from task_encoders import ChatEncoder, NativeSize, Vision
        encoder = ChatEncoder(vision=Vision(NativeSize(), token=300), max_length=128)
        lane = sp.Lane()  # to inspect batches; a loader calls a pipeline function with its own lanes
        items = sp.Encode(sp.TarShardReader("shards/", lane), encoder)
        batch = next(sp.Batcher(items, size=2))
        batch["tokens"].shape                   # torch.Size([2, 128])
        int((batch["tokens"] == 300).sum())     # 8
        ```
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        vision: Vision | None = None,
        template: ChatTemplate | None = None,
        answers: Literal["all", "last"] = "all",
        max_length: int | None = None,
        part: str = "json",
        multiple: int = 1,
        video: VideoTokens | VideoFrames | None = None,
        audio: AudioTokens | None = None,
        rope: MRope | None = None,
    ) -> None:
        if answers not in ("all", "last"):
            raise ValueError(f"answers must be 'all' or 'last', not {answers!r}")
        super().__init__(
            tokenizer,
            vision=vision,
            max_length=max_length,
            part=part,
            multiple=multiple,
            video=video,
            audio=audio,
            rope=rope,
            eos=False,  # the template writes the ends
        )
        self.template = template or _template_of(self.tokenizer)
        self.answers = answers
        self._placeholder_texts = {
            kind: medium.text for kind, medium in zip(Sample.KINDS, (vision, video, audio), strict=True) if medium
        }
        specials = sorted(self.tokenizer.special_texts() - {*self._placeholder_texts.values()})
        # The pattern (?!) matches nothing.
        self._placeholders = re.compile(f"({'|'.join(map(re.escape, self._placeholder_texts.values())) or '(?!)'})")
        self._special_pattern = re.compile("|".join(map(re.escape, specials)) or r"(?!)")

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """Return one item, or `Skip`."""
        chat = self._render(sample, self.media_of)
        if isinstance(chat, Skip):
            return chat
        item = self._tokenize(chat, partial(self.pieces, sample)).item()
        if self.max_length is not None and len(item["tokens"]) > self.max_length:
            return Skip("longer than max_length")
        return item

    def length_of(self, sample: Sample) -> int | None:
        """Return the number of tokens of a sample's item, from the headers of its media.

        The result is None without `video` and `audio`, if the headers do not suffice, or if the sample is skipped.
        """
        tokens, _ = self._measure(sample) or (None, 0)
        return None if tokens is None else padded_length(tokens, self.multiple)

    def images_of(self, sample: Sample) -> int:
        """Return the number of image tiles and video steps of a sample's item.

        It is 0 if `length_of` is None.
        """
        _, images = self._measure(sample) or (None, 0)
        return images

    def settings(self) -> dict[str, Any]:
        """Return every argument, and hashes for the tokenizer and the template."""
        return {**super().settings(), "template": self.template.settings(), "answers": self.answers}

    def _render(self, sample: Sample, media_of: Callable[[Sample], SampleMedia]) -> _ChatText | Skip:
        """Render a sample's conversation as text, up to the last answer. Return a `Skip` if it cannot be trained on."""
        columns = CONVERSATIONS if self.part == "json" else ()
        if columns:
            reject_preferences(sample)
        name = next((name for name in (self.part, *columns) if name in sample), None)
        if name is None:
            return Skip(f"no {' or '.join((self.part, *columns))}")
        record, arguments = read_record(sample, name)
        messages = parse_conversation(record, media_of(sample))
        if not (answer_indices := [number for number, message in enumerate(messages) if message.is_answer]):
            other_role = min({message.role for message in messages} - {"system", "user", "assistant"}, default="")
            return Skip(f"no answer, but the role {other_role[:20]!r}" if other_role else "no answer")
        parts = [part for message in messages for part in message.parts]
        texts = [part for part in parts if isinstance(part, str)]
        # the template may write these values into the text too
        texts += [
            json.dumps(value, ensure_ascii=False) for value in [arguments, *(one.more for one in messages)] if value
        ]
        if any(map(self._special_pattern.search, texts)):
            return Skip("special token in text")
        until_answer = messages[: answer_indices[-1] + 1]
        shown = [part for message in until_answer for part in message.parts if not isinstance(part, str)]
        if self.vision is None and any(media_kind(part) == "image" for part in shown):
            raise ValueError("the conversation has images, but the encoder has no vision=. Pass vision=Vision(...)")
        image_placeholder = self.vision.text if self.vision else ""
        trained_indices = answer_indices if self.answers == "all" else answer_indices[-1:]
        text, answers = answers_in(self.template, until_answer, trained_indices, image_placeholder, arguments)
        return _ChatText(text, answers, shown)

    def _measure(self, sample: Sample) -> tuple[int, int] | None:
        """Return the numbers of tokens, and of image tiles and video steps; None if `length_of` returns None."""
        if self.video is None and self.audio is None:
            return None
        chat = self._render(sample, partial(self.media_of, headers=True))
        if isinstance(chat, Skip):
            return None
        try:
            tokens, images = self._tokenize(chat, partial(self.measured_pieces, sample)).size
        except Unmeasured:
            return None
        return (tokens, images) if self.max_length is None or tokens <= self.max_length else None

    def _tokenize(self, chat: _ChatText, pieces: Callable[[ShownMedia], Iterator[str | MediumTokens]]) -> MixedTokens:
        """Tokenize a conversation. `pieces` returns the texts and tokens of an image, video or audio."""
        mixed = MixedTokens(self.tokenizer, *self.media, rope=self.rope)
        queues = self._media_queues(chat.text, chat.shown)
        borders = [0, *(border for answer in chat.answers for border in answer), len(chat.text)]
        for number, (start, end) in enumerate(pairwise(borders)):  # the ranges with odd numbers are answers
            for piece in self._placeholders.split(chat.text[start:end]):  # a text, a placeholder, a text, …
                if piece in queues:
                    mixed.add(pieces(next(queues[piece])))
                else:
                    mixed.add_text(piece, target=number % 2 == 1)
        return mixed

    def _media_queues(self, rendered: str, shown: Sequence[ShownMedia]) -> dict[str, Iterator[ShownMedia]]:
        """Return an iterator over the media of each kind, in order, by the placeholder of the kind.

        Raises ValueError if the text has more or fewer placeholders than media.
        """
        queues = {}
        for kind, text in self._placeholder_texts.items():
            media = [part for part in shown if kind == media_kind(part)]
            count = self._placeholders.findall(rendered).count(text)
            if count != len(media):
                raise ValueError(f"the rendered text has {count} placeholders {text!r} for {len(media)} {kind}s")
            queues[text] = iter(media)
        return queues


def _template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of a tokenizer of `transformers`, or else `ChatML()`."""
    tokenize: Any = tokenizer.tokenize
    return OwnTemplate(tokenize) if hasattr(tokenize, "apply_chat_template") else ChatML()
