"""`Tokenizer`: bytes, functions and real tokenizers behind one face."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from savable_pipeline.rng import Rng
from savable_pipeline.sample import DetachedSample, Sample
from task_encoders.captioning import CaptioningEncoder
from task_encoders.language_modeling import LanguageModelingEncoder
from task_encoders.tokenizer import BYTES, Tokenizer, as_tokenizer

SENTENCES = ["a cat sat on the mat", "the dog sat on the cat", "the mat is on the dog"]


def trained(vocab_size: int = 30) -> tokenizers.Tokenizer:
    """A byte-pair tokenizer of the sentences."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[UNK]", "[EOS]"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    made.train_from_iterator(SENTENCES, trainer)
    return made


def words(text: str) -> list[int]:
    """A word is its length."""
    return [len(word) for word in text.split()]


def framed(text: str) -> list[int]:
    """Adds its own special ids, to nothing too, as many tokenizers do."""
    return [8, *words(text), 9]


class Fast:
    """A tokenizer as transformers has them: `encode` gives a list, and what can be printed lies inside."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend_tokenizer = backend

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self.backend_tokenizer.encode(text).ids
        return ids


class Numbers:
    """An object with `encode` that gives a list, as those of tiktoken and SentencePiece do."""

    def encode(self, text: str) -> list[int]:
        """The numbers in a text."""
        return [int(number) for number in text.split()]


@given(st.text(min_size=1))
def test_bytes_give_the_text_back(text: str) -> None:
    bos, *ids, eos = as_tokenizer(None)(text).tolist()
    assert (bos, eos) == (257, 258)
    assert bytes(ids).decode() == text


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (words, "a bb ccc", [1, 2, 3]),
        (Numbers(), "4 5", [4, 5]),
        (Numbers().encode, "4 5", [4, 5]),
        (Tokenizer(words, bos=8), "a bb", [8, 1, 2]),
        (Tokenizer(words, eos=0), "a bb", [1, 2, 0]),
        (Tokenizer(words, bos=8, eos=9), " ", []),
        (None, "", []),
        (framed, "a bb", [8, 1, 2, 9]),
        (framed, "", []),
    ],
)
def test_functions_and_objects_with_encode_are_tokenizers(tokenizer: Any, text: str, expected: list[int]) -> None:
    ids = as_tokenizer(tokenizer)(text)
    assert (ids.tolist(), ids.dtype) == (expected, torch.int64)


def test_a_hugging_face_tokenizer_works_in_both_encoders() -> None:
    tokenizer = trained()
    text = "the cat is on the mat"
    expected = [*tokenizer.encode(text).ids, tokenizer.token_to_id("[EOS]")]
    assert len(expected) < len(text)
    ending = Tokenizer(tokenizer, eos=tokenizer.token_to_id("[EOS]"))
    image = b"P6 1 1 255\n\x01\x02\x03"
    sample = Sample(DetachedSample(1, "a", "0.tar", 0, {"ppm": image, "txt": text.encode()}), 0, 0, 0, 0)
    for encoder in (LanguageModelingEncoder(ending), CaptioningEncoder(ending)):
        item: Any = pickle.loads(pickle.dumps(encoder)).encode(sample, Rng(7))
        assert item["tokens"].tolist() == expected


def test_a_hugging_face_tokenizer_is_known_by_its_vocabulary() -> None:
    one, same, other = (as_tokenizer(trained(size)).settings()["tokenizer"] for size in (30, 30, 20))
    assert one == same != other
    assert as_tokenizer(Fast(trained())).settings()["tokenizer"] == one
    assert pickle.loads(pickle.dumps(as_tokenizer(trained()))).settings()["tokenizer"] == one


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (None, "bytes"),
        (words, f"{__name__}.words"),
        (Numbers(), f"{__name__}.Numbers"),
        (Numbers().encode, f"{__name__}.Numbers.encode"),
        (Tokenizer(words, name="words, 2"), "words, 2"),
    ],
)
def test_any_other_tokenizer_is_known_by_a_name(tokenizer: Any, name: str) -> None:
    assert as_tokenizer(tokenizer).settings()["tokenizer"] == name


def test_settings_hold_the_special_ids() -> None:
    assert BYTES.settings() == {"tokenizer": "bytes", "bos": 257, "eos": 258, "pad": 256}


@pytest.mark.parametrize("wrong", ["gpt2", 7])
def test_what_is_no_tokenizer_is_refused_with_what_to_do(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"not {wrong!r}; load it first"):
        as_tokenizer(wrong)
