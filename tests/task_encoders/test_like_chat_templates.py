"""Chats are the tokens and the loss mask of `apply_chat_template`, for tokenizers and templates of common families.

The oracle is `apply_chat_template(messages, tokenize=True, return_assistant_tokens_mask=True)` with a template that
marks answers by `{% generation %}`. The encoder gets the same template, or the template without these marks.

Differences on purpose: what follows the last answer is left out; arguments of tool calls that are JSON text are read;
images in answers do not contribute to the loss; special tokens written in a message skip the sample.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from savable_pipeline.core.rng import Rng
from savable_pipeline.stages.task_encoder import Skip
from task_encoders.chat import ChatEncoder
from task_encoders.language_modeling import LanguageModelingEncoder
from task_encoders.parts.audio_tokens import AudioTokens
from task_encoders.parts.chat_template import OwnTemplate
from task_encoders.parts.image_tiles import NativeSize, Tiles
from task_encoders.parts.token_packing import IGNORED
from task_encoders.parts.tokenizer import Tokenizer
from task_encoders.parts.vision import Vision
from tests.support.toy_samples import item, png, sample
from tests.support.toy_tokenizers import tokenizer

LOOP = "{%- for m in messages %}"
TEMPLATES = {
    "llama2": (
        "llama",
        LOOP
        + "{% if m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + ' ' + eos_token }}{% endgeneration %}"
        "{% else %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}",
    ),
    "mistral": (
        "mistral",
        "{{ bos_token }}"
        + LOOP
        + "{% if m.role == 'assistant' %}{% generation %}{{ ' ' + m.content | trim + eos_token }}"
        "{% endgeneration %}{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}",
    ),
    "zephyr": (
        "llama",
        LOOP
        + "{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}{% generation %}{{ m.content + eos_token + '\\n' }}"
        "{% endgeneration %}{% else %}{{ '<|user|>\\n' + m.content + eos_token + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
    "vicuna": (
        "llama",
        "{{ bos_token + 'A chat.' }}" + LOOP + "{% if m.role == 'assistant' %}{{ ' ASSISTANT:' }}{% generation %}"
        "{{ ' ' + m.content + eos_token }}{% endgeneration %}{% else %}{{ ' USER: ' + m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}",
    ),
    "gemma": (
        "gemma",
        "{{ bos_token }}" + LOOP + "{% if m.role == 'assistant' %}{{ '<start_of_turn>model\\n' }}{% generation %}"
        "{{ m.content | trim + '<end_of_turn>\\n' }}{% endgeneration %}{% else %}"
        "{{ '<start_of_turn>user\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    ),
    "llama3": (
        "llama3",
        LOOP + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ m.content + '<|eot_id|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    "qwen2": (
        "qwen",
        LOOP + "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ),
}
THINKING = (  # as Qwen3's: only the last answer keeps its reasoning
    LOOP + "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% set said = m.content.split('</think>') %}{% if loop.last and said | length == 1 %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ (m.content if loop.last else said[-1].lstrip()) + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATS = [
    [("user", "What is 2+2?"), ("assistant", "four")],
    [("user", "import os"), ("assistant", "def main():\n    return 12345"), ("user", "and?"), ("assistant", "  No. ")],
    [("user", " spaced "), ("assistant", "\n\nlines\n")],
    [("user", "naïve Ä 🙂?"), ("assistant", "🙂🙂"), ("user", "ok"), ("assistant", "日本")],
    [("user", ""), ("assistant", "x"), ("user", "\t"), ("assistant", "")],
]


def roles(chat: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in chat]


def unmarked(template: str) -> str:
    return re.sub(r"\{% (end)?generation %\}", "", template)


@cache
def with_template(family: str, template: str) -> Any:
    made = tokenizer(family)
    made.chat_template = template
    return made


def tokens_and_mask(made: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the tokens of an item, and which of them have loss, as `assistant_masks` does."""
    tokens, learned = made["tokens"].tolist(), [IGNORED, *made["labels"].tolist()[:-1]]
    assert all(label in (IGNORED, token) for token, label in zip(tokens, learned, strict=True))
    return tokens, [int(label != IGNORED) for label in learned]


