"""`Tokenizer`: bytes, functions and real tokenizers behind one face."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import tiktoken
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.dataset.sample_source import DetachedSample
from task_encoders.captioning import CaptioningEncoder
from task_encoders.interleaved import InterleavedEncoder
from task_encoders.language_modeling import LanguageModelingEncoder
from task_encoders.parts.image_tiles import NativeSize
from task_encoders.parts.tokenizer import BYTES, Tokenizer, as_tokenizer
from task_encoders.parts.vision import Vision
from task_encoders.speech import SpeechEncoder
from tests.support.toy_samples import sample, trained_tokenizer, word_lengths
from tests.support.toy_tokenizers import tokenizer

SENTENCES = ["a cat sat on the mat", "the dog sat on the cat", "the mat is on the dog"]


def sentence_tokenizer(vocab_size: int = 30) -> tokenizers.Tokenizer:
    """Return a byte-pair tokenizer trained on the sentences."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[UNK]", "[EOS]"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    made.train_from_iterator(SENTENCES, trainer)
    return made


def with_special_tokens(text: str) -> list[int]:
    """Tokenize a text between special tokens, which even an empty text gets, as many tokenizers do."""
    return [8, *word_lengths(text), 9]


class Fast:
    """Tokenizer like those of transformers: `encode` returns a list, and the printable object is an attribute."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend_tokenizer = backend

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids: list[int] = self.backend_tokenizer.encode(text).ids
        return ids


class Numbers:
    """Object whose `encode` returns a list, like those of tiktoken and SentencePiece."""

    def encode(self, text: str) -> list[int]:
        """The numbers in a text."""
        return [int(number) for number in text.split()]


@given(st.text(min_size=1))
def test_byte_tokens_decode_to_the_text(text: str) -> None:
    bos, *ids, eos = as_tokenizer(None)(text).tolist()
    assert (bos, eos) == (257, 258)
    assert bytes(ids).decode() == text


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (word_lengths, "a bb ccc", [1, 2, 3]),
        (Numbers(), "4 5", [4, 5]),
        (Numbers().encode, "4 5", [4, 5]),
        (Tokenizer(word_lengths, bos=8), "a bb", [8, 1, 2]),
        (Tokenizer(word_lengths, eos=0), "a bb", [1, 2, 0]),
        (Tokenizer(word_lengths, bos=8, eos=9), " ", []),
        (None, "", []),
        (with_special_tokens, "a bb", [8, 1, 2, 9]),
        (with_special_tokens, "", []),
    ],
)
def test_functions_and_objects_with_encode_are_tokenizers(tokenizer: Any, text: str, expected: list[int]) -> None:
    ids = as_tokenizer(tokenizer)(text)
    assert (ids.tolist(), ids.dtype) == (expected, torch.int64)


def test_a_hugging_face_tokenizer_works_in_both_encoders() -> None:
    tokenizer = sentence_tokenizer()
    text = "the cat is on the mat"
    expected = [*tokenizer.encode(text).ids, tokenizer.token_to_id("[EOS]")]
    assert len(expected) < len(text)
    ending = Tokenizer(tokenizer, eos=tokenizer.token_to_id("[EOS]"))
    image = b"P6 1 1 255\n\x01\x02\x03"
    sample = Sample(DetachedSample(1, "a", "0.tar", 0, {"ppm": image, "txt": text.encode()}), 0, 0, 0, 0)
    for encoder in (LanguageModelingEncoder(ending), CaptioningEncoder(ending)):
        item: Any = pickle.loads(pickle.dumps(encoder)).encode(sample, Rng(7))
        assert item["tokens"].tolist() == expected


def test_hugging_face_tokenizer_is_fingerprinted_by_its_vocabulary() -> None:
    one, same, other = (as_tokenizer(sentence_tokenizer(size)).settings()["tokenizer"] for size in (30, 30, 20))
    assert one == same != other
    assert as_tokenizer(Fast(sentence_tokenizer())).settings()["tokenizer"] == one
    assert pickle.loads(pickle.dumps(as_tokenizer(sentence_tokenizer()))).settings()["tokenizer"] == one


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (None, "bytes"),
        (word_lengths, f"{word_lengths.__module__}.word_lengths"),
        (Numbers(), f"{__name__}.Numbers"),
        (Numbers().encode, f"{__name__}.Numbers.encode"),
        (Tokenizer(word_lengths, name="words, 2"), "words, 2"),
    ],
)
def test_other_tokenizer_is_fingerprinted_by_a_name(tokenizer: Any, name: str) -> None:
    assert as_tokenizer(tokenizer).settings()["tokenizer"] == name


def fast() -> Any:
    """Return a tokenizer of transformers."""
    from transformers import PreTrainedTokenizerFast  # takes a second

    return PreTrainedTokenizerFast(
        tokenizer_object=trained_tokenizer(), eos_token="<|endoftext|>", pad_token="<|im_end|>"
    )


def test_a_tokenizer_of_transformers_is_the_same_before_and_after_use() -> None:
    made = fast()
    before = as_tokenizer(made).settings()
    assert before == as_tokenizer(fast()).settings()
    made(["a", "a bb"], padding=True, truncation=True, max_length=7)  # which it keeps in the vocabulary's own object
    assert as_tokenizer(made).settings() == before
    assert as_tokenizer(made)("def main()").tolist() == trained_tokenizer().encode("def main()").ids


def encoding(**changed: Any) -> tiktoken.Encoding:
    """Return an encoding of tiktoken with ranks for bytes and pairs of letters."""
    letters = "abcdefgh"
    pairs = [(a + b).encode() for a in letters for b in letters]
    ranks = {token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), *pairs])}
    settings = {"pat_str": r"\w+|\W+", "mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 999}}
    return tiktoken.Encoding("local", **{**settings, **changed})  # type: ignore[arg-type]


def test_tiktoken_reads_special_tokens_in_a_document_as_text_and_in_a_piece_as_tokens() -> None:
    tokenizer = Tokenizer(encoding(), eos=999)
    text = "cab <|endoftext|>"
    assert tokenizer("cab").tolist() == [*encoding().encode_ordinary("cab"), 999]
    assert encoding().decode_bytes(tokenizer(text).tolist()[:-1]).decode() == text
    assert 999 not in tokenizer(text).tolist()[:-1]
    assert list(tokenizer.piece(text))[-1] == 999
    assert tokenizer.special_texts() == {"<|endoftext|>"}


def test_tiktoken_is_fingerprinted_by_ranks_pattern_and_special_tokens() -> None:
    ranks = {bytes([i]): i for i in range(256)}
    others = [{}, {"mergeable_ranks": ranks}, {"pat_str": r"\w+|\W"}, {"special_tokens": {"<|end|>": 999}}]
    assert len({as_tokenizer(encoding(**other)).settings()["tokenizer"] for other in others}) == 4
    assert as_tokenizer(encoding()).settings() == as_tokenizer(pickle.loads(pickle.dumps(encoding()))).settings()


class Framing(Numbers):
    """Tokenizer like those of transformers, which adds its own BOS unless told not to."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The numbers in a text, 0 for what is none, after a 1."""
        return [1] * add_special_tokens + [int(word) if word.isdecimal() else 0 for word in text.split()]

    def get_vocab(self) -> dict[str, int]:
        """Token to id."""
        return {"1": 1, "2": 2}


