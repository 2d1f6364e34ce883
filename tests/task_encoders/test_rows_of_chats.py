"""Rows of chats as tables have them: nulls of a schema, JSON within columns, tools, preferences, numbers of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.rng import Rng
from task_encoders import ChatEncoder, NativeSize, Vision
from tests.support.toy_samples import item, plain_png, sample
from tests.task_encoders.test_like_chat_templates import (
    CALLING,
    TOOL_TEMPLATE,
    TOOLS,
    expected_tokens,
    tokens_and_mask,
    with_template,
)

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
JSON = pa.json_(pa.string())


def in_parquet(table: Any, folder: Path) -> Any:
    """Write a table as Parquet."""
    pq.write_table(table, folder / "a.parquet")
    return next(custom.ParquetReader(folder / "a.parquet", sp.Lane(), shuffle=False))


def in_arrow(table: Any, folder: Path) -> Any:
    """Write a table as `save_to_disk` does."""
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return next(custom.ArrowReader(folder / "a.arrow", sp.Lane(), shuffle=False))


def as_json_columns() -> Any:
    """Return tool calls and tools as columns of the type `arrow.json`, as `datasets` stores varying arguments."""

    def texts(values: list[Any]) -> Any:
        return pa.ExtensionArray.from_storage(JSON, pa.array([json.dumps(value) for value in values], pa.string()))

    calls = [turn.get("tool_calls", []) for turn in CALLING]
    ends = [sum(map(len, calls[:count])) for count in range(len(calls) + 1)]
    listed = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), texts([call for each in calls for call in each]))
    fields = {"role": pa.array([t["role"] for t in CALLING]), "content": texts([t["content"] for t in CALLING])}
    turns = pa.StructArray.from_arrays([*fields.values(), listed], names=[*fields, "tool_calls"])
    rows = pa.array([0, len(CALLING)], pa.int32())
    tools = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), texts(TOOLS))
    return pa.table({"messages": pa.ListArray.from_arrays(rows, turns), "tools": tools})


@pytest.mark.parametrize("store", [in_parquet, in_arrow])
def test_columns_of_json_are_read(store: Any, tmp_path: Path) -> None:
    own = with_template("qwen", TOOL_TEMPLATE)
    made = item(ChatEncoder(own), store(as_json_columns(), tmp_path))
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]  # its null is left out
    wanted = [{**turn, **({"tool_calls": calls} if "tool_calls" in turn else {})} for turn in CALLING]
    assert tokens_and_mask(made) == expected_tokens(own, TOOL_TEMPLATE, wanted, tools=TOOLS)


@pytest.mark.parametrize("store", [in_parquet, in_arrow])
@pytest.mark.parametrize("tools", ["text", "struct"])
def test_nulls_that_a_schema_puts_in_structs_do_not_reach_a_template(store: Any, tools: str, tmp_path: Path) -> None:
    arguments = [{"city": "Rome"}, {"day": 3}]
    calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **call} for call in calls]},
    ]
    both = [TOOLS[0], {"type": "function", "function": {"name": "g", "description": "d"}}]
    table = pa.Table.from_pylist([{"messages": turns, "tools": json.dumps(both) if tools == "text" else both}])
    assert '"day": null' in json.dumps(table.to_pylist())
    own = with_template("qwen", TOOL_TEMPLATE)
    made = item(ChatEncoder(own), store(table, tmp_path))
    assert "null" not in own.decode(made["tokens"])
    assert tokens_and_mask(made) == expected_tokens(own, TOOL_TEMPLATE, turns, tools=both)


def test_nulls_of_a_line_of_json_are_its_own(tmp_path: Path) -> None:
    own = with_template("qwen", TOOL_TEMPLATE)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CALLING, "tools": TOOLS}) + "\n")
    line = next(custom.JsonlReader(tmp_path / "a.jsonl", sp.Lane(), shuffle=False))
    made = item(ChatEncoder(own), line)
    assert tokens_and_mask(made) == expected_tokens(own, TOOL_TEMPLATE, CALLING, tools=TOOLS)
    assert '"b": null' in own.decode(made["tokens"])


def test_system_column_of_a_table_comes_first(tmp_path: Path) -> None:
    rows = [{"messages": TURNS, "system": "Be brief"}, {"messages": TURNS, "system": None}]
    expected = [[{"role": "system", "content": "Be brief"}, *TURNS], TURNS]
    for number, row in enumerate(rows):
        (tmp_path / str(number)).mkdir()
        made = item(ChatEncoder(), in_parquet(pa.Table.from_pylist([row, *rows]), tmp_path / str(number)))
        assert made["tokens"].tolist() == item(ChatEncoder(), sample(json=expected[number]))["tokens"].tolist()


PREFERENCES: dict[str, dict[str, Any]] = {
    "DPO": {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
    "with messages": {"messages": TURNS, "chosen": TURNS, "rejected": TURNS},
    "ms-swift's": {"messages": TURNS, "rejected_response": "c"},
    "KTO": {"messages": TURNS, "label": False},
    "LLaMA-Factory's KTO": {"messages": TURNS, "kto_tag": False},
}


@pytest.mark.parametrize("store", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize("form", PREFERENCES)
def test_rows_of_preferences_are_rejected(form: str, store: str, tmp_path: Path) -> None:
    row = PREFERENCES[form]
    if store == "json":
        given = sample(json=row)
    elif store == "parquet":
        given = in_parquet(pa.Table.from_pylist([row]), tmp_path)
    else:
        (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
        given = next(custom.JsonlReader(tmp_path / "a.jsonl", sp.Lane(), shuffle=False))
    with pytest.raises(ValueError, match="as preferences, whose answers are not all targets"):
        ChatEncoder().encode(given, Rng(7))


def test_chosen_answers_of_named_columns_contribute_to_the_loss(tmp_path: Path) -> None:
    plain = item(ChatEncoder(), sample(json=TURNS))["tokens"].tolist()
    for row in (
        {"messages": TURNS, "label": True},
        {"messages": TURNS, "label": 0},
        {"messages": TURNS, "rejected": None},
    ):
        assert item(ChatEncoder(), sample(json=row))["tokens"].tolist() == plain
    table = pa.Table.from_pylist([PREFERENCES["with messages"]])
    assert item(ChatEncoder(part="messages"), in_parquet(table, tmp_path))["tokens"].tolist() == plain


VISION = Vision(NativeSize(patch=2, merge=2, min_pixels=16, max_pixels=256), 259)


def greys_of(messages: Any, images: Any = None) -> list[int]:
    """Return the greys of the images in their order, for parts a, b and c of 10, 20 and 30."""
    record = {"messages": messages, **({"images": images} if images else {})}
    parts = {f"{name}.png": plain_png(4, 4, 10 * number) for number, name in enumerate("abc", start=1)}
    made = item(ChatEncoder(vision=VISION), sample({"json": record, **parts}))
    sizes = made["grids"].prod(1).tolist()
    return [int(patches.unique()) for patches in made["patches"].split(sizes)]


def asking(*numbers: int | None) -> list[dict[str, Any]]:
    content = [{"type": "image", **({} if number is None else {"index": number})} for number in numbers]
    return [{"role": "user", "content": [*content, {"type": "text", "text": "?", "index": None}]}, TURNS[1]]


def test_images_are_at_the_positions_of_the_row() -> None:
    assert greys_of(asking(2, 0, 1)) == [30, 10, 20]
    assert greys_of(asking(1, None, None)) == [20, 10, 30]
    assert greys_of(asking(0, 1, 2), images=["c.png", "a.png", "b.png"]) == [30, 10, 20]
    again = ["b.png", "a.png", "b.png", "c.png"]
    assert greys_of([{"role": "user", "content": "<image>" * 4}, TURNS[1]], images=again) == [20, 10, 20, 30]
    with pytest.raises(ValueError, match=r"content\[0\].index: 3, but the sample has a.png, b.png, c.png"):
        greys_of(asking(3))
    with pytest.raises(ValueError, match=r"image b\.png has no place in the text: 2 of 4 have"):
        greys_of([{"role": "user", "content": "<image>" * 2}, TURNS[1]], images=again)
