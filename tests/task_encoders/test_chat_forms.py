"""The common forms of conversations, in every store, are the tokens that `apply_chat_template` makes of them."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.rng import Rng
from task_encoders import ChatEncoder, NativeSize, Vision
from task_encoders.parts import data_formats
from tests.support.toy_samples import item, plain_png, sample
from tests.task_encoders.test_chat import own_tokenizer

TOKENIZER = own_tokenizer()
PAD = "<|image_pad|>"
VISION = Vision(NativeSize(patch=2, merge=2, min_pixels=16, max_pixels=256), 2, text=PAD)
IMAGES = [plain_png(8, 4, 10), plain_png(4, 4, 20)]  # 2 tokens and 1
URLS = ["data:image/png;base64," + base64.b64encode(image).decode() for image in IMAGES]
TURNS = [("user", "What is it?"), ("assistant", "A cat."), ("user", "Sure?"), ("assistant", "Yes.")]
SEEN = [("user", f"{PAD}What is it? {PAD}"), *TURNS[1:]]  # as the oracle writes it
FROM = {"user": "human", "assistant": "gpt"}


def roles(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text.replace(PAD, "<image>")} for role, text in turns]


def sides(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"from": FROM[role], "value": text.replace(PAD, "<image>")} for role, text in turns]


def contents(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return turns whose content is a list, with null for missing fields, as tables have them."""
    image = {"type": "image", "text": None}
    made = []
    for role, text in turns:
        first, *rest = text.split(PAD)
        parts = [[{"type": "text", "text": first}], *([image, {"type": "text", "text": each}] for each in rest)]
        made.append({"role": role, "content": [p for each in parts for p in each if p["text"] != ""]})
    return made


PAIRS = [{"user": "What is it?", "assistant": "A cat."}, {"user": "Sure?", "assistant": "Yes."}]
FRONT = [("user", f"{PAD}{PAD}What is it?"), *TURNS[1:]]
ONE = [("user", f"{PAD}What is it?"), *TURNS[1:]]
FORMS: dict[str, tuple[str, list[dict[str, Any]], list[tuple[str, str]], int]] = {
    "messages of role and content": ("messages", roles(TURNS), TURNS, 0),
    "a list of role and content": ("", roles(TURNS), TURNS, 0),
    "a list of from and value": ("", sides(TURNS), TURNS, 0),
    "conversations of from and value": ("conversations", sides(TURNS), TURNS, 0),
    "conversations with one image": ("conversations", sides(ONE), ONE, 1),
    "conversations with a list of images": ("conversations", sides(SEEN), SEEN, 2),
    "messages with one image": ("messages", roles(ONE), ONE, 1),
    "messages with a list of images": ("messages", roles(SEEN), SEEN, 2),
    "messages of from and value": ("messages", sides(SEEN), SEEN, 2),
    "lists of content": ("messages", contents(SEEN), SEEN, 2),
    "texts of user and assistant": ("texts", PAIRS, TURNS, 0),
    "texts with one image": ("texts", PAIRS, ONE, 1),
    "texts with a list of images": ("texts", PAIRS, FRONT, 2),
}
CASES = [
    (form, store)
    for form, (name, _, _, images) in FORMS.items()
    for store in ["tars", "jsonl", "parquet", *["converted"] * bool(name), *["bytes", "struct"] * (images == 1)]
]


def as_record(name: str, turns: list[dict[str, Any]], **more: Any) -> Any:
    return {name: turns, "source": "web", **more} if name else turns


def in_tars(folder: Path, name: str, turns: list[dict[str, Any]], images: int) -> sp.Sample:
    with sp.ShardWriter(folder / "tars") as writer:
        parts = {f"{number}.png": image for number, image in enumerate(IMAGES[:images])}
        writer.write({"__key__": "a", "json": as_record(name, turns), **parts})
    return next(sp.TarShardReader(folder / "tars", sp.Lane(), shuffle=False))


