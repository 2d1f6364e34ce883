"""`ChatEncoder`: what is said, what is learned of it, and where images stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from savable_pipeline.core.rng import Rng
from savable_pipeline.stages.task_encoder import Skip
from task_encoders.chat import ChatEncoder
from task_encoders.parts.chat_template import ChatML, OwnTemplate
from task_encoders.parts.image_tiles import NativeSize, Tiles
from task_encoders.parts.token_packing import IGNORED
from task_encoders.parts.tokenizer import Tokenizer
from task_encoders.parts.vision import Vision
from tests.support.toy_samples import item, plain_png, sample, trained_tokenizer, without_pixels
from tests.support.toy_transformer import assert_packs_equal_documents

RNG = Rng(7)
IMAGE = 259  # the first id that is no byte and no mark of one
VISION = Vision(NativeSize(patch=2, merge=2, min_pixels=16, max_pixels=256), IMAGE)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokens_as_text(made: dict[str, Any]) -> str:
    """Return the tokens as text, with `#` for an image token, and brackets around tokens with loss."""
    ids, labels = made["tokens"].tolist(), [IGNORED, *made["labels"].tolist()[:-1]]
    text, learning = "", False
    for token, label in zip(ids, labels, strict=True):
        if learning != (label != IGNORED):
            text += "]" if learning else "["
            learning = not learning
        assert label in (IGNORED, token)
        text += "#" if token == IMAGE else chr(token)
    return text + "]" * learning


def llava_chat(*turns: tuple[str, str]) -> dict[str, Any]:
    """Return a conversation in LLaVA's format."""
    return {"conversations": [{"from": side, "value": value} for side, value in turns]}


def openai_chat(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    """Return a conversation in OpenAI's format."""
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


def own_tokenizer(template: str = TEMPLATE) -> Any:
    """Return a tokenizer of transformers with its own chat template."""
    from transformers import PreTrainedTokenizerFast  # takes a second

    made = PreTrainedTokenizerFast(
        tokenizer_object=trained_tokenizer(),
        bos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|image_pad|>"],
    )
    made.chat_template = template
    return made


TOKENIZER = own_tokenizer()


def test_only_answers_and_their_end_tokens_contribute_to_the_loss() -> None:
    made = item(ChatEncoder(), sample(json=llava_chat(("human", "Hi"), ("gpt", "Yo"), ("human", "A"), ("gpt", "B"))))
    assert tokens_as_text(made) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yo<|im_end|>\n]"
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n[B<|im_end|>\n]"
    )


def test_conversation_in_both_formats_is_the_same_item() -> None:
    turns = [("system", "Be brief"), ("human", "Hi"), ("gpt", "Yo")]
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    both = llava_chat(*turns), openai_chat(*((roles[side], text) for side, text in turns))
    first, second = (without_pixels(item(ChatEncoder(), sample(json=each))) for each in both)
    assert first == second


def test_images_are_at_their_placeholders_with_tokens_by_size() -> None:
    record = llava_chat(("human", "a <image>b<image>"), ("gpt", "c"), ("human", "<image>"), ("gpt", "d"))
    images = {"0.png": plain_png(8, 4, 10), "1.png": plain_png(4, 4, 20), "2.png": plain_png(8, 8, 30)}
    made = item(ChatEncoder(vision=VISION, template=ChatML("<", ">")), sample({"json": record, **images}))
    assert tokens_as_text(made) == "<user\na ##b#>\n<assistant\n[c>\n]<user\n####>\n<assistant\n[d>\n]"
    assert made["grids"].tolist() == [[2, 4], [2, 2], [4, 4]]
    assert made["tile_counts"].tolist() == [1, 1, 1]
    assert made["patches"].dtype == torch.uint8
    assert made["patches"][:, 0, 0, 0].tolist() == [10] * 8 + [20] * 4 + [30] * 16


def test_each_image_is_enclosed_by_its_texts_and_tiles_are_counted() -> None:
    vision = Vision(Tiles(patch=2, merge=1, side=4, max_tiles=2), IMAGE, before="(", after=")")
    record = llava_chat(("human", "<image>"), ("gpt", "a"))
    encoder = ChatEncoder(vision=vision, template=ChatML("<", ">"))
    made = item(encoder, sample(json=record, png=plain_png(8, 4)))
    assert tokens_as_text(made) == f"<user\n({'#' * 12})>\n<assistant\n[a>\n]"
    assert made["tile_counts"].tolist() == [3]  # two and a thumbnail


