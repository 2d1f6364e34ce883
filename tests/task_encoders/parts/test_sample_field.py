"""`Field`: parts and what lies in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from task_encoders.parts.sample_parts import Field
from tests.support.toy_samples import sample

RECORD = {"label": 3, "meta": {"names": ["a", "b"]}, "none": None}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("txt", "hé"),
        ("md", None),
        ("json[label]", 3),
        ("json[meta][names][1]", "b"),
        ("json[meta][names][2]", None),
        ("json[meta][other]", None),
        ("json[none][deeper]", None),
        ("info.json[label]", 4),
    ],
)
def test_field_name_resolves_to_a_value_or_none(name: str, expected: Any) -> None:
    given = sample({"txt": "hé", "json": RECORD, "info.json": {"label": 4}})
    assert Field(name).read(given) == expected


def test_error_names_the_step_into_a_value_without_fields() -> None:
    with pytest.raises(ValueError, match=r"json\[label\]\[deep\]: \[deep\] expects an object, found int"):
        Field("json[label][deep]").read(sample(json=RECORD))


def test_value_that_is_not_text_is_an_error_if_text_is_required() -> None:
    assert Field("json[meta][names][0]").read_text(sample(json=RECORD)) == "a"
    with pytest.raises(ValueError, match=r"json\[label\]: expected text, found int 3"):
        Field("json[label]").read_text(sample(json=RECORD))


@pytest.mark.parametrize("wrong", ["", "json[", "[label]", "json[a]b", "json[]"])
def test_invalid_field_name_is_rejected(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"such as json\[caption\]"):
        Field(wrong)


@pytest.mark.parametrize("value", [["x"], 5, True, {"a": "b"}])
def test_json_value_that_is_not_text_is_not_read_as_letters(value: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": value}) + "\n" + json.dumps({"text": json.dumps(value)}) + "\n"
    )
    reader = custom.JsonlReader(tmp_path / "a.jsonl", sp.Lane(), shuffle=False)
    with pytest.raises(ValueError, match=f"text: expected text, found {type(value).__name__}"):
        Field("text").read_text(next(reader))
    assert Field("text").read_text(next(reader)) == json.dumps(value)  # a text that looks like it
