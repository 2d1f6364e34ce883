"""Context parallelism: parts are alike in work, and put together they are the whole, for a model too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from savable_pipeline.core.rng import Rng
from savable_pipeline.trainers.context_parallel import context_index, cut_context, join_context
from task_encoders import CaptioningEncoder, ChatEncoder, LanguageModelingEncoder
from tests.support.toy_transformer import among

RNG = Rng(7)


def batch_of(lengths: list[list[int]], size: int, *, pack: bool = True) -> dict[str, Any]:
    """Return rows of documents of these lengths, padded for `size` ranks."""
    encoder = LanguageModelingEncoder(max_length=96 * size if pack else None, multiple=2 * size)
    made = [[{"tokens": torch.arange(1, n + 1), "labels": torch.arange(2, n + 2)} for n in row] for row in lengths]
    return encoder.batch([encoder.pack(row, RNG) if pack else row[0] for row in made], RNG)


def are_equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Return whether two batches are equal."""
    return left.keys() == right.keys() and all(
        torch.equal(value, right[name]) and value.dtype == right[name].dtype
        if torch.is_tensor(value)
        else value == right[name]
        for name, value in left.items()
    )


@settings(max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=3),
    size=st.integers(1, 4),
    pack=st.booleans(),
)
def test_parts_of_all_ranks_join_to_the_whole_batch(lengths: list[list[int]], size: int, pack: bool) -> None:
    whole = {**batch_of(lengths, size, pack=pack), "valid": torch.ones(len(lengths), dtype=torch.bool)}
    parts = [cut_context(whole, rank, size) for rank in range(size)]
    assert are_equal(join_context(parts), whole)
    rows, tokens = whole["tokens"].shape
    assert all(part["labels"].shape == (rows, tokens // size) for part in parts)
    if pack:
        assert all(part["cu_seqlens"][-1] == part["tokens"].numel() for part in parts)
        assert all(part["cu_seqlens"].diff().max() == part["max_seqlen"] for part in parts)
        seen = [sum(int(p) + 1 for p in part["position_ids"].flatten()) for part in parts]  # what attention looks at
        assert len(set(seen)) == 1


def test_rank_gets_a_piece_from_both_ends_of_every_document() -> None:
    whole = batch_of([[8, 3], [16]], 2)
    part = cut_context(whole, 0, 2)
    assert part["tokens"][0, :6].tolist() == [1, 2, 7, 8, 1, 256]
    assert part["position_ids"][0, :6].tolist() == [0, 1, 6, 7, 0, 3]
    assert cut_context(whole, 1, 2)["position_ids"][0, :6].tolist() == [2, 3, 4, 5, 1, 2]
    assert part["cu_seqlens"][:3].tolist() == [0, 4, 6]


def test_attention_over_gathered_keys_equals_that_of_the_whole_batch() -> None:
    size = 2
    whole = batch_of([[11, 4, 30], [25, 2]], size)
    torch.manual_seed(0)
    q, k, v = (torch.nn.Embedding(700, 8).double()(whole["tokens"]) for _ in range(3))  # (B, T, 8)
    mask = among(whole["cu_seqlens"]).tril()
    expected = attention(q, k, v, mask)
    fields = {name: whole[name] for name in ("tokens", "cu_seqlens")}
    parts = [cut_context({**fields, "q": q, "k": k, "v": v}, rank, size) for rank in range(size)]
    gathered = join_context(parts)
    made = [
        attention(part["q"], gathered["k"], gathered["v"], mask[context_index(whole, rank, size)])
        for rank, part in enumerate(parts)
    ]
    outputs = [
        {"tokens": part["tokens"], "cu_seqlens": part["cu_seqlens"], "out": out}
        for part, out in zip(parts, made, strict=True)
    ]
    torch.testing.assert_close(join_context(outputs)["out"], expected, rtol=0, atol=1e-14)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    flat = [x.flatten(0, 1)[None] for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*flat, attn_mask=mask)[0].view(q.shape)


@pytest.mark.parametrize("encoder", [ChatEncoder(max_length=16, multiple=8), CaptioningEncoder(multiple=8)])
def test_other_encoders_pad_documents_too(encoder: Any) -> None:
    texts = [{"tokens": torch.arange(n), "labels": torch.arange(n)} for n in (3, 8)]
    items = [{"image": torch.zeros(3, 224, 224, dtype=torch.uint8), **text} for text in texts]
    items = texts if isinstance(encoder, ChatEncoder) else items
    assert [encoder.length(item) for item in items] == [8, 8]
    batch = encoder.batch([encoder.pack(items, RNG)], RNG)
    assert batch["cu_seqlens"].tolist() == [0, 8, 16]
    assert are_equal(join_context([cut_context(batch, rank, 4) for rank in range(4)]), batch)
    assert encoder.settings()["multiple"] == 8 and "multiple" not in type(encoder)().settings()
    assert encoder.batch(items, RNG)["tokens"].shape == (2, 16 if isinstance(encoder, ChatEncoder) else 8)


def test_documents_that_cannot_be_split_are_rejected_with_a_fix() -> None:
    batch = {"tokens": torch.zeros(1, 10), "cu_seqlens": torch.tensor([0, 4, 10])}
    with pytest.raises(ValueError, match=r"6 tokens, not a multiple of 2 \* 2\. Set multiple=4"):
        cut_context(batch, 0, 2)
    with pytest.raises(ValueError, match="rank must be 0 to 1, not 2"):
        context_index(batch, 2, 2)
    with pytest.raises(ValueError, match="all ranks of one batch"):
        join_context([])
