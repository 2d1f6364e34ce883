"""`mixture.yaml`: what it says is what is blended, and what is wrong in it is named by its line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.mixture import Source


@pytest.fixture
def write(tmp_path: Path, make_shards: Any) -> Any:
    """Writes a mixture beside three datasets of 10, 20 and 30 samples."""
    for name, size in [("a", 10), ("b", 20), ("c", 30)]:
        make_shards([size], folder=name, of=name)

    def write(text: str) -> Path:
        path = tmp_path / "mixture.yaml"
        path.write_text(dedent(text).lstrip())
        return path

    return write


def of_each(stage: sp.Stage, n: int) -> Counter[str]:
    """Which datasets the first `n` samples are of."""
    return Counter(sample.json()["of"] for sample, _ in zip(stage, range(n), strict=False))


def test_sources_come_by_weight_and_a_mixture_may_hold_others(write: Any) -> None:
    path = write(
        """
        sources:
          first: {path: a, weight: 0.5}
          rest:
            weight: 0.5
            sources:
              b: {path: b, weight: 3}
              c: {path: [c/0000.tar], weight: 1}
        """
    )
    mixture = sp.read_mixture(path)
    assert mixture.sources["first"] == Source(path=str(path.parent / "a"), weight=0.5)
    assert of_each(mixture.samples(sp.Lane()), 800) == {"a": 400, "b": 300, "c": 100}


def test_repetitions_end_together(write: Any) -> None:
    mixture = sp.read_mixture(
        write(
            """
            sources:
              a: {path: a, repetitions: 3}
              b: {path: b, repetitions: 1}
            """
        )
    )
    stage = mixture.samples(sp.Lane(), block_size=1)
    assert of_each(stage, 25) in ({"a": 15, "b": 10}, {"a": 14, "b": 11}, {"a": 16, "b": 9})
    assert of_each(mixture.samples(sp.Lane()), 1000) == {"a": 30, "b": 20}


def test_split_and_subset_are_the_readers(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def reader(path: Any, lane: sp.Lane, **settings: Any) -> sp.Stage:
        given.append({name: settings.pop(name, None) for name in ("split", "subset")})
        return sp.TarShardReader(path, lane, **settings)

    monkeypatch.setattr("savable_pipeline.mixture.TarShardReader", reader)
    path = write("sources: {a: {path: a, weight: 1, split: train, subset: [0.1, 0.3]}, b: {path: b, weight: 2}}")
    sp.read_mixture(path).samples(sp.Lane())
    assert given == [{"split": "train", "subset": (0.1, 0.3)}, {"split": None, "subset": None}]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "a mapping is expected here, not None"),
        ("[1, 2]", 1, "a mapping is expected"),
        ("sources: {}", 1, "a mixture has `sources`"),
        ("source: {a: {path: a, weight: 1}}", 1, "'source' is unknown here"),
        ("sources:\n  a: {path: a, weight: 1}\n  b: 3", 3, "a mapping is expected here, not 3"),
        ("sources:\n  a:\n    path: a\n    weight: [1]", 4, "Expected `int | float | str | null`, got `array`"),
        ("sources:\n  a:\n    path: a\n    wait: 1", 4, "a source contains unknown field `wait`"),
        ("sources:\n  a:\n    path: a\n\n    weight: -1", 5, "must be above 0, not -1"),
        ("sources:\n  a:\n    path: a\n    weight: .nan", 4, "must be a number, not nan"),
        ("sources:\n  a:\n    weight: 1", 2, "a source missing required field `path`"),
        ("sources:\n  a:\n    path: a", 2, "'a' has neither `weight` nor `repetitions`"),
        ("sources:\n  a: {path: a, repetitions: 1}\n  b: {path: b, weight: 1}", 3, "'b' has no `repetitions`"),
        ("sources:\n  a:\n    path: a\n    repetitions: 0", 4, "`repetitions` is at least 1"),
        ("sources:\n  a/b: {path: a, weight: 1}", 2, "has no / and no #"),
        ("sources:\n  a: {path: a, weight: 1}\n  a: {path: b, weight: 1}", 3, "'a' is there twice, first in line 2"),
        ("sources:\n  a: {path: a, weight: 1", 2, "expected ',' or '}'"),
        ("sources:\n  a: !!python/object/apply:os.system [ls]", 2, "could not determine a constructor"),
    ],
)
def test_an_error_names_the_line(write: Any, text: str, line: int, what: str) -> None:
    path = write(text)
    with pytest.raises(ValueError) as caught:
        sp.read_mixture(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert what in str(caught.value)