def test_piece_gets_no_special_tokens() -> None:
    assert Tokenizer(Framing(), eos=9)("4 5").tolist() == [1, 4, 5, 9]
    assert list(Tokenizer(Framing(), eos=9).piece("4 5")) == [4, 5]
    assert list(BYTES.piece("a")) == [97]
    assert list(as_tokenizer(sentence_tokenizer()).piece("")) == []


def test_special_tokens_are_known_if_the_tokenizer_lists_them() -> None:
    assert as_tokenizer(sentence_tokenizer()).special_texts() == {"[UNK]", "[EOS]"}
    assert as_tokenizer(fast()).special_texts() == {"<|endoftext|>", "<|im_end|>"}
    assert BYTES.special_texts() == set()


def test_tokenizer_with_only_a_vocabulary_is_fingerprinted_by_it() -> None:
    class Other(Framing):
        """Tokenizer that has only a vocabulary."""

        def get_vocab(self) -> dict[str, int]:
            return {"1": 1, "3": 3}

    names = {as_tokenizer(each).settings()["tokenizer"] for each in (Framing(), Framing(), Other())}
    assert len(names) == 2


def test_sentencepiece_is_fingerprinted_by_its_model() -> None:
    class Processor(Numbers):
        def __init__(self, model: bytes) -> None:
            self.model = model

        def serialized_model_proto(self) -> bytes:
            return self.model

    names = [as_tokenizer(Processor(model)).settings()["tokenizer"] for model in (b"a", b"a", b"b")]
    assert names[0] == names[1] != names[2]


def test_settings_include_the_special_ids() -> None:
    assert BYTES.settings() == {"tokenizer": "bytes", "bos": 257, "eos": 258, "pad": 256}


