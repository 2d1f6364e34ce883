"""What each worker thread has a copy of, and what is refused because the copies would share it."""

from __future__ import annotations

import copy
import ctypes
import random
import sqlite3
import tempfile
from collections.abc import Callable
from functools import partial, wraps
from random import choice
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from savable_pipeline.core.thread_copies import thread_copy

DRAWS = random.Random(3)
BY_NAME = {"a": DRAWS}


def words() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))


UNSAFE: dict[str, Callable[[], Any]] = {
    "Tokenizer": words,
    "TokenizersBackend": lambda: transformers.PreTrainedTokenizerFast(tokenizer_object=words()),
    "Random": random.Random,
    "Generator": np.random.default_rng,
    "RandomState": np.random.RandomState,
    "PCG64": np.random.PCG64,
    "torch.Generator": torch.Generator,
    "_TemporaryFileWrapper": tempfile.TemporaryFile,
    "Connection": lambda: sqlite3.connect(":memory:"),
    "CDLL": lambda: ctypes.CDLL(None),
    "c_int": ctypes.c_int,
}


def closing_over(value: Any) -> Callable[[Any], Any]:
    return lambda sample: (value, sample)


def with_default(value: Any) -> Callable[[Any], Any]:
    def function(sample: Any, bound: Any = value) -> Any:
        return bound, sample

    return function


def with_keyword_default(value: Any) -> Callable[[Any], Any]:
    def function(sample: Any, *, bound: Any = value) -> Any:
        return bound, sample

    return function


def decorated(value: Any) -> Callable[[Any], Any]:
    @wraps(with_default)
    def function(sample: Any) -> Any:
        return inner(sample)

    inner = with_default(value)

    return function


@pytest.mark.parametrize("refer", [closing_over, with_default, with_keyword_default, decorated])
@pytest.mark.parametrize("unsafe", UNSAFE)
def test_function_with_an_object_that_threads_must_not_share_is_rejected(unsafe: str, refer: Any) -> None:
    value = UNSAFE[unsafe]()
    kind = type(value).__name__
    for each in (value, [value], {"a": value}):
        with pytest.raises(ValueError, match=rf"share .\w+. of \S+<locals>\S+, a {kind}\. Bind it") as caught:
            thread_copy(refer(each))
        assert len(str(caught.value)) <= 250


def of_a_global(sample: Any) -> Any:
    return DRAWS.random() + sample


def of_a_list_of_globals(sample: Any) -> Any:
    return [[BY_NAME["a"].random() for _ in range(3)] for _ in range(sample)]


def of_a_helper(sample: Any) -> Any:
    return of_a_global(sample)


def of_the_module_random(sample: Any) -> Any:
    return choice(sample)


class Bound:
    """What a thread may have of its own, and a method that refers to a global."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, sample: Any) -> Any:
        return self.value, sample


class OfAGlobal:
    def draw(self, sample: Any) -> Any:
        return DRAWS.random() + sample


class OfTheClass:
    draws = random.Random(3)

    def __call__(self, sample: Any) -> Any:
        return self.draws.random()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (of_a_global, "'DRAWS' of of_a_global, a Random"),
        (of_a_list_of_globals, "'BY_NAME' of of_a_list_of_globals, a Random"),
        (of_a_helper, "'DRAWS' of of_a_global, a Random"),
        (of_the_module_random, "'choice' of of_the_module_random, a Random"),
        (partial(of_a_global), "'DRAWS' of of_a_global, a Random"),
        (OfAGlobal().draw, "'DRAWS' of OfAGlobal.draw, a Random"),
        (Bound(closing_over(DRAWS)), "'value' of closing_over.<locals>.<lambda>, a Random"),
        (OfTheClass(), "'draws' of OfTheClass, a Random"),
        (Bound(ctypes.CDLL(None)), "'value' of Bound, a CDLL"),
        (DRAWS.shuffle, None),
        (words().encode, "encode, a Tokenizer"),
    ],
)
def test_a_function_that_reaches_an_unsafe_object_by_a_global_is_rejected(function: Any, told: str | None) -> None:
    if told is None:  # a method of Python: its object is bound to it, and copied
        assert thread_copy(function).__self__ is not DRAWS
        return
    with pytest.raises(ValueError, match="cannot share") as caught:
        thread_copy(function)
    assert told in str(caught.value)


@pytest.mark.parametrize("unsafe", sorted(set(UNSAFE) - {"_TemporaryFileWrapper", "Connection", "CDLL"}))
def test_objects_bound_to_a_function_are_copied_for_a_thread(unsafe: str) -> None:
    value = UNSAFE[unsafe]()
    copies = [
        thread_copy(partial(of_a_sum, value)).args[0],
        thread_copy(Bound(value)).value,
        thread_copy(Bound(value).__call__).__self__.value,
        thread_copy(Bound([value])).value[0],
    ]
    assert all(type(each) is type(value) for each in copies)
    assert len({id(value), *map(id, copies)}) == 5


@pytest.mark.parametrize("unsafe", ["_TemporaryFileWrapper", "Connection"])
def test_a_bound_object_that_cannot_be_copied_is_rejected(unsafe: str) -> None:
    with pytest.raises(ValueError, match=r"^of_a_sum cannot be copied for a worker thread \(TypeError: cannot pickle"):
        thread_copy(partial(of_a_sum, UNSAFE[unsafe]()))


def of_a_sum(bound: Any, sample: Any) -> Any:
    return bound, sample, np.random, random, torch, copy.copy


def recursive(depth: int) -> Callable[[int], int]:
    def count(sample: int) -> int:
        return count(sample - 1) if sample else depth

    return count


@pytest.mark.parametrize(
    "function", [of_a_sum, recursive(3), Bound([1]), partial(of_a_sum, {"a": [1]}), print, dict.get]
)
def test_other_objects_are_shared_or_copied_silently(function: Any) -> None:
    thread_copy(function)


def test_attribute_named_like_a_global_is_not_mistaken_for_it() -> None:
    class Named:
        DRAWS = 3

        def __call__(self, sample: Any) -> Any:
            return self.DRAWS + sample.DRAWS

    thread_copy(Named())
