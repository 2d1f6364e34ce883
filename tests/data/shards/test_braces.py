"""Braces in the names of shards, as braceexpand spells them, and bounded."""

from __future__ import annotations

import pytest

from savable_pipeline.data.shards.paths import expand_braces
from savable_pipeline.errors import ShardError


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("{0..2}.tar", ["0.tar", "1.tar", "2.tar"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{8..011}", ["008", "009", "010", "011"]),
        ("{000..002}", ["000", "001", "002"]),
        ("{10..12}", ["10", "11", "12"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{0..9..4}", ["0", "4", "8"]),
        ("{a..e..2}", ["a", "c", "e"]),
        ("{c..a}", ["c", "b", "a"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{a,b,}x", ["ax", "bx", "x"]),
        ("{a,b{1,2}c}", ["a", "b1c", "b2c"]),
        ("{{0..1},x}", ["0", "1", "x"]),
        ("{5..5}", ["5"]),
        ("{{1,2}}", ["{1}", "{2}"]),
        ("no{braces", ["no{braces"]),
        ("no}braces{", ["no}braces{"]),
        ("{a{1,2}", ["{a{1,2}"]),
        ("{one}", ["{one}"]),
        ("{}", ["{}"]),
    ],
)
def test_braces_are_spelled_out(pattern: str, expected: list[str]) -> None:
    assert expand_braces(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("{0..9999999}", "mean more than 1,000,000 names"),
        ("{0..999}{0..999}{0..9}", "mean more than 1,000,000 names"),
        ("{1,2}" * 64, "mean more than 1,000,000 names"),
        ("{{0..600000},{0..600000}}", "mean more than 1,000,000 names"),
        ("{0..99999}" + "x" * 10_000, "or too long ones"),
        ("{" * 1000 + "a,b" + "}" * 1000, "mean more than 1,000,000 names"),
    ],
)
def test_braces_that_mean_too_many_names_are_an_error(pattern: str, told: str) -> None:
    with pytest.raises(ShardError, match=told):
        expand_braces(pattern)


def test_a_long_pattern_of_lone_braces_takes_no_time() -> None:
    assert expand_braces("}" * 100_000) == ["}" * 100_000]
    with pytest.raises(ShardError, match="the braces mean more than"):
        expand_braces("{" * 100_000)
