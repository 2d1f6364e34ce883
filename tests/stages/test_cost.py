"""What a pack costs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.stages.cost import Costing, waiting_share


def cubic(length: int, images: int) -> int:
    return length**3 + images


def test_attention_cost_has_a_quadratic_and_a_linear_term() -> None:
    cost = sp.attention_cost(hidden=10, per_image=1000)
    assert cost(7, 0) == 49 + 420
    assert cost(7, 2) == 49 + 420 + 2000
    assert Costing("Balance", cost).of_pack([(7, 0), (7, 2), (1, 0)]) == 469 + 2469 + 61


def test_waiting_share_is_relative_to_the_time_of_all_ranks() -> None:
    assert waiting_share([[2, 4]]) == 0.25
    assert waiting_share([[2, 4], [1, 1, 1]]) == 1 - 9 / 11
    assert waiting_share([]) == 0.0


def test_cost_is_saved_by_its_name_and_numbers() -> None:
    named = [Costing("Balance", cost).name for cost in (sp.attention_cost(hidden=8), cubic, partial(cubic))]
    assert named == ["attention_cost(hidden=8)", "cubic", "partial"]
    assert Costing("Balance", sp.attention_cost(hidden=8, per_image=3)).name == "attention_cost(hidden=8, per_image=3)"


@pytest.mark.parametrize("wrong", [{"hidden": 0}, {"hidden": 8, "per_image": -1}])
def test_impossible_model_sizes_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="hidden must be at least 1"):
        sp.attention_cost(**wrong)


def test_integers_of_any_kind_are_costs() -> None:
    found = Costing("Balance", lambda length, images: np.int64(length)).of(3, 0)  # type: ignore[return-value,arg-type]
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize("cost", [lambda n, i: n / 2, lambda n, i: -1, lambda n, i: 1 << 62, lambda n: n])
def test_cost_that_is_not_a_count_is_an_error_that_names_the_document(cost: Any) -> None:
    with pytest.raises(sp.EncodeError, match=r"Balance: cost <lambda>\(5, 1\) failed"):
        Costing("Balance", cost).of(5, 1)


def test_number_instead_of_a_function_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"such as sp.attention_cost\(hidden=2048\), not 2048"):
        Costing("Balance", 2048)  # type: ignore[arg-type]
