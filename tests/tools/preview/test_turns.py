"""Conversations on the page of a dataset: their turns in order, the answers in sight, nothing of them as markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from savable_pipeline.tools.preview import preview_dataset
from savable_pipeline.tools.preview.sample_entries import Turn, conversation_in
from tests.conftest import write_tar
from tests.tools.preview.test_preview import EVIL, Page


def turn_of(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """Return a turn of a role."""
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("record", "turns", "rest"),
    [
        (
            {
                "id": 7,
                "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}],
            },
            [Turn("human", "<image>\nWhat?"), Turn("gpt", "A cat.", answers=True)],
            {"id": 7},
        ),
        (
            {
                "messages": [
                    turn_of("user", [{"type": "image"}, {"type": "text", "text": "What?"}]),
                    turn_of("assistant", "A dog."),
                ]
            },
            [Turn("user", "[image]What?"), Turn("assistant", "A dog.", answers=True)],
            None,
        ),
        (
            [turn_of("user", "Rain?"), turn_of("assistant", None, tool_calls=["sky"]), turn_of("tool", "dry")],
            [Turn("user", "Rain?"), Turn("assistant", '{"tool_calls": ["sky"]}', answers=True), Turn("tool", "dry")],
            None,
        ),
    ],
)
def test_conversations_of_llava_and_openai_are_recognized(record: Any, turns: list[Turn], rest: Any) -> None:
    assert conversation_in(record) == (turns, rest)


@pytest.mark.parametrize(
    "record", [{}, [], {"tags": ["a"]}, [{"role": "user"}], {"from": "a", "value": "b"}, "text", 3]
)
def test_other_records_are_not_conversations(record: Any) -> None:
    assert conversation_in(record) is None


def test_last_answer_is_visible_after_long_questions_and_many_turns() -> None:
    long = [turn_of("user" if i % 2 == 0 else "assistant", f"{'so ' * 2_000}{i}") for i in range(100)]
    found = conversation_in({"messages": long})
    assert found is not None
    turns = found[0]
    assert turns[-1].answers and turns[-1].text.endswith("so 99")
    assert turns[4].text == "… 88 turns more …"
    assert sum(len(turn.text) for turn in turns) < 10_000


def test_the_page_shows_turns_and_the_rest_of_the_record_as_text(tmp_path: Path) -> None:
    record = {
        "source": EVIL,
        "messages": [turn_of("user", "long " * 2_000), turn_of(EVIL, EVIL), turn_of("assistant", "A cat.")],
    }
    write_tar(tmp_path / "0.tar", [("a.json", json.dumps(record).encode())])
    page = Page(preview_dataset(tmp_path))
    page.check_harmless()
    classes = [attributes["class"] for tag, attributes in page.elements if tag == "p" and "class" in attributes]
    assert classes.count("turn") == 2 and classes.count("turn answer") == 1
    assert "A cat." in page.text and page.text.count(EVIL) == 3 - 1  # the source is quoted as JSON


def test_a_column_of_a_table_is_shown_as_turns_and_subtitles_as_text(tmp_path: Path) -> None:
    turns = [turn_of("user", "so " * 9_000), turn_of("assistant", "A cat.")]
    subtitles = "\ufeff1\r\n00:00:01,000 --> 00:00:02,000\r\n<i onclick=x>Hello</i>\r\n"
    parts = {"messages": json.dumps(turns), "srt": subtitles, "vtt": "WEBVTT\n\n\x01Hi"}
    write_tar(tmp_path / "0.tar", [(f"a.{name}", text.encode()) for name, text in parts.items()])
    page = Page(preview_dataset(tmp_path))
    page.check_harmless()
    classes = [attributes["class"] for tag, attributes in page.elements if tag == "p" and "class" in attributes]
    assert classes.count("turn answer") == 1 and "A cat." in page.text
    assert "00:00:02,000\n<i onclick=x>Hello</i>\n" in page.text and "\\u0001Hi" in page.text
    assert "\\ufeff" not in page.text
