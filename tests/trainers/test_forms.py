"""States as JSON come back as they were, or are refused."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.errors import StateError
from savable_pipeline.trainers.forms import from_json, to_json
from tests.support.streams import next_hashes
from tests.support.toy_pipelines import toy_pipeline


@pytest.fixture
def loader(make_shards: Any) -> sp.SavableLoader:
    return sp.SavableLoader(partial(toy_pipeline, str(make_shards([40]))), seed=3, lanes=4)


@pytest.fixture
def state(loader: sp.SavableLoader) -> dict[str, Any]:
    next_hashes(loader, 5)
    return loader.state_dict()


def test_a_state_passes_through_json(state: dict[str, Any], loader: sp.SavableLoader) -> None:
    saved = json.loads(json.dumps(to_json(state)))
    assert from_json(saved) == state
    expected = next_hashes(loader, 4)
    loader.load_state_dict(from_json(saved))
    assert next_hashes(loader, 4) == expected


@pytest.mark.parametrize("text", ["U0FW", "base64:U0F", "base64:U0F?", "base64:é", "x base64:U0FW"])
def test_text_without_encoded_bytes_is_rejected(state: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError, match="lane_00001: no base64 bytes"):
        from_json({**to_json(state), "lane_00001": text})


@pytest.mark.parametrize("form", [to_json, from_json])
def test_value_that_is_not_a_state_is_rejected(form: Any) -> None:
    with pytest.raises(StateError, match="this is no state of a SavableLoader"):
        form({"slot": 3})
