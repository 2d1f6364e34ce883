"""Templates that turn messages into text: ChatML, or the template of a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from xxhash import xxh3_128_hexdigest

from task_encoders.parts.data_formats import Message
from task_encoders.parts.sample_parts import MediaPart, media_kind


class ChatTemplate(Protocol):
    r"""Interface of templates that turn messages into text.

    `ChatML` and `OwnTemplate` implement it. Your own class needs these two methods.

    Example:
        ```python
        from task_encoders import ChatEncoder
        class Plain:
            def render(self, messages, image, *, answering, more):
                text = "".join(f"{message.role}: {message.parts[0]}\n" for message in messages)
                return text + "assistant:" * answering
            def settings(self):
                return "plain 1"
        ChatEncoder(template=Plain()).settings()["template"]   # 'plain 1'
        ```
    """

    def render(self, messages: Sequence[Message], image: str, *, answering: bool, more: Mapping[str, Any]) -> str:
        """Render messages as text.

        Args:
            messages: The messages, in order.
            image: The placeholder of an image. A video or audio has its own, the `text` of its part.
            answering: Whether to end with the start of an answer.
            more: Further values of the sample for the template, such as {"tools": […]}.
        """

    def settings(self) -> str:
        """Return everything that changes the text, or a hash of it.

        It identifies the template in a saved state.
        """


@dataclass(frozen=True, slots=True)
class ChatML:
    r"""Format of OpenAI, 2023, for tokenizers without a template.

    Args:
        start: The text before a message.
        end: The text after a message.

    Example:
        ```python
        from task_encoders import ChatML, Message
        messages = [Message("user", ["Hello"]), Message("assistant", ["Hi."])]
        ChatML().render(messages[:1], "<image>", answering=True, more={})   # '<|im_start|>user\nHello<|im_...'
        ChatML("[", "]").render(messages, "", answering=False, more={})     # '[user\nHello]\n[assistant\n...'
        ```
    """

    start: str = "<|im_start|>"
    end: str = "<|im_end|>"

    def render(self, messages: Sequence[Message], image: str, *, answering: bool, more: Mapping[str, Any]) -> str:
        """Render messages as text, as `ChatTemplate`.

        Args:
            messages: The messages, in order.
            image: The placeholder of an image. A video or audio has its own, the `text` of its part.
            answering: Whether to end with the start of an answer.
            more: Further values of the sample for the template, such as {"tools": […]}.

        Raises:
            ValueError: A message has fields besides its role and content, or the sample has tools.
        """
        if more:
            raise ValueError(f"ChatML does not support {', '.join(more)}. Pass template=OwnTemplate(tokenizer)")
        for number, message in enumerate(messages):
            if message.more:
                raise ValueError(f"messages[{number}]: ChatML does not support {', '.join(message.more)}")
        texts = [f"{self.start}{message.role}\n{_text_of(message, image)}{self.end}\n" for message in messages]
        return "".join(texts) + f"{self.start}assistant\n" * answering

    def settings(self) -> str:
        """Return the start and end tokens of a turn."""
        return f"ChatML {self.start} {self.end}"


_NO_CLOCK = (  # replaces the function that transformers passes to templates
    "{% macro strftime_now(form) %}{{ raise_exception('the chat template asks for the date, which would make another "
    'sample of the same one tomorrow; pass OwnTemplate(tokenizer, {"date_string": ...}), or what the template calls '
    "it') }}{% endmacro +%}"
)


@dataclass(frozen=True)
class OwnTemplate:
    """Template of a tokenizer or processor of `transformers`.

    A template that uses the current date raises an error, because a sample must not depend on the day. Pass the date in
    `arguments`.

    Args:
        tokenizer: An object with `chat_template` and `apply_chat_template`.
        arguments: Arguments of the template, such as {"enable_thinking": False}.
        content: "text" (default) passes text with placeholders. "parts" passes lists of {"type": "text"}, "image",
            "video" and "audio", for templates that write the placeholders themselves.

    Raises:
        ValueError: The tokenizer has no template or several.

    Example:
        ```python
        from types import SimpleNamespace
        from task_encoders import OwnTemplate
        OwnTemplate(SimpleNamespace(chat_template=None))   # ValueError: SimpleNamespace has no chat_template. Pass ...
        OwnTemplate(SimpleNamespace(chat_template="{{ messages }}", apply_chat_template=print)).content   # 'text'
        ```
    """

    tokenizer: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    content: Literal["text", "parts"] = "text"

    def __post_init__(self) -> None:
        template = getattr(self.tokenizer, "chat_template", None)
        if not template:
            raise ValueError(f"{type(self.tokenizer).__name__} has no chat_template. Pass template=ChatML()")
        if not isinstance(template, str):
            raise ValueError(f"several chat templates, {', '.join(template)}. Set the tokenizer's chat_template to one")
        if self.content not in ("text", "parts"):
            raise ValueError(f"OwnTemplate: content must be 'text' or 'parts', not {self.content!r}")

    def render(self, messages: Sequence[Message], image: str, *, answering: bool, more: Mapping[str, Any]) -> str:
        """Render messages as text, as `ChatTemplate`.

        Args:
            messages: The messages, in order.
            image: The placeholder of an image. A video or audio has its own, the `text` of its part.
            answering: Whether to end with the start of an answer.
            more: Further values of the sample for the template, such as {"tools": […]}.

        Raises:
            TemplateError: The template raises jinja2's error, or it uses the current date.
        """
        text: str = self.tokenizer.apply_chat_template(
            self._plain_messages(messages, image),
            chat_template=_NO_CLOCK + self.tokenizer.chat_template,
            tokenize=False,
            add_generation_prompt=answering,
            **{**self.arguments, **more},
        )
        return text

    def marked(
        self, messages: Sequence[Message], image: str, more: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """Render messages, and return the text and its ranges to train on.

        They are the ranges of its `{% generation %}` blocks, in characters.

        The result is None if the template has no such blocks.

        Args:
            messages: The messages, in order.
            image: The placeholder of an image.
            more: As of `render`.
        """
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.tokenizer.chat_template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        special = getattr(self.tokenizer, "tokenizer", self.tokenizer).special_tokens_map
        texts, ranges = render_jinja_template(
            conversations=[self._plain_messages(messages, image)],
            chat_template=_NO_CLOCK + self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **{**special, **self.arguments, **more},
        )
        return texts[0], ranges[0]

    def settings(self) -> str:
        """Return a hash of the template, its special tokens, and the arguments."""
        special = {name: str(text) for name, text in getattr(self.tokenizer, "special_tokens_map", {}).items()}
        contents = [self.tokenizer.chat_template, special, dict(self.arguments), self.content]
        return f"xxh3_128:{xxh3_128_hexdigest(json.dumps(contents, sort_keys=True).encode())}"

    def _plain_messages(self, messages: Sequence[Message], image: str) -> list[dict[str, Any]]:
        """Return messages as the dicts that templates of `transformers` expect."""
        return [{**each.more, "role": each.role, "content": self._content(each, image)} for each in messages]

    def _content(self, message: Message, image: str) -> Any:
        """Return the content of a message in the form that the template expects."""
        if self.content == "text":
            return _text_of(message, image)
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": media_kind(part)}
            for part in message.parts
        ]


def answers_in(
    template: ChatTemplate, messages: Sequence[Message], trained: Sequence[int], image: str, more: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of messages, and the ranges of the answers to train on.

    The ranges count characters.

    `trained` has the indices of these answers. Their ranges are the template's `{% generation %}` blocks, if it has
    any. Otherwise an answer starts where the text of the previous messages, with the start of an answer, ends. Raises
    ValueError if the template writes that text differently when the answer follows.
    """
    marked = template.marked(messages, image, more) if isinstance(template, OwnTemplate) else None
    if marked is not None:
        text, ranges = marked
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        if len(ranges) == len(answers):
            ranges = [span for number, span in zip(answers, ranges, strict=True) if number in trained]
        elif [*trained] != answers:
            raise ValueError(
                f"the chat template marks {len(ranges)} generations in {len(answers)} answers, some of them masked. "
                "Have it mark each answer once by {% generation %}"
            )
        return text, ranges
    text = template.render(messages, image, answering=False, more=more)
    ranges = []
    for number in trained:
        if number == 0:
            raise ValueError("messages[0] is an answer. Start the conversation with a question")
        prompt = template.render(messages[:number], image, answering=True, more=more)
        with_answer = template.render(messages[: number + 1], image, answering=False, more=more)
        _, previous_end = ranges[-1] if ranges else (0, 0)
        if not text.startswith(with_answer) or not with_answer.startswith(prompt) or len(prompt) < previous_end:
            raise ValueError(
                f"messages[{number}]: the chat template renders it differently when more follows. Pass answers='last', "
                "or mark answers in the template by {% generation %}"
            )
        ranges.append((len(prompt), len(with_answer)))
    return text, ranges


def _text_of(message: Message, image: str) -> str:
    """Return the text of a message, with placeholders of its media."""
    texts = [part.text if isinstance(part, MediaPart) else part for part in message.parts]
    return "".join(part if isinstance(part, str) else image for part in texts)