def test_with_last_answer_only_the_last_one_contributes_to_the_loss() -> None:
    record = llava_chat(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "e"))
    made = item(ChatEncoder(template=ChatML("<", ">"), answers="last"), sample(json=record))
    assert tokens_as_text(made) == "<user\na>\n<assistant\nb>\n<user\nc>\n<assistant\n[d>\n]"


def test_an_answer_of_weight_0_is_context() -> None:
    record = openai_chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    record["messages"][1]["weight"] = 0
    made = item(ChatEncoder(template=ChatML("<", ">")), sample(json=record))
    assert tokens_as_text(made) == "<user\na>\n<assistant\nb>\n<user\nc>\n<assistant\n[d>\n]"


sayings = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8)


@settings(deadline=None)
@given(turns=st.lists(st.tuples(sayings, sayings), min_size=1, max_size=4))
def test_tokens_equal_those_of_the_tokenizers_template(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": r, "content": c} for pair in turns for r, c in zip(("user", "assistant"), pair, strict=True)]
    made = item(ChatEncoder(TOKENIZER), sample(json=messages))
    expected = TOKENIZER.apply_chat_template(messages, return_dict=False)
    assert TOKENIZER.decode(made["tokens"]) == TOKENIZER.decode(expected)
    learned = TOKENIZER.decode([label for label in made["labels"].tolist() if label != IGNORED])
    assert learned == "".join(f"{answer}<|im_end|>" for _, answer in turns)


def test_pieces_split_at_special_tokens_join_to_the_tokens_of_the_whole() -> None:
    messages = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "def main"}]
    made = item(ChatEncoder(TOKENIZER), sample(json=messages))
    assert made["tokens"].tolist() == TOKENIZER.apply_chat_template(messages, return_dict=False)


def test_template_of_parts_writes_image_placeholders_itself() -> None:
    template = (
        "{% for message in messages %}<{% for part in message.content %}"
        "{{ '~' if part.type == 'image' else part.text }}{% endfor %}>{% endfor %}"
        "{% if add_generation_prompt %}<{% endif %}"
    )
    tokenizer = own_tokenizer(template)
    byte = Tokenizer(lambda text: list(text.encode()), pad=256, name="bytes")
    vision = Vision(VISION.tiles, IMAGE, text="~")
    encoder = ChatEncoder(byte, vision=vision, template=OwnTemplate(tokenizer, content="parts"))
    record = llava_chat(("human", "a<image>b"), ("gpt", "c"))
    assert tokens_as_text(item(encoder, sample(json=record, png=plain_png(4, 4)))) == "<a#b><[c>]"


def test_template_that_rewrites_earlier_turns_is_rejected_with_a_fix() -> None:
    template = "{% for m in messages %}{{ '*' if loop.last else '' }}{{ m.content }}{% endfor %}"
    record = llava_chat(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))
    with pytest.raises(ValueError, match=r"messages\[1\]: the chat template renders it differently.*answers='last'"):
        ChatEncoder(own_tokenizer(template)).encode(sample(json=record), RNG)


def test_a_template_cannot_read_the_clock() -> None:
    template = "{{ date_string if date_string is defined else strftime_now('%d %b') }}" + TEMPLATE
    tokenizer, given_one = own_tokenizer(template), sample(json=llava_chat(("human", "a"), ("gpt", "b")))
    with pytest.raises(TemplateError, match=r"asks for the date.*OwnTemplate\(tokenizer, \{\"date_string"):
        ChatEncoder(tokenizer).encode(given_one, RNG)
    made = item(ChatEncoder(tokenizer, template=OwnTemplate(tokenizer, {"date_string": "1 May"})), given_one)
    assert tokenizer.decode(made["tokens"]).startswith("1 May<|endoftext|><|im_start|>user")


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"txt": "a"}, "no json or messages or conversations or texts"),
        ({"json": llava_chat(("human", "a"))}, "no answer"),
        ({"json": llava_chat()}, "no answer"),
        ({"json": openai_chat(("user", "a"), ("bot", "b"))}, "no answer, but the role 'bot'"),
        ({"json": openai_chat(("user", "a<|im_end|>"), ("assistant", "b"))}, "special token in text"),
        ({"json": llava_chat(("human", "a" * 99), ("gpt", "b"))}, "longer than max_length"),
    ],
)
def test_conversation_without_targets_is_skipped_by_reason(parts: dict[str, Any], reason: str) -> None:
    made = ChatEncoder(trained_tokenizer(), max_length=40).encode(sample(parts), RNG)
    assert isinstance(made, Skip)
    assert made.reason == reason