@pytest.mark.parametrize("wrong", ["gpt2", 7])
def test_invalid_tokenizer_is_rejected_with_a_fix(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"not a tokenizer: {wrong!r}. Pass a function from str"):
        as_tokenizer(wrong)


def tokens_with_eos(**settings: Any) -> list[int]:
    """Return the tokens of a document by a small tokenizer like that of Qwen, which adds no EOS by itself."""
    item: Any = LanguageModelingEncoder(tokenizer("qwen"), **settings).encode(sample(txt="A cat."), Rng(7))
    return list(item["tokens"].tolist())


def test_tokenizer_that_adds_no_eos_needs_an_explicit_choice() -> None:
    own = tokenizer("qwen")
    plain = own.encode("A cat.")
    found = r"Pass eos= to the encoder: True \('<\|im_end\|>', which may end turns\), '<\|endoftext\|>', .*False"
    vision = Vision(NativeSize(), own.convert_tokens_to_ids("<image>"))
    for make in (
        LanguageModelingEncoder,
        CaptioningEncoder,
        SpeechEncoder,
        functools.partial(InterleavedEncoder, vision=vision),
    ):
        for bare in (own, own.backend_tokenizer, Tokenizer(own)):
            with pytest.raises(ValueError, match=found if bare is not own.backend_tokenizer else "Pass eos= to"):
                make(bare)
            assert make(bare, eos=False).tokenizer.after(plain) == []
    assert tokens_with_eos(eos=False) == plain
    assert tokens_with_eos(eos=True) == [*plain, own.convert_tokens_to_ids("<|im_end|>")]
    end = own.convert_tokens_to_ids("<|endoftext|>")
    assert tokens_with_eos(eos="<|endoftext|>") == tokens_with_eos(eos=end) == [*plain, end]
    with pytest.raises(ValueError, match="adds no token after"):
        LanguageModelingEncoder(encoding())
    with pytest.raises(ValueError, match=r"has no token for eos='no such'\. Pass one by its text"):
        tokens_with_eos(eos="no such")
    with pytest.raises(ValueError, match=r"two ends: eos=True, and 3 of the Tokenizer"):
        LanguageModelingEncoder(Tokenizer(own, eos=3), eos=True)
    assert [LanguageModelingEncoder(own, eos=each).settings()["eos"] for each in (False, end)] == [None, end]
    assert LanguageModelingEncoder(word_lengths).tokenizer.eos is None  # a function has no special tokens


def test_eos_of_the_post_processor_is_added_once() -> None:
    own = tokenizer("mistral").backend_tokenizer
    own.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    for eos in (None, False, "</s>"):
        encoder = LanguageModelingEncoder(own, eos=eos, part="json[a]", prompt="json[q]")
        made: Any = encoder.encode(sample(json={"q": "A ", "a": "cat."}), Rng(7))
        assert made["tokens"].tolist() == own.encode("A cat.").ids
        assert made["labels"].tolist()[-3:] == [*own.encode("A cat.").ids[-2:], -100]


def test_eos_is_only_at_the_end_of_a_document_not_at_cuts() -> None:
    own, text = tokenizer("qwen"), "import os, sys\n" * 9
    encoder = LanguageModelingEncoder(own, eos=True, max_length=10)
    chunks: list[Any] = list(encoder.encode(sample(txt=text), Rng(7)))  # type: ignore[arg-type]
    joined = [token for chunk in chunks for token in chunk["tokens"].tolist()]
    assert joined == [*own.encode(text), own.eos_token_id]
    assert joined.count(own.eos_token_id) == 1
    for ending in ("<|im_end|>", ""):
        made: Any = LanguageModelingEncoder(own, eos=True).encode(sample(txt=text + ending), Rng(7))
        assert made["tokens"].tolist() == joined
    image = b"P6 1 1 255\n\x01\x02\x03"
    short = CaptioningEncoder(own, eos=True, max_tokens=5).encode(sample(ppm=image, txt=text), Rng(7))
    assert short["tokens"].tolist() == joined[:5]  # type: ignore[index]


@pytest.mark.parametrize("change", ["enable_truncation", "enable_padding"])
def test_tokenizer_that_truncates_or_pads_is_rejected(change: str) -> None:
    own = sentence_tokenizer()
    getattr(own, change)(**({"max_length": 3} if change == "enable_truncation" else {"length": 9}))
    with pytest.raises(ValueError, match=r"truncates or pads.*Call its no_truncation\(\) and no_padding\(\) first"):
        Tokenizer(own)
