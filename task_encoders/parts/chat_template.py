"""Templates that turn messages into text: ChatML, or that of a tokenizer."""

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

    Any object with these two methods is one, such as `ChatML` and `OwnTemplate`.

    Example:
        ```python
        from task_encoders import ChatEncoder
        class Plain:
            def render(self, messages, image, *, answering, more):
                said = "".join(f"{message.role}: {message.parts[0]}\n" for message in messages)
                return said + "assistant:" * answering
            def settings(self):
                return "plain 1"
        ChatEncoder(template=Plain()).settings()["template"]   # 'plain 1'
        ```
    """

    def render(self, messages: Sequence[Message], image: str, *, answering: bool, more: Mapping[str, Any]) -> str:
        """Render messages as text.

        Args:
            messages: The messages, in order.
            image: The text in the place of each image; a video's and a sound's is `part.text`.
            answering: End with the beginning of an answer.
            more: What else the sample has for the template: {"tools": […]}.
        """

    def settings(self) -> str:
        """Return everything that changes the text, or a hash of it.

        It identifies the template in a saved state.
        """


@dataclass(frozen=True, slots=True)
class ChatML:
    r"""The format of OpenAI, 2023, for tokenizers that have no template of their own.

    Args:
        start: The mark of a message's beginning.
        end: The mark of its end.

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
            image: The text in the place of each image; a video's and a sound's is `part.text`.
            answering: End with the beginning of an answer.
            more: What else the sample has for the template: {"tools": […]}.

        Raises:
            ValueError: A message has fields besides its role and content, or the sample has tools.
        """
        if more:
            raise ValueError(f"ChatML does not support {', '.join(more)}. Pass template=OwnTemplate(tokenizer)")
        for number, message in enumerate(messages):
            if message.more:
                raise ValueError(f"messages[{number}]: ChatML does not support {', '.join(message.more)}")
        rendered_messages = [f"{self.start}{message.role}\n{_text(message, image)}{self.end}\n" for message in messages]
        return "".join(rendered_messages) + f"{self.start}assistant\n" * answering

    def settings(self) -> str:
        """Both marks."""
        return f"ChatML {self.start} {self.end}"


_NO_CLOCK = (  # in place of the function that transformers gives templates
    "{% macro strftime_now(form) %}{{ raise_exception('the chat template asks for the date, which would make another "
    'sample of the same one tomorrow; pass OwnTemplate(tokenizer, {"date_string": ...}), or what the template calls '
    "it') }}{% endmacro +%}"
)


@dataclass(frozen=True)
class OwnTemplate:
    """The template that comes with a tokenizer or processor of `transformers`.

    A template that asks for the date gets an error, since a sample must not depend on the day: pass the date in
    `arguments`.

    Args:
        tokenizer: An object with `chat_template` and `apply_chat_template`.
        arguments: What the template takes, such as {"enable_thinking": False}.
        content: "parts" passes lists of {"type": "text"}, "image", "video" and "audio", for templates that write the
            places of these themselves; "text" passes the text with these written in it.

    Raises:
        ValueError: The tokenizer has no template, or several.

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
            image: The text in the place of each image; a video's and a sound's is `part.text`.
            answering: End with the beginning of an answer.
            more: What else the sample has for the template: {"tools": […]}.

        Raises:
            TemplateError: The template raises it (jinja2's), or asks for the date.
        """
        text: str = self.tokenizer.apply_chat_template(
            self._listed(messages, image),
            chat_template=_NO_CLOCK + self.tokenizer.chat_template,
            tokenize=False,
            add_generation_prompt=answering,
            **{**self.arguments, **more},
        )
        return text

    def marked(
        self, messages: Sequence[Message], image: str, more: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """Render messages, with the ranges of `{% generation %}`; None without such.

        Args:
            messages: The messages, in order.
            image: The text in the place of each image.
            more: As of `render`.
        """
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.tokenizer.chat_template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        special = getattr(self.tokenizer, "tokenizer", self.tokenizer).special_tokens_map
        texts, places = render_jinja_template(
            conversations=[self._listed(messages, image)],
            chat_template=_NO_CLOCK + self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **{**special, **self.arguments, **more},
        )
        return texts[0], places[0]

    def settings(self) -> str:
        """A hash of the template, the special tokens it may name, and the arguments."""
        special = {name: str(text) for name, text in getattr(self.tokenizer, "special_tokens_map", {}).items()}
        contents = [self.tokenizer.chat_template, special, dict(self.arguments), self.content]
        return f"xxh3_128:{xxh3_128_hexdigest(json.dumps(contents, sort_keys=True).encode())}"

    def _listed(self, messages: Sequence[Message], image: str) -> list[dict[str, Any]]:
        return [{**each.more, "role": each.role, "content": self._content(each, image)} for each in messages]

    def _content(self, message: Message, image: str) -> Any:
        if self.content == "text":
            return _text(message, image)
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": media_kind(part)}
            for part in message.parts
        ]


def answers_in(
    template: ChatTemplate, messages: Sequence[Message], learned: Sequence[int], image: str, more: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of messages, and the ranges of the answers to train on.

    The answers are chosen by their indices.

    Where the template marks answers by `{% generation %}`, these marks say it; else an answer begins where what asks
    for it ends. Raises ValueError where neither says it.
    """
    marked = template.marked(messages, image, more) if isinstance(template, OwnTemplate) else None
    if marked is not None:
        text, places = marked
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        if len(places) == len(answers):
            places = [span for number, span in zip(answers, places, strict=True) if number in learned]
        elif [*learned] != answers:
            raise ValueError(
                f"the chat template marks {len(places)} generations in {len(answers)} answers, some of them masked. "
                "Have it mark each answer once by {% generation %}"
            )
        return text, places
    whole, places = template.render(messages, image, answering=False, more=more), []
    for number in learned:
        if number == 0:
            raise ValueError("messages[0] is an answer. Start the conversation with a question")
        asked = template.render(messages[:number], image, answering=True, more=more)
        answered = template.render(messages[: number + 1], image, answering=False, more=more)
        done = places[-1][1] if places else 0
        if not whole.startswith(answered) or not answered.startswith(asked) or len(asked) < done:
            raise ValueError(
                f"messages[{number}]: the chat template renders it differently when more follows. Pass answers='last', "
                "or mark answers in the template by {% generation %}"
            )
        places.append((len(asked), len(answered)))
    return whole, places


def _text(message: Message, image: str) -> str:
    texts = [part.text if isinstance(part, MediaPart) else part for part in message.parts]
    return "".join(part if isinstance(part, str) else image for part in texts)