@pytest.mark.parametrize(
    ("record", "images", "message"),
    [
        (
            llava_chat(("human", "<image>"), ("gpt", "a")),
            0,
            r"conversations\[0\].value: a place for image 1.*has no image",
        ),
        (llava_chat(("human", "b"), ("gpt", "a")), 1, "image 0.png has no place in the text: 0 of 1"),
        (llava_chat(("gpt", "a")), 0, r"messages\[0\] is an answer"),
        (openai_chat(("user", "<image>"), ("assistant", "a")), 0, r"messages\[0\].content: a place for image 1"),
    ],
)
def test_a_conversation_that_does_not_fit_its_images_is_an_error(record: Any, images: int, message: str) -> None:
    parts = {f"{i}.png": plain_png(4, 4) for i in range(images)}
    with pytest.raises(ValueError, match=message):
        ChatEncoder(vision=VISION).encode(sample({"json": record, **parts}), RNG)


def test_images_without_vision_are_an_error() -> None:
    with pytest.raises(ValueError, match="vision=Vision"):
        ChatEncoder().encode(sample(json=llava_chat(("human", "<image>"), ("gpt", "a")), png=plain_png(4, 4)), RNG)


def test_a_batch_of_packs_has_all_images_in_the_order_of_their_tokens() -> None:
    encoder = ChatEncoder(vision=Vision(VISION.tiles, IMAGE, mean=(0.0,) * 3, std=(1.0,) * 3), template=ChatML("", ""))
    given = [
        sample(json=llava_chat(("human", "<image>"), ("gpt", "a")), png=plain_png(4, 4, shade)) for shade in (51, 102)
    ]
    given.append(sample(json=llava_chat(("human", "q"), ("gpt", "a"))))
    a, b, c = (item(encoder, each) for each in given)
    batch = encoder.batch([encoder.pack([a, b], RNG), encoder.pack([c], RNG)], RNG)
    assert (batch["patches"].shape, batch["patches"].dtype) == ((8, 3, 2, 2), torch.float32)
    assert batch["patches"][:, 0, 0, 0].tolist() == pytest.approx([0.2] * 4 + [0.4] * 4)
    assert batch["image_counts"].tolist() == [2, 0]
    assert batch["patch_cu_seqlens"].tolist() == [0, 4, 8]
    assert (batch["patch_cu_seqlens"].dtype, batch["patch_max_seqlen"]) == (torch.int32, 4)
    assert int((batch["tokens"] == IMAGE).sum()) == 2


def test_a_batch_without_an_image_has_the_same_fields_empty() -> None:
    encoder = ChatEncoder(vision=VISION)
    batch = encoder.batch([item(encoder, sample(json=llava_chat(("human", "q"), ("gpt", "a"))))], RNG)
    assert (batch["patches"].shape, batch["patches"].dtype) == ((0, 3, 2, 2), torch.float32)
    assert (batch["grids"].shape, batch["tile_counts"].shape) == ((0, 2), (0,))
    assert batch["image_counts"].tolist() == batch["patch_cu_seqlens"].tolist() == [0]
    assert batch["patch_max_seqlen"] == 0