def converted(folder: Path, name: str, turns: list[dict[str, Any]], images: int) -> sp.Sample:
    """Convert JSONL with images beside it."""
    names = [f"x{number}.png" for number in range(images)]
    for named, image in zip(names, IMAGES, strict=False):
        (folder / named).write_bytes(image)
    record = as_record(name, turns, **({"images": names} if images > 1 else {"image": names[0]} if images else {}))
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
    sp.convert(folder / "a.jsonl", folder / "tars", file_fields=["images"] if images > 1 else None)
    return next(sp.TarShardReader(folder / "tars", sp.Lane(), shuffle=False))


def in_jsonl(folder: Path, name: str, turns: list[dict[str, Any]], images: int) -> sp.Sample:
    more = {"images": URLS} if images > 1 else {"image": URLS[0]} if images else {}
    (folder / "a.jsonl").write_text(json.dumps(as_record(name, turns, **more)) + "\n")
    return next(custom.JsonlReader(folder / "a.jsonl", sp.Lane(), shuffle=False))


def in_parquet(folder: Path, name: str, turns: list[dict[str, Any]], images: int, kind: str = "list") -> sp.Sample:
    """Write rows as `datasets` does, with structs of bytes and path, or with bytes alone, as others do."""
    columns: dict[str, Any] = {name or "turns": [turns], "source": ["web"]}
    inside = [{"bytes": image, "path": None} for image in IMAGES[:images]]
    if images:
        struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        columns |= {
            "list": {"images": pa.array([inside], pa.list_(struct))},
            "struct": {"image": pa.array(inside[:1], struct)},
            "bytes": {"image": pa.array(IMAGES[:1], pa.binary())},
        }[kind]
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return next(custom.ParquetReader(folder / "a.parquet", sp.Lane(), shuffle=False))


STORES: dict[str, Callable[..., sp.Sample]] = {
    "tars": in_tars,
    "converted": converted,
    "jsonl": in_jsonl,
    "parquet": in_parquet,
    "bytes": lambda *given: in_parquet(*given, kind="bytes"),
    "struct": lambda *given: in_parquet(*given, kind="struct"),
}


