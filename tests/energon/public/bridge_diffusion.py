# Copyright (c) 2024, 2025, NVIDIA CORPORATION.  All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with the
# License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0. Unless required by
# applicable law or agreed to in writing, software distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""Packers of Megatron Bridge: https://github.com/NVIDIA-NeMo/Megatron-Bridge, commit 067f987df03b8355.

src/megatron/bridge/diffusion/data: common/diffusion_task_encoder_with_sp.py, common/diffusion_sample.py,
wan/wan_taskencoder.py; data/packing/algorithms.py; data/energon/metadata.py. `parallel_state`, of megatron.core, is one
of a single rank here; `patchify` and `grid_sizes_calculation` are written again; docstrings are left out.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, List, Optional, TypeVar

import torch
import torch.nn.functional as F
from megatron.energon import Batch, DefaultTaskEncoder, Sample, SkipSample
from megatron.energon.task_encoder.base import stateless
from megatron.energon.task_encoder.cooking import Cooker, basic_sample_keys

_ItemT = TypeVar("_ItemT")


class parallel_state:
    @staticmethod
    def get_context_parallel_world_size():
        return 1


def grid_sizes_calculation(input_shape, patch_size):
    return tuple(size // patch for size, patch in zip(input_shape, patch_size))


def patchify(x, patch_size):
    (f, h, w), out = patch_size, []
    for u in x:
        c, F_, H, W = u.shape
        u = u.reshape(c, F_ // f, f, H // h, h, W // w, w).permute(1, 3, 5, 0, 2, 4, 6)
        out.append(u.reshape((F_ // f) * (H // h) * (W // w), -1))
    return out


def packing_length(item: Any) -> int:
    return 0 + item


def _field_names(dataclass_type: type) -> set[str]:
    if not is_dataclass(dataclass_type):
        return set()
    return {field.name for field in fields(dataclass_type)}


def sample_metadata_kwargs(*, key: str, restore_key: Any = (), subflavors: Any = None) -> dict[str, Any]:
    sample_fields = _field_names(Sample)
    kwargs: dict[str, Any] = {
        "__key__": key,
        "__restore_key__": restore_key,
    }
    if "__subflavor__" in sample_fields:
        kwargs["__subflavor__"] = None
    if "__subflavors__" in sample_fields:
        kwargs["__subflavors__"] = subflavors
    return kwargs


class _SegmentTree:
    def __init__(self, capacity: int):
        self._n = capacity
        self._tree = [0] * (4 * capacity)

    def _push_up(self, node: int):
        self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])

    def _update(self, node: int, start: int, end: int, idx: int, val: int):
        if start == end:
            self._tree[node] = val
            return
        mid = (start + end) // 2
        if idx <= mid:
            self._update(2 * node, start, mid, idx, val)
        else:
            self._update(2 * node + 1, mid + 1, end, idx, val)
        self._push_up(node)

    def _query(self, node: int, start: int, end: int, need: int) -> int:
        if self._tree[node] < need:
            return -1
        if start == end:
            return start
        mid = (start + end) // 2
        left = self._query(2 * node, start, mid, need)
        if left != -1:
            return left
        return self._query(2 * node + 1, mid + 1, end, need)

    def update(self, idx: int, val: int):
        self._update(1, 0, self._n - 1, idx, val)

    def query_first_fit(self, need: int) -> int:
        return self._query(1, 0, self._n - 1, need)


def first_fit(
    seqlens: Sequence[_ItemT],
    pack_size: int,
    *,
    item_lengths: Sequence[int] | None = None,
) -> list[list[_ItemT]]:
    lengths: Sequence[int] = seqlens if item_lengths is None else item_lengths  # type: ignore[assignment]
    if item_lengths is not None and len(seqlens) != len(item_lengths):
        raise ValueError(
            f"seqlens and item_lengths must have the same number of entries, got {len(seqlens)} and {len(item_lengths)}"
        )
    if not seqlens:
        return []

    n = len(seqlens)
    tree = _SegmentTree(n)
    res: list[list[_ItemT]] = []
    remaining: list[int] = []

    for item, length in zip(seqlens, lengths):
        first_bin = tree.query_first_fit(length)
        if first_bin == -1 or first_bin >= len(res):
            new_idx = len(res)
            res.append([item])
            remaining.append(pack_size - length)
            tree.update(new_idx, remaining[new_idx])
        else:
            res[first_bin].append(item)
            remaining[first_bin] -= length
            tree.update(first_bin, remaining[first_bin])
    return res


def first_fit_decreasing(
    seqlens: Sequence[_ItemT],
    pack_size: int,
    *,
    item_lengths: Sequence[int] | None = None,
) -> list[list[_ItemT]]:
    if item_lengths is None:
        return first_fit(sorted(seqlens, reverse=True), pack_size)
    if len(seqlens) != len(item_lengths):
        raise ValueError(
            f"seqlens and item_lengths must have the same number of entries, got {len(seqlens)} and {len(item_lengths)}"
        )
    order = sorted(range(len(seqlens)), key=lambda i: item_lengths[i], reverse=True)
    sorted_items = [seqlens[i] for i in order]
    sorted_lengths = [item_lengths[i] for i in order]
    return first_fit(sorted_items, pack_size, item_lengths=sorted_lengths)


@dataclass
class DiffusionSample(Sample):
    video: torch.Tensor  # video latents (C T H W)
    context_embeddings: torch.Tensor  # (S D)
    context_mask: torch.Tensor = None  # 1
    image_size: Optional[torch.Tensor] = None
    loss_mask: torch.Tensor = None
    fps: Optional[torch.Tensor] = None
    num_frames: Optional[torch.Tensor] = None
    padding_mask: Optional[torch.Tensor] = None
    seq_len_q: Optional[torch.Tensor] = None
    seq_len_q_padded: Optional[torch.Tensor] = None
    seq_len_kv: Optional[torch.Tensor] = None
    seq_len_kv_padded: Optional[torch.Tensor] = None
    pos_ids: Optional[torch.Tensor] = None
    latent_shape: Optional[torch.Tensor] = None
    video_metadata: Optional[dict] = None

    def to_dict(self) -> dict:
        return dict(
            video=self.video,
            context_embeddings=self.context_embeddings,
            context_mask=self.context_mask,
            loss_mask=self.loss_mask,
            image_size=self.image_size,
            fps=self.fps,
            num_frames=self.num_frames,
            padding_mask=self.padding_mask,
            seq_len_q=self.seq_len_q,
            seq_len_q_padded=self.seq_len_q_padded,
            seq_len_kv=self.seq_len_kv,
            seq_len_kv_padded=self.seq_len_kv_padded,
            pos_ids=self.pos_ids,
            latent_shape=self.latent_shape,
            video_metadata=self.video_metadata,
        )

    def __add__(self, other: Any) -> int:
        if isinstance(other, DiffusionSample):
            self_len = self.seq_len_q_padded.item() if self.seq_len_q_padded is not None else self.seq_len_q.item()
            other_len = other.seq_len_q_padded.item() if other.seq_len_q_padded is not None else other.seq_len_q.item()
            return self_len + other_len
        elif isinstance(other, int):
            self_len = self.seq_len_q_padded.item() if self.seq_len_q_padded is not None else self.seq_len_q.item()
            return self_len + other
        raise NotImplementedError

    def __radd__(self, other: Any) -> int:
        if isinstance(other, int):
            self_len = self.seq_len_q_padded.item() if self.seq_len_q_padded is not None else self.seq_len_q.item()
            return self_len + other
        raise NotImplementedError

    def __lt__(self, other: Any) -> bool:
        if isinstance(other, DiffusionSample):
            self_len = self.seq_len_q_padded.item() if self.seq_len_q_padded is not None else self.seq_len_q.item()
            other_len = other.seq_len_q_padded.item() if other.seq_len_q_padded is not None else other.seq_len_q.item()
            return self_len < other_len
        elif isinstance(other, int):
            self_len = self.seq_len_q_padded.item() if self.seq_len_q_padded is not None else self.seq_len_q.item()
            return self_len < other
        raise NotImplementedError


@stateless
def cook(sample: dict) -> dict:
    return dict(
        **basic_sample_keys(sample),
        json=sample["json"],
        pth=sample["pth"],
        pickle=sample["pickle"],
    )


class DiffusionTaskEncoderWithSequencePacking(DefaultTaskEncoder, ABC):  # noqa: D101
    cookers = [
        Cooker(cook),
    ]

    def __init__(
        self,
        *args,
        max_frames: int = None,
        text_embedding_max_length: int = 512,
        seq_length: int = None,
        patch_spatial: int = 2,
        patch_temporal: int = 1,
        packing_buffer_size: int = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.max_frames = max_frames
        self.text_embedding_max_length = text_embedding_max_length
        self.seq_length = seq_length
        self.patch_spatial = patch_spatial
        self.patch_temporal = patch_temporal
        self.packing_buffer_size = packing_buffer_size

    @abstractmethod
    def encode_sample(self, sample: dict) -> dict:
        raise NotImplementedError

    @stateless(restore_seeds=True)
    def select_samples_to_pack(self, samples: List[DiffusionSample]) -> List[List[DiffusionSample]]:
        results = first_fit_decreasing(samples, self.seq_length, item_lengths=[packing_length(s) for s in samples])
        random.shuffle(results)
        return results

    @stateless
    def pack_selected_samples(self, samples: List[DiffusionSample]) -> DiffusionSample:

        def stack(attr):
            if hasattr(samples[0], attr) and getattr(samples[0], attr) is not None:
                return torch.stack([getattr(sample, attr) for sample in samples], dim=0)
            else:
                return None

        def cat(attr):
            if hasattr(samples[0], attr) and getattr(samples[0], attr) is not None:
                return torch.cat([getattr(sample, attr) for sample in samples], dim=0)
            else:
                return None

        return DiffusionSample(
            **sample_metadata_kwargs(
                key=",".join([s.__key__ for s in samples]),
                restore_key=(),  # Will be set by Energon based on `samples`.
                subflavors=samples[0].__subflavors__,
            ),
            video=cat("video"),
            context_embeddings=cat("context_embeddings"),
            context_mask=cat("context_mask"),
            loss_mask=cat("loss_mask"),
            seq_len_q=cat("seq_len_q"),
            seq_len_q_padded=cat("seq_len_q_padded"),
            seq_len_kv=cat("seq_len_kv"),
            seq_len_kv_padded=cat("seq_len_kv_padded"),
            pos_ids=cat("pos_ids"),
            latent_shape=stack("latent_shape"),
            video_metadata=[sample.video_metadata for sample in samples],
        )

    @stateless
    def batch(self, samples: List[DiffusionSample]) -> dict:
        raise NotImplementedError


class WanTaskEncoder(DiffusionTaskEncoderWithSequencePacking):
    cookers = [
        Cooker(cook),
    ]

    def __init__(
        self,
        *args,
        max_frames: int = None,
        patch_spatial: int = 2,
        patch_temporal: int = 1,
        seq_length: int = 1024,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.patch_spatial = patch_spatial
        self.patch_temporal = patch_temporal
        self.seq_length = seq_length

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: dict) -> dict:
        video_latent = sample["pth"]
        context_embeddings = sample["pickle"]
        video_metadata = sample["json"]

        if torch.isnan(video_latent).any() or torch.isinf(video_latent).any():
            raise SkipSample()
        if torch.max(torch.abs(video_latent)) > 1e3:
            raise SkipSample()

        grid_size = grid_sizes_calculation(
            input_shape=video_latent.shape[1:],
            patch_size=(self.patch_temporal, self.patch_spatial, self.patch_spatial),
        )

        video_latent = patchify([video_latent], (self.patch_temporal, self.patch_spatial, self.patch_spatial))[0]

        context_max_len = 512
        context_embeddings = F.pad(context_embeddings, (0, 0, 0, context_max_len - context_embeddings.shape[0]))

        seq_len_q = video_latent.shape[0]
        seq_len_kv = context_embeddings.shape[0]

        loss_mask = torch.ones(seq_len_q, dtype=torch.bfloat16)

        if parallel_state.get_context_parallel_world_size() > 1:
            sharding_factor = parallel_state.get_context_parallel_world_size() * 2
            seq_len_q_padded = ((seq_len_q + sharding_factor - 1) // sharding_factor) * sharding_factor
            seq_len_kv_padded = ((seq_len_kv + sharding_factor - 1) // sharding_factor) * sharding_factor
        else:
            seq_len_q_padded = seq_len_q
            seq_len_kv_padded = seq_len_kv

        if seq_len_q < seq_len_q_padded:
            video_latent = F.pad(video_latent, (0, 0, 0, seq_len_q_padded - seq_len_q))
            loss_mask = F.pad(loss_mask, (0, seq_len_q_padded - seq_len_q))
        if seq_len_kv < seq_len_kv_padded:
            context_embeddings = F.pad(context_embeddings, (0, 0, 0, seq_len_kv_padded - seq_len_kv))

        return DiffusionSample(
            **sample_metadata_kwargs(
                key=sample["__key__"],
                restore_key=sample["__restore_key__"],
                subflavors=sample["__subflavors__"],
            ),
            video=video_latent,
            context_embeddings=context_embeddings,
            latent_shape=torch.tensor(grid_size, dtype=torch.int32),
            loss_mask=loss_mask,
            seq_len_q=torch.tensor([seq_len_q], dtype=torch.int32),
            seq_len_q_padded=torch.tensor([seq_len_q_padded], dtype=torch.int32),
            seq_len_kv=torch.tensor([seq_len_kv], dtype=torch.int32),
            seq_len_kv_padded=torch.tensor([seq_len_kv_padded], dtype=torch.int32),
            pos_ids=torch.zeros(1, dtype=torch.bfloat16),  # dummy pos_ids
            video_metadata=video_metadata,
        )

    @stateless
    def batch(self, samples: List[DiffusionSample]) -> dict:
        sample = samples[0]

        batch = dict(
            video_latents=sample.video.unsqueeze(1),
            context_embeddings=sample.context_embeddings.unsqueeze(1),
            loss_mask=sample.loss_mask.unsqueeze(1) if sample.loss_mask is not None else None,
            seq_len_q=sample.seq_len_q,
            seq_len_q_padded=sample.seq_len_q_padded,
            seq_len_kv=sample.seq_len_kv,
            seq_len_kv_padded=sample.seq_len_kv_padded,
            grid_sizes=sample.latent_shape,
            video_metadata=sample.video_metadata,
        )

        return batch
