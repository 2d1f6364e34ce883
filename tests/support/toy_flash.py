"""Flash attention on a CPU, in place of the kernels, which know documents only by their borders."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional


def plain_flash(q: Any, k: Any, v: Any, *, causal: bool = False, softmax_scale: Any = None, **_: Any) -> Any:
    """Compute attention of (B, T, heads, width), as `flash_attn_func`."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    seen = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    return seen.transpose(1, 2)


def varlen_flash(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, **more: Any) -> Any:
    """Compute attention of (tokens, heads, width), as `flash_attn_varlen_func`."""
    assert int(cu_seqlens_q.diff().max()) == int(more["max_seqlen_q"]) and torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert int(cu_seqlens_q[-1]) == len(q)
    spans = pairwise(cu_seqlens_q)
    return torch.cat([plain_flash(q[None, a:b], k[None, a:b], v[None, a:b], **more)[0] for a, b in spans])


def use_plain_flash(patch: pytest.MonkeyPatch) -> None:
    """Make models of `transformers` with an attention of "flash_attention_2" call these."""
    from transformers import modeling_flash_attention_utils as utils

    def arguments(*, is_causal: bool, softmax_scale: Any, query_length: int, **more: Any) -> dict[str, Any]:
        made = {name: value for name, value in more.items() if name.startswith("max_seqlen")}
        return {**made, "causal": is_causal and query_length > 1, "softmax_scale": softmax_scale}

    kernels = (plain_flash, varlen_flash, None, utils._pad_input, utils._unpad_input)
    patch.setattr(utils, "lazy_import_flash_attention", lambda *_, **__: (kernels, (arguments, None)))
