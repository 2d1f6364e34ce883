"""`LanguageModelingEncoder`: documents, packs, batches and their boundaries."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from savable_pipeline.core.rng import Rng
from savable_pipeline.stages.task_encoder import Skip
from task_encoders.language_modeling import LanguageModelingEncoder
from task_encoders.parts.tokenizer import Tokenizer
from tests.support.toy_samples import sample, without_pixels, word_lengths
from tests.support.toy_transformer import assert_packs_equal_documents

RNG = Rng(7)
BOS, EOS = 257, 258


def items(encoder: LanguageModelingEncoder, *texts: str) -> list[dict[str, Any]]:
    """Return the items of these texts, one for each text."""
    return [encoder.encode(sample(txt=text), RNG) for text in texts]  # type: ignore[misc]


def test_bytes_are_between_bos_and_eos_and_labelled_with_the_next() -> None:
    (item,) = items(LanguageModelingEncoder(), "hé")
    assert without_pixels(item) == {
        "tokens": [BOS, 104, 195, 169, EOS],
        "labels": [104, 195, 169, EOS, -100],
    }
    assert item["tokens"].dtype == item["labels"].dtype == torch.int64


def test_a_pack_restarts_positions_and_masks_labels_at_each_document() -> None:
    encoder = LanguageModelingEncoder(Tokenizer(word_lengths, eos=9))
    pack = encoder.pack(items(encoder, "a bb ccc", "dddd", "ee f"), RNG)
    assert without_pixels(pack) == {
        "tokens": [1, 2, 3, 9, 4, 9, 2, 1, 9],
        "labels": [2, 3, 9, -100, 9, -100, 1, 9, -100],
        "position_ids": [0, 1, 2, 3, 0, 1, 0, 1, 2],
        "cu_seqlens": [0, 4, 6, 9],
        "max_seqlen": 4,
    }
    kinds = {name: value.dtype for name, value in pack.items() if torch.is_tensor(value)}
    assert kinds.pop("cu_seqlens") == torch.int32
    assert set(kinds.values()) == {torch.int64}
    assert encoder.length(items(encoder, "a bb ccc")[0]) == 4


def test_no_label_is_a_token_of_another_document() -> None:
    encoder = LanguageModelingEncoder(word_lengths)  # nothing marks an end, so only the boundaries keep documents apart
    pack = encoder.pack(items(encoder, "a", "bb", "ccc dddd"), RNG)
    assert pack["labels"].tolist() == [-100, -100, 4, -100]


def test_padding_of_a_batch_of_packs_is_masked_in_its_own_segment() -> None:
    encoder = LanguageModelingEncoder(Tokenizer(word_lengths, eos=9, pad=8), max_length=5)
    packs = [encoder.pack(items(encoder, "a bb", "ccc"), RNG), encoder.pack(items(encoder, "dddd"), RNG)]
    assert without_pixels(encoder.batch(packs, RNG)) == {
        "tokens": [[1, 2, 9, 3, 9], [4, 9, 8, 8, 8]],
        "labels": [[2, 9, -100, 9, -100], [9, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]],
        "cu_seqlens": [0, 3, 5, 7, 10],
        "max_seqlen": 3,
    }


def test_items_batched_without_a_packer_are_padded_to_the_longest() -> None:
    encoder = LanguageModelingEncoder(word_lengths)
    assert without_pixels(encoder.batch(items(encoder, "a bb ccc", "dddd"), RNG)) == {
        "tokens": [[1, 2, 3], [4, 0, 0]],
        "labels": [[2, 3, -100], [-100, -100, -100]],
        "position_ids": [[0, 1, 2], [0, 0, 1]],
        "lengths": [3, 1],
    }


def test_documents_are_padded_to_a_multiple_which_their_length_counts() -> None:
    encoder = LanguageModelingEncoder(Tokenizer(word_lengths, eos=9, pad=8), max_length=12, multiple=4)
    documents = items(encoder, "a bb ccc dddd", "ee", "f gg hhh")
    assert [encoder.length(each) for each in documents] == [8, 4, 4]
    packs = [encoder.pack(documents[:2], RNG), encoder.pack(documents[2:], RNG)]
    assert without_pixels(packs[0])["tokens"] == [1, 2, 3, 4, 9, 8, 8, 8, 2, 9, 8, 8]
    assert without_pixels(packs[0])["labels"] == [2, 3, 4, 9, -100, -100, -100, -100, 9, -100, -100, -100]
    batch = encoder.batch(packs, RNG)
    assert batch["cu_seqlens"].tolist() == [0, 8, 12, 16, 24]
    assert batch["position_ids"].tolist()[0] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    rows = LanguageModelingEncoder(word_lengths, multiple=4)
    assert rows.batch(items(rows, "a bb ccc dddd eeeee", "f"), RNG)["tokens"].shape == (2, 8)
    assert_packs_equal_documents(encoder, [documents[:2], documents[2:]])


def test_rows_that_a_multiple_does_not_divide_are_rejected() -> None:
    with pytest.raises(ValueError, match="multiple=4 must be at least 1 and divide max_length=10"):
        LanguageModelingEncoder(max_length=10, multiple=4)


def test_a_pack_that_is_longer_than_max_length_names_both_lengths() -> None:
    encoder = LanguageModelingEncoder(word_lengths, max_length=2)
    pack = encoder.pack(items(encoder, "a bb", "ccc"), RNG)
    with pytest.raises(ValueError, match="pack of 3 tokens exceeds the encoder's max_length=2"):
        encoder.batch([pack], RNG)


@given(text=st.text(min_size=1), max_length=st.integers(1, 9))
def test_chunks_of_a_long_document_are_its_tokens_and_labels(text: str, max_length: int) -> None:
    (whole,) = items(LanguageModelingEncoder(), text)
    made = LanguageModelingEncoder(max_length=max_length).encode(sample(txt=text), RNG)
    total = len(whole["tokens"])
    assert hasattr(made, "__next__") == (total > max_length)
    chunks: list[Any] = [made] if isinstance(made, dict) else list(made)  # type: ignore[arg-type]
    if total > max_length and (total - 1) % max_length == 0:
        assert chunks.pop().reason == "no target"
        total -= 1
    assert all(1 <= len(chunk["tokens"]) <= max_length for chunk in chunks)
    for name in ("tokens", "labels"):
        assert torch.equal(torch.cat([chunk[name] for chunk in chunks]), whole[name][:total])


def test_a_sample_without_text_is_skipped_by_its_reason() -> None:
    encoder = LanguageModelingEncoder(word_lengths, part="py")
    made = [encoder.encode(each, RNG) for each in (sample(txt="a"), sample(py=""), sample(py=" "), sample(py="a"))]
    assert [each.reason for each in made[:3] if isinstance(each, Skip)] == ["no py", "empty", "empty"]
    assert without_pixels(made[3]) == {"tokens": [1], "labels": [-100]}  # type: ignore[arg-type]


def test_max_length_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        LanguageModelingEncoder(max_length=0)


def test_settings_name_all_that_changes_an_item() -> None:
    encoder = LanguageModelingEncoder(max_length=5, part="md")
    assert encoder.settings() == {
        "tokenizer": "bytes",
        "bos": BOS,
        "eos": EOS,
        "pad": 256,
        "max_length": 5,
        "part": "md",
        "prompt": None,
    }
    assert encoder.global_rng is False


def test_model_computes_the_same_on_a_batch_of_packs_as_on_single_documents() -> None:
    encoder = LanguageModelingEncoder(max_length=32)
    texts = ("the first document", "a second", "three", "a fourth", "fifth, by itself")
    documents = items(encoder, *texts)
    assert_packs_equal_documents(encoder, [documents[:2], documents[2:4], documents[4:]])


def test_prompt_does_not_contribute_to_the_loss() -> None:
    encoder = LanguageModelingEncoder(
        Tokenizer(word_lengths, bos=8, eos=9), part="json[completion]", prompt="json[prompt]"
    )
    record = json.dumps({"prompt": "a bb ", "completion": "ccc dddd"})
    assert without_pixels(encoder.encode(sample(json=record), RNG)) == {  # type: ignore[arg-type]
        "tokens": [8, 1, 2, 3, 4, 9],
        "labels": [-100, -100, 3, 4, 9, -100],
    }


def test_chunks_of_prompt_only_are_dropped() -> None:
    encoder = LanguageModelingEncoder(word_lengths, part="json[completion]", prompt="json[prompt]", max_length=2)
    record = json.dumps({"prompt": "a bb ccc dddd eeeee ", "completion": "ffffff ggggggg"})
    first, second, third, last = encoder.encode(sample(json=record), RNG)  # type: ignore[misc]
    assert [each.reason for each in (first, second, last) if isinstance(each, Skip)] == ["no target"] * 3
    assert without_pixels(third) == {"tokens": [5, 6], "labels": [6, 7]}  # type: ignore[arg-type]
    nothing = json.dumps({"prompt": "a", "completion": " "})
    assert isinstance(encoder.encode(sample(json=nothing), RNG), Skip)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"completion": "a"}, "no json[prompt]"),
        ({"prompt": "a"}, "no json[completion]"),
        ({"prompt": "a", "completion": ""}, "empty"),
    ],
)
def test_a_sample_without_prompt_or_text_is_skipped_by_its_reason(record: dict[str, str], reason: str) -> None:
    encoder = LanguageModelingEncoder(part="json[completion]", prompt="json[prompt]")
    made = encoder.encode(sample(json=json.dumps(record)), RNG)
    assert isinstance(made, Skip)
    assert made.reason == reason


def test_text_of_another_type_is_an_error_that_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"json\[text\]: expected text, found int 7"):
        LanguageModelingEncoder(part="json[text]").encode(sample(json='{"text": 7}'), RNG)
