"""A loader for these tests, and the examples in docstrings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from tests.project.test_docstrings import examples, run_example
from tests.support.example_shards import write_example_shards
from tests.support.toy_training import LANES, ToyPipeline, write_training_shards


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Build a loader of 18 batches an epoch."""
    write_training_shards(tmp_path / "shards")

    def loader(kind: str = "counted", **settings: Any) -> sp.SavableLoader:
        return sp.SavableLoader(ToyPipeline(str(tmp_path / "shards"), kind), seed=7, lanes=LANES, **settings)

    return loader


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[int]]:
    """Run the example of a public name and return the number of compared comments."""
    (tmp_path / "example").mkdir()
    write_example_shards(tmp_path / "example/shards")
    monkeypatch.chdir(tmp_path / "example")
    return lambda name: [run_example(code, name.__name__) for code in examples(name)]
