"""Conversations of all kinds to messages; what is wrong in them is named by its field."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from task_encoders.parts.data_formats import Message, parse_conversation
from task_encoders.parts.sample_parts import SampleImages, SampleMedia
from tests.support.toy_samples import plain_png, sample


def parse(record: Any, **images: bytes) -> list[Message]:
    """Return the messages of a record. Its parts are named `a_png` for a.png."""
    parts = {n.replace("_", "."): image for n, image in images.items()}
    return parse_conversation(record, SampleMedia(SampleImages(sample(parts))))


def roles_and_parts(messages: list[Message]) -> list[tuple[str, list[Any]]]:
    """Return roles and parts, with an image as its width."""
    return [(each.role, [part if isinstance(part, str) else part.width for part in each.parts]) for each in messages]


def test_llava_placeholders_get_the_images_in_order_at_any_position() -> None:
    record = {
        "id": "7",
        "image": ["x/1.jpg", "x/2.jpg"],
        "conversations": [
            {"from": "system", "value": "Look."},
            {"from": "human", "value": "<image>\nand <image>?"},
            {"from": "gpt", "value": "Two."},
        ],
    }
    assert roles_and_parts(parse(record, a2_png=plain_png(2, 1), a10_png=plain_png(10, 1))) == [
        ("system", ["Look."]),
        ("user", [2, "\nand ", 10, "?"]),
        ("assistant", ["Two."]),
    ]


def test_openai_content_is_text_or_parts_with_images_in_order_by_name_or_inline() -> None:
    url = "data:image/png;base64," + base64.b64encode(plain_png(9, 1)).decode()
    content = [
        {"type": "image"},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "C.png"}},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image"},
    ]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    record = [{"role": "user", "content": content}, call, {"role": "tool", "tool_call_id": "1", "content": "7"}]
    messages = parse(record, a_png=plain_png(2, 1), b_png=plain_png(3, 1), c_png=plain_png(4, 1))
    assert roles_and_parts(messages) == [("user", [2, "and", 4, 9, 3]), ("assistant", []), ("tool", ["7"])]
    assert [each.more for each in messages] == [{}, {"tool_calls": [CALL]}, {"tool_call_id": "1"}]


def test_answers_are_assistant_messages_except_of_weight_0() -> None:
    turns = [("user", {}), ("assistant", {}), ("assistant", {"weight": 0}), ("assistant", {"weight": 1})]
    messages = parse({"messages": [{"role": role, "content": "a", **more} for role, more in turns]})
    assert [each.is_answer for each in messages] == [False, True, False, True]
    assert not any(each.more for each in messages)


CALL = {"type": "function", "id": "1", "function": {"name": "f"}}


def human(value: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": value}]}


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"turns": []}, "expected turns of role and content, .*; found the fields turns"),
        ("hi", "expected turns of role and content, .*; found str"),
        ({"messages": {}}, "messages: expected a list, found {}"),
        ({"conversations": ["hi"]}, r"conversations\[0\]: expected an object, found 'hi'"),
        ({"conversations": [{"value": "hi"}]}, r"conversations\[0\].from: expected one of human, .*, found None"),
        ({"conversations": [{"from": "bot", "value": ""}]}, r"conversations\[0\].from: .*, found 'bot'"),
        (human(None), r"conversations\[0\].value: expected text, found nothing"),
        (human(7), r"conversations\[0\].value: expected text, found 7"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].role: expected text, found nothing"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: expected a list, found nothing"),
        (
            {"messages": [{"role": "user", "content": "", "weight": 2}]},
            r"messages\[0\].weight: expected 0 or 1, found 2",
        ),
        (user("hi"), r"messages\[0\].content\[0\]: expected an object, found 'hi'"),
        (user({"type": "text"}), r"messages\[0\].content\[0\].text: expected text, found nothing"),
        (user({"type": "file"}), r"messages\[0\].content\[0\].type: .* found 'file'"),
        (user({"type": "audio"}), r"content\[0\]: a place for audio, but the encoder takes none. Pass audio="),
        (user({"type": "image_url"}), r"messages\[0\].content\[0\].image_url.url: expected text, found nothing"),
        (user({"type": "image_url", "image_url": {"url": "b.png"}}), r"no image 'b.png', the sample has a.png"),
        (user({"type": "image_url", "image_url": "https://x/a.png"}), "Nothing is downloaded"),
        (
            user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
            r"image_url.url: no image can",
        ),
        (user({"type": "image_url", "image_url": {"url": "data:image/png,x"}}), "not base64"),
        (user({"type": "image"}, {"type": "image"}), r"content\[1\]: a place for image 2, but the sample has a.png"),
        (human("no place"), "image a.png has no place in the text: 0 of 1 have"),
    ],
)
def test_error_names_the_wrong_field(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(record, a_png=plain_png(2, 1))