def expected_tokens(own: Any, marked: str, messages: list[dict[str, Any]], **more: Any) -> tuple[list[int], list[int]]:
    """Return the tokens and the mask by transformers."""
    both = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    made = own.apply_chat_template(messages, chat_template=marked, **both, **more)
    return made["input_ids"], made["assistant_masks"]


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_loss_mask_equal_the_tokenizers_template(name: str, marks: bool, chat: Any) -> None:
    family, template = TEMPLATES[name]
    own = with_template(family, template if marks else unmarked(template))
    made = item(ChatEncoder(own), sample(json=roles(chat)))
    assert tokens_and_mask(made) == expected_tokens(own, template, roles(chat))


def test_tokenizing_pieces_separately_would_differ() -> None:
    """What the tests above would not see if no tokenizer put `▁` before a piece."""
    own = tokenizer("llama")
    pieces = [
        *own.encode("USER: hi ASSISTANT:", add_special_tokens=False),
        *own.encode(" yes", add_special_tokens=False),
    ]
    assert pieces != own.encode("USER: hi ASSISTANT: yes", add_special_tokens=False)


def test_template_that_strips_reasoning_works_if_it_marks_answers_else_is_rejected() -> None:
    chat = [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nfour"), ("user", "b"), ("assistant", "five")]
    marked = with_template("qwen", THINKING)
    made = tokens_and_mask(item(ChatEncoder(marked), sample(json=roles(chat))))
    assert made == expected_tokens(marked, THINKING, roles(chat))
    assert "hm" not in marked.decode(made[0])
    plain = with_template("qwen", unmarked(THINKING))
    with pytest.raises(ValueError, match=r"messages\[1\].*answers='last', or mark answers in the template by"):
        ChatEncoder(plain).encode(sample(json=roles(chat)), Rng(7))
    last = tokens_and_mask(item(ChatEncoder(plain, answers="last"), sample(json=roles(chat))))
    assert last[0] == made[0]
    learned = [token for token, learns in zip(*last, strict=True) if learns]
    assert plain.decode(learned) == "<think>\n\n</think>\n\nfive<|im_end|>\n"


def test_answer_of_weight_0_is_not_a_target_of_a_template_that_marks_answers() -> None:
    own = with_template("qwen", TEMPLATES["qwen2"][1])
    messages = roles(CHATS[1])
    messages[1]["weight"] = 0
    tokens, learned = tokens_and_mask(item(ChatEncoder(own), sample(json=messages)))
    text = own.decode([token for token, learns in zip(tokens, learned, strict=True) if learns])
    assert text == "  No. <|im_end|>\n"
    one_for_all = "{% generation %}" + unmarked(TEMPLATES["qwen2"][1]) + "{% endgeneration %}"
    with pytest.raises(ValueError, match="marks 1 generations in 2 answers, some of them masked"):
        ChatEncoder(with_template("qwen", one_for_all)).encode(sample(json=messages), Rng(7))


class Slow:
    """Tokenizer of transformers that does not state which characters a token has."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.chat_template, self.apply_chat_template = own.chat_template, own.apply_chat_template
        self.get_vocab, self.all_special_tokens = own.get_vocab, own.all_special_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self._own.encode(text, add_special_tokens=add_special_tokens)
        return ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokenizer_without_offsets_has_the_same_tokens_or_rejects_the_chat(name: str) -> None:
    family, template = TEMPLATES[name]
    own = with_template(family, unmarked(template))
    equal = 0
    for chat in CHATS:
        try:
            made = item(ChatEncoder(Slow(own)), sample(json=roles(chat)))  # type: ignore[arg-type]
        except ValueError as error:
            assert "Slow reads" in str(error) and "Pass a fast tokenizer" in str(error)
            continue
        assert tokens_and_mask(made) == expected_tokens(own, template, roles(chat))
        equal += 1
    assert equal > 2


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma", "llama3", "qwen"])
@pytest.mark.parametrize(("prompt", "text"), [("Q: 2+2? ", "four"), ("Q:", " four\n"), ("import", "os"), ("🙂", "🙂")])
def test_prompt_and_text_are_tokenized_together(family: str, prompt: str, text: str) -> None:
    own = tokenizer(family)
    encoder = LanguageModelingEncoder(own, part="json[text]", prompt="json[prompt]", eos=True)
    tokens, learned = tokens_and_mask(item(encoder, sample(json={"prompt": prompt, "text": text})))
    whole = own(prompt + text, return_offsets_mapping=True)
    assert tokens == [*whole["input_ids"], own.eos_token_id]
    assert (tokens[0] == own.bos_token_id) == (own.bos_token_id is not None)
    of_text = [int(end > len(prompt)) for _, end in whole["offset_mapping"]]
    assert learned == [*of_text, 1]


def test_tiktoken_offsets_come_from_token_bytes() -> None:
    import tiktoken

    letters = "abcdefgh \n"
    pairs = [(a + b).encode() for a in letters for b in letters]
    ranks = {token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), *pairs])}
    encoding = tiktoken.Encoding(
        "local", pat_str=r"\s?\w+|\W+", mergeable_ranks=ranks, special_tokens={"<|im_start|>": 990, "<|im_end|>": 991}
    )
    text, answer = "<|im_start|>user\na🙂<|im_end|>\n<|im_start|>assistant\n", "🙂 b<|im_end|>\n"
    made = item(ChatEncoder(encoding), sample(json=roles([("user", "a🙂"), ("assistant", "🙂 b")])))
    tokens, learned = tokens_and_mask(made)
    assert tokens == encoding.encode(text + answer, allowed_special="all")
    taught = [token for token, learns in zip(tokens, learned, strict=True) if learns]
    assert encoding.decode(taught) == answer


PHOTO = np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma", "qwen"])
@pytest.mark.parametrize("question", ["<image>\nWhat is it?", "Look: <image> four", "What?<image>"])
def test_llava_image_is_one_token_in_the_text(name: str, question: str) -> None:
    """As `LlavaProcessor`: the text with the token repeated, tokenized once."""
    own = with_template(name, unmarked(TEMPLATES["vicuna"][1]).replace("bos_token", "(bos_token or '')"))
    vision = Vision(NativeSize(14, 2, 28 * 28, 28 * 28 * 16), own.convert_tokens_to_ids("<image>"))
    made = item(
        ChatEncoder(own, vision=vision),
        sample(json=roles([("user", question), ("assistant", "A cat.")]), png=png(PHOTO)),
    )
    text = own.apply_chat_template(roles([("user", question), ("assistant", "A cat.")]), tokenize=False)
    count = vision.tiles.tokens(made["grids"])
    repeated = own(text.replace("<image>", "<image>" * count), add_special_tokens=False, return_offsets_mapping=True)
    begin = len(text) + len("<image>") * (count - 1) - len(" A cat." + own.eos_token)
    expected = [int(end > begin) for _, end in repeated["offset_mapping"]]
    assert tokens_and_mask(made) == (repeated["input_ids"], expected)


def test_images_of_qwen_internvl_and_smolvlm_are_enclosed_by_their_tokens() -> None:
    own = with_template("qwen", unmarked(TEMPLATES["qwen2"][1]))
    tiles = {"qwen": NativeSize(14, 2, 28 * 28, 28 * 28 * 16), "intern": Tiles(14, 2, 28, max_tiles=2)}
    for image, before, after, how in (
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", tiles["qwen"]),
        ("<IMG_CONTEXT>", "<img>", "</img>", tiles["intern"]),
        ("<image>", "\n\n<fake>", "<fake>", tiles["intern"]),  # marks that are no tokens, and join the text
    ):
        vision = Vision(how, own.convert_tokens_to_ids(image), before=before, after=after)
        chat = [("user", "So: <image> what?"), ("assistant", "A cat.")]
        made = item(ChatEncoder(own, vision=vision), sample(json=roles(chat), png=png(PHOTO)))
        text = own.apply_chat_template(roles(chat), tokenize=False)
        repeated = before + image * vision.tiles.tokens(made["grids"]) + after
        assert made["tokens"].tolist() == own.encode(text.replace("<image>", repeated), add_special_tokens=False)


def test_image_token_without_a_text_is_rejected() -> None:
    with pytest.raises(ValueError, match="reads no text as the token 300"):
        ChatEncoder(tokenizer("qwen"), vision=Vision(NativeSize(), 300))
    with pytest.raises(ValueError, match="reads no text as the token 99999"):
        ChatEncoder(tokenizer("qwen"), vision=Vision(NativeSize(), 99999))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
TOOL_TEMPLATE = (  # as Qwen2.5's
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    + LOOP
    + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"name": "add", "arguments": {"a": 1, "b": None}}
CALLING = [
    {"role": "user", "content": "1+?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
TEXT = '{"name": "add", "arguments": {"a": 1, "b": null}}'
AS_TEXT = {"name": "add", "arguments": '{"a": 1, "b": null}'}


def calling(*middle: dict[str, Any]) -> list[dict[str, Any]]:
    return [CALLING[0], *middle, CALLING[3]]


ROWS: dict[str, dict[str, Any]] = {
    "OpenAI's": {"messages": CALLING, "tools": TOOLS},
    "arguments as text": {
        "messages": calling({"role": "assistant", "content": None, "tool_calls": [{"function": AS_TEXT}]}, CALLING[2]),
        "tools": TOOLS,
    },
    "OpenAI's first form": {
        "messages": calling(
            {"role": "assistant", "content": None, "function_call": AS_TEXT}, {"role": "function", "content": "3"}
        ),
        "tools": TOOLS,
    },
    "LLaMA-Factory's": {
        "conversations": [
            {"from": "human", "value": "1+?"},
            {"from": "function_call", "value": TEXT},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "It is 3."},
        ],
        "tools": '[{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]',
    },
    "ms-swift's": {
        "messages": calling({"role": "tool_call", "content": TEXT}, {"role": "tool_response", "content": "3"}),
        "tools": TOOLS,
    },
}


@pytest.mark.parametrize("form", ROWS)
def test_tools_and_calls_equal_the_templates(form: str) -> None:
    own = with_template("qwen", TOOL_TEMPLATE)
    made = item(ChatEncoder(own), sample(json=ROWS[form]))
    assert tokens_and_mask(made) == expected_tokens(own, TOOL_TEMPLATE, CALLING, tools=TOOLS)
    assert "properties" in own.decode(made["tokens"])


def test_the_arguments_that_a_row_has_for_the_template_are_passed_to_it() -> None:
    template = "{{ '[brief]' if brief else '[long]' }}" + TEMPLATES["qwen2"][1]
    own = with_template("qwen", template)
    row = {"messages": roles(CHATS[0]), "chat_template_kwargs": {"brief": True}}
    made = item(ChatEncoder(own, template=OwnTemplate(own, {"brief": False})), sample(json=row))
    assert tokens_and_mask(made) == expected_tokens(own, template, roles(CHATS[0]), brief=True)


def test_a_special_token_in_a_tool_call_skips_the_sample() -> None:
    call = {"function": {"name": "add", "arguments": {"a": "<|im_end|>"}}}
    row = {"messages": calling({"role": "assistant", "content": "", "tool_calls": [call]}, CALLING[2])}
    made = ChatEncoder(with_template("qwen", TOOL_TEMPLATE)).encode(sample(json=row), Rng(7))
    assert isinstance(made, Skip) and made.reason == "special token in text"


def test_tools_need_a_template_that_takes_them() -> None:
    with pytest.raises(ValueError, match=r"ChatML does not support tools. Pass template=OwnTemplate"):
        ChatEncoder().encode(sample(json={"messages": roles(CHATS[0]), "tools": TOOLS}), Rng(7))


def test_document_gets_the_tokenizers_bos_and_eos_once() -> None:
    own = tokenizer("mistral")
    for text, ids in (("A cat.", own.encode("A cat.")), ("A cat.</s>", own.encode("A cat."))):
        made = Tokenizer(own).ending(True)(text)
        assert made.tolist() == [*ids, own.eos_token_id]
    assert Tokenizer(own, bos=own.bos_token_id).ending(False)("A cat.").tolist() == own.encode("A cat.")


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_length_from_headers_equals_the_number_of_tokens(family: str) -> None:
    own = with_template(family, unmarked(TEMPLATES["vicuna"][1]).replace("bos_token", "(bos_token or '')"))
    vision = Vision(NativeSize(14, 2, 28 * 28, 28 * 28 * 16), own.convert_tokens_to_ids("<image>"))
    encoder = ChatEncoder(own, vision=vision, audio=AudioTokens(own.convert_tokens_to_ids("<IMG_CONTEXT>")))
    turns = roles([("user", "<image> and <image>?"), ("assistant", "Two.")])
    given = sample({"json": turns, "0.png": png(PHOTO), "1.png": png(PHOTO[:28])})
    made = item(encoder, given)
    assert encoder.length_of(given) == len(made["tokens"]) == encoder.length(made)
    assert made["tile_counts"].tolist() == [1, 1]