def expected_tokens(turns: list[tuple[str, str]]) -> list[int]:
    """Return transformers' tokens, with as many for each image as its patches make."""
    messages = [{"role": role, "content": text} for role, text in turns]
    ids = TOKENIZER.encode(TOKENIZER.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    counts = iter([2, 1])
    return [one for token in ids for one in ([token] * next(counts) if token == VISION.token else [token])]


@pytest.mark.parametrize(("form", "store"), CASES)
def test_each_conversation_format_in_each_store_has_the_same_tokens(form: str, store: str, tmp_path: Path) -> None:
    assert TOKENIZER.convert_tokens_to_ids(PAD) == VISION.token
    name, turns, wanted, images = FORMS[form]
    alone = store in ("parquet", "bytes", "struct") and not name  # a list by itself is a column
    encoder = ChatEncoder(TOKENIZER, vision=VISION if images else None, part="turns" if alone else "json")
    made = item(encoder, STORES[store](tmp_path, name, turns, images))
    assert made["tokens"].tolist() == expected_tokens(wanted)
    if images:
        sizes = made["grids"].prod(1).tolist()
        assert [patch.unique().tolist() for patch in made["patches"].split(sizes)] == [[10], [20]][:images]


def test_images_follow_the_order_of_their_names_in_the_record() -> None:
    record = {"messages": roles(SEEN), "images": ["b.png", "a.png"]}
    made = item(ChatEncoder(TOKENIZER, vision=VISION), sample({"json": record, "a.png": IMAGES[1], "b.png": IMAGES[0]}))
    assert made["tokens"].tolist() == expected_tokens(SEEN)


def test_content_has_an_inline_image_or_names_its_part() -> None:
    inside = {"bytes": base64.b64encode(IMAGES[0]).decode(), "path": None}  # as a table has an image within a list
    content = [
        {"type": "image", "image": inside, "text": None},
        {"type": "text", "text": "What is it? ", "image": None},
        {"type": "image", "url": "z.png"},
    ]
    record = {"messages": [{"role": "user", "content": content}, *roles(TURNS[1:])]}
    made = item(ChatEncoder(TOKENIZER, vision=VISION), sample({"json": record, "z.png": IMAGES[1]}))
    assert made["tokens"].tolist() == expected_tokens(SEEN)


def test_record_with_missing_images_is_an_error_for_encoders_with_vision() -> None:
    record = {"texts": PAIRS, "images": ["photos/x.png"]}
    with pytest.raises(
        ValueError, match=r"images: \['photos/x.png'\], but the sample has no image; .*--file-field images`"
    ):
        ChatEncoder(TOKENIZER, vision=VISION).encode(sample(json=record), Rng(7))
    assert item(ChatEncoder(TOKENIZER), sample(json=record))["tokens"].tolist() == expected_tokens(TURNS)


def test_null_fields_of_a_turn_are_ignored() -> None:
    turns = [{**turn, "tool_calls": None, "weight": None, "name": None} for turn in roles(TURNS)]
    assert (
        item(ChatEncoder(), sample(json=turns))["tokens"].tolist()
        == item(ChatEncoder(), sample(json=roles(TURNS)))["tokens"].tolist()
    )


def test_placeholder_without_vision_and_images_is_text() -> None:
    turns = [("user", "What does <image> do in SVG?"), ("assistant", "<image> shows one.")]
    made = item(ChatEncoder(), sample(json={"messages": roles(turns)}))
    assert bytes(token for token in made["tokens"].tolist() if token < 256).count(b"<image>") == 2
    with pytest.raises(
        ValueError,
        match=r"messages\[0\].content: a place for image 1, but the sample has no image; .* --file-field images`",
    ):
        ChatEncoder(vision=VISION).encode(sample(json={"messages": roles(turns)}), Rng(7))


def test_conversation_format_is_logged_once_per_process(caplog: pytest.LogCaptureFixture) -> None:
    data_formats._log_format.cache_clear()
    caplog.set_level(logging.INFO)
    for _ in range(3):
        for record in (roles(TURNS), {"texts": PAIRS}):
            item(ChatEncoder(), sample(json=record))
    assert [each.message for each in caplog.records] == [
        "ChatEncoder: the conversations are a list of role and content",
        "ChatEncoder: the conversations are texts of user and assistant",
    ]


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"prompt": "a", "answer": "b"}, "found the fields prompt, answer"),
        ({"messages": [{"speaker": "a", "text": "b"}]}, r"messages\[0\]: .*; found the fields speaker, text"),
        (7, "found int"),
    ],
)
def test_format_error_names_the_sample_its_fields_and_the_known_formats(
    record: Any, found: str, tmp_path: Path
) -> None:
    with sp.ShardWriter(tmp_path / "tars") as writer:
        writer.write({"__key__": "k7", "json": record})
    items = sp.Encode(sp.TarShardReader(tmp_path / "tars", sp.Lane()), ChatEncoder())
    forms = (
        "expected turns of role and content, or of from and value, or of user and assistant, as a list or in a field "
        "messages, conversations, texts; "
    )
    with pytest.raises(sp.EncodeError, match=found) as raised:
        next(items)
    assert forms in str(raised.value) and "sample 'k7' of 000000.tar: " in str(raised.value)


def test_rows_without_a_conversation_are_skipped_with_the_expected_names() -> None:
    for part, reason in (("json", "no json or messages or conversations or texts"), ("talk", "no talk")):
        skipped = ChatEncoder(part=part).encode(sample(prompt="a"), Rng(7))
        assert isinstance(skipped, sp.Skip) and skipped.reason == reason
