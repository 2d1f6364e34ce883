"""`ChatEncoder`: conversations, with images anywhere in them, to tokens of which the answers are learned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from PIL import Image

from savable_pipeline import Rng, Sample, Skip
from task_encoders.chat_template import ChatML, ChatTemplate, OwnTemplate
from task_encoders.conversation import Message, parse_conversation
from task_encoders.mixed_encoder import MixedEncoder
from task_encoders.mixed_tokens import MixedTokens, Vision
from task_encoders.sample_images import SampleImages
from task_encoders.tokenizer import Tokenize, Tokenizer


class ChatEncoder(MixedEncoder):
    """Learns to answer as the assistant of a conversation does, which may show images and ask about them.

    Conversations are JSON, as LLaVA or OpenAI write them (conversation.py), beside the images. `tokenizer` is as for
    `CaptioningEncoder`; its `bos` and `eos` are not added, since the chat template writes what it wants.
    `template=None` is the tokenizer's own where it is one of `transformers`, else `ChatML()`. `vision` says how images
    become tokens; without it, a conversation with images is an error. Learned are all answers with the marks of
    their end, or under `answers="last"` the last only; what comes after is left out. Text is cut where answers begin
    and end and at images, and each piece tokenized by itself, as it is when a model answers. `max_length` is the
    longest conversation taken, and the length of a batch's rows.
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
    ) -> None:
        if answers not in ("all", "last"):
            raise ValueError(f"answers is 'all' or 'last', not {answers!r}")
        super().__init__(tokenizer, vision=vision, max_length=max_length, part=part)
        self.template = template or _template_of(self.tokenizer)
        self.answers = answers
        marks = sorted(self.tokenizer.special_texts() - {vision.text if vision else ""})
        self._special = re.compile("|".join(map(re.escape, marks)) or r"(?!)")

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """One item, as `MixedTokens.item`: `tokens`, `labels`, and with `vision` the images' patches.

        Skips a sample without the part as "no json" (or what `part` is), one in which no answer is to be learned as
        "no answer", one whose text holds a special token of the tokenizer, which would end or begin a message, as
        "special token in text", and a longer one as "longer than max_length".
        Raises ValueError that names the field which is not as it should be, and what Pillow and json raise.
        """
        if self.part not in sample:
            return Skip(f"no {self.part}")
        messages = parse_conversation(sample.json(self.part), SampleImages(sample))
        learned = [number for number, message in enumerate(messages) if message.is_answer]
        if not learned:
            return Skip("no answer")
        parts = [part for message in messages for part in message.parts]
        if any(self._special.search(part) for part in parts if isinstance(part, str)):
            return Skip("special token in text")
        asked = [part for message in messages[: learned[-1] + 1] for part in message.parts]
        images = [part for part in asked if not isinstance(part, str)]
        if images and self.vision is None:
            raise ValueError("the conversation has images, but the encoder no way to see: give it vision=Vision(...)")
        item = self._item(self._spans(messages, learned if self.answers == "all" else learned[-1:]), images)
        if self.max_length is not None and len(item["tokens"]) > self.max_length:
            return Skip("longer than max_length")
        return item

    def settings(self) -> dict[str, Any]:
        """Every argument; the tokenizer and the template by hashes of what they are."""
        return {**super().settings(), "template": self.template.settings(), "answers": self.answers}

    def _spans(self, messages: Sequence[Message], learned: Sequence[int]) -> list[tuple[str, bool]]:
        """The text of a conversation to its last learned answer, in turns what is given and what is learned."""
        image = self.vision.text if self.vision else ""
        whole = self.template.render(messages[: learned[-1] + 1], image, answering=False)
        spans, done = [], 0
        for number in learned:
            if number == 0:
                raise ValueError("messages[0]: an answer to nothing; a conversation begins with a question")
            asked = self.template.render(messages[:number], image, answering=True)
            answered = self.template.render(messages[: number + 1], image, answering=False)
            if not (whole.startswith(answered) and answered.startswith(asked) and len(asked) >= done):
                raise ValueError(
                    f"messages[{number}]: the chat template writes it otherwise when more follows, or not after what "
                    "it asks with (some drop the reasoning of earlier answers): split the conversation so that each "
                    "answer comes last once, and pass answers='last'"
                )
            spans += [(asked[done:], False), (answered[len(asked) :], True)]
            done = len(answered)
        return spans

    def _item(self, spans: Sequence[tuple[str, bool]], images: Sequence[Image.Image]) -> dict[str, Any]:
        mixed = MixedTokens(self.tokenizer, self.vision)
        place = self.vision.text if self.vision else None
        places = sum(text.count(place) for text, _ in spans) if place else 0
        if place and places != len(images):
            raise ValueError(f"the rendered text has {places} places {place!r} for {len(images)} images")
        waiting = iter(images)
        for text, learned in spans:
            first, *others = text.split(place) if place else [text]
            mixed.add_text(first, target=learned)
            for other in others:
                mixed.add_image(next(waiting))
                mixed.add_text(other, target=learned)
        return mixed.item()


def _template_of(tokenizer: Tokenizer) -> ChatTemplate:
    tokenize: Any = tokenizer.tokenize
    return OwnTemplate(tokenize) if hasattr(tokenize, "apply_chat_template") else ChatML()