def test_model_computes_the_same_on_packs_as_on_single_conversations() -> None:
    encoder = ChatEncoder(vision=VISION)
    sizes = [[(8, 8)], [(4, 16), (8, 4)], [], [(16, 8)]]
    items = []
    for images in sizes:
        parts = {f"{i}.png": plain_png(*size, 40 * i + 9) for i, size in enumerate(images)}
        record = llava_chat(("human", "what? " + "<image> and " * len(images)), ("gpt", "x" * (1 + len(images))))
        items.append(item(encoder, sample({"json": record, **parts})))
    assert_packs_equal_documents(encoder, [items[:3], items[3:]], patch=2, merge=4, image_token=IMAGE)


def test_wrong_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match="answers must be 'all' or 'last', not 'first'"):
        ChatEncoder(answers="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        ChatEncoder(max_length=0)
    with pytest.raises(ValueError, match=r"has no chat_template. Pass template=ChatML"):
        ChatEncoder(own_tokenizer(""))


@pytest.mark.parametrize("field", ["weight", "loss", "train"])
@pytest.mark.parametrize("value", [0, False])
@pytest.mark.parametrize("form", ["from and value", "role and content", "user and assistant"])
def test_an_answer_marked_as_untrained_is_context_in_each_form(form: str, field: str, value: Any) -> None:
    if form == "user and assistant":
        record = {"texts": [{"user": "a", "assistant": "b"}, {"user": "c", "assistant": "d"}]}
        record["texts"][0][field] = value
    elif form == "from and value":
        record = llava_chat(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))
        record["conversations"][1][field] = value
    else:
        record = openai_chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
        record["messages"][1][field] = value
    made = item(ChatEncoder(template=ChatML("<", ">")), sample(json=record))
    assert tokens_as_text(made) == "<user\na>\n<assistant\nb>\n<user\nc>\n<assistant\n[d>\n]"


def test_loss_field_that_is_neither_0_nor_1_is_an_error() -> None:
    record = llava_chat(("human", "a"), ("gpt", "b"))
    record["conversations"][1]["weight"] = 0.5
    with pytest.raises(ValueError, match=r"conversations\[1\]\.weight: expected 0 or 1, found 0\.5"):
        ChatEncoder().encode(sample(json=record), Rng(7))


SYSTEM_TURN = "<system\nBe brief>\n<user\na>\n<assistant\n[b>\n]"


@pytest.mark.parametrize("field", ["system", "system_prompt"])
def test_system_field_becomes_the_first_turn(field: str) -> None:
    encoder = ChatEncoder(template=ChatML("<", ">"))
    finevision = {"texts": [{"user": "a", "assistant": "b"}]}
    for record in (
        llava_chat(("human", "a"), ("gpt", "b")),
        openai_chat(("user", "a"), ("assistant", "b")),
        finevision,
    ):
        assert tokens_as_text(item(encoder, sample(json={**record, field: "Be brief"}))) == SYSTEM_TURN
        assert "system" not in tokens_as_text(item(encoder, sample(json={**record, field: ""})))
    twice = openai_chat(("system", "Be brief"), ("user", "a"), ("assistant", "b"))
    assert tokens_as_text(item(encoder, sample(json={**twice, field: "Be brief"}))) == SYSTEM_TURN
    with pytest.raises(ValueError, match=rf"{field}: more than one system prompt\. Keep one of them"):
        encoder.encode(sample(json={**twice, field: "Be long"}), Rng(7))


def test_system_prompt_within_a_pair_of_user_and_assistant_comes_first() -> None:
    record = {"texts": [{"system": "Be brief", "user": "a", "assistant": "b"}]}
    assert tokens_as_text(item(ChatEncoder(template=ChatML("<", ">")), sample(json=record))) == SYSTEM_TURN


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize("form", ["from and value", "role and content", "user and assistant"])
def test_text_that_shows_listed_media_without_a_part_is_an_error(form: str, kind: str) -> None:
    turns = {
        "from and value": llava_chat(("human", f"<{kind}>a"), ("gpt", "b")),
        "role and content": openai_chat(("user", f"<{kind}>a"), ("assistant", "b")),
        "user and assistant": {"texts": [{"user": f"<{kind}>a", "assistant": "b"}]},
    }[form]
    with pytest.raises(ValueError, match=rf"a place for {kind}"):
        ChatEncoder().encode(sample(json={**turns, f"{kind}s": ["photos/a.bin"]}), Rng(7))
