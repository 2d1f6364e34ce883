"""`Field`: parts and what lies in them."""

from __future__ import annotations

from typing import Any

import pytest

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
def test_a_name_leads_to_a_value_or_none(name: str, expected: Any) -> None:
    given = sample({"txt": "hé", "json": RECORD, "info.json": {"label": 4}})
    assert Field(name).read(given) == expected


def test_a_step_into_what_has_no_fields_is_named() -> None:
    with pytest.raises(ValueError, match=r"json\[label\]\[deep\]: \[deep\] expects an object, found int"):
        Field("json[label][deep]").read(sample(json=RECORD))


def test_what_is_no_text_is_an_error_where_text_is_asked_for() -> None:
    assert Field("json[meta][names][0]").read_text(sample(json=RECORD)) == "a"
    with pytest.raises(ValueError, match=r"json\[label\]: expected text, found int 3"):
        Field("json[label]").read_text(sample(json=RECORD))


@pytest.mark.parametrize("wrong", ["", "json[", "[label]", "json[a]b", "json[]"])
def test_what_is_no_name_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"such as json\[caption\], not"):
        Field(wrong)
