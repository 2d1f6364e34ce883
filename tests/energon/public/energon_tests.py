# Copyright (c) 2025, NVIDIA CORPORATION.
# SPDX-License-Identifier: BSD-3-Clause
#
# Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
# following conditions are met: redistributions of source code must retain the above copyright notice, this list of
# conditions and the following disclaimer; redistributions in binary form must reproduce them in the documentation;
# neither the name of NVIDIA CORPORATION nor the names of its contributors may be used to endorse or promote products
# derived from this software without specific prior written permission. THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT
# HOLDERS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES ARE DISCLAIMED; IN NO EVENT SHALL THE COPYRIGHT OWNER BE LIABLE
# FOR ANY DAMAGES ARISING IN ANY WAY OUT OF THE USE OF THIS SOFTWARE.
"""Encoders of Megatron-Energon's own tests: https://github.com/NVIDIA/Megatron-Energon, commit bef8be2435059599.

tests/test_crudedataset.py, tests/test_dataset.py, tests/test_dataset_det.py. Classes that stand inside of tests there
have names of their own here; media metadata and two encoders are left out; nothing else is changed.
"""

import pickle
import random
from typing import List

import torch
from megatron.energon import (
    Batch,
    CachePool,
    CaptioningSample,
    Cooker,
    DefaultTaskEncoder,
    FileStore,
    Lazy,
    Sample,
    SampleDecoder,
    TextSample,
    basic_sample_keys,
    cooker,
    stateless,
)
from megatron.energon.edataclass import edataclass


@edataclass
class LazyTextSample(Sample):
    txt: str
    next_txt: Lazy[str]


@edataclass
class TextBatch(Batch):
    txts: List[str]


@stateless
def cook_text(sample: dict) -> TextSample:
    return TextSample(
        **basic_sample_keys(sample),
        text=f"<{sample['txt']}>",
    )


@stateless
def cook_other(sample: dict) -> TextSample:
    pkl_value = sample["pkl"]
    d = pickle.loads(pkl_value) if isinstance(pkl_value, (bytes, str)) else pkl_value
    return TextSample(
        **basic_sample_keys(sample),
        text=f"<{sample['txt']}|{d['idx']}>",
    )


@stateless
def cook_aux(sample: dict, pkl_source: FileStore, fs_source: FileStore) -> TextSample:
    # ds2 is offset by 100
    d = pkl_source.get(f"{int(sample['txt']) + 100:06d}.txt", sample)
    return TextSample(
        **basic_sample_keys(sample),
        text=f"<{sample['txt']}|aux|{d}>",
    )


class CookingTaskEncoder(DefaultTaskEncoder[TextSample, TextSample, TextBatch, TextBatch]):
    """A simple task encoder for captioning."""

    cookers = [
        Cooker(cook_text, has_subflavors={"crude_type": "txtpkl"}),
        Cooker(cook_other, has_subflavors={"crude_type": "otherpkl"}),
        Cooker(cook_aux, has_subflavors={"crude_type": "aux_random_access"}),
    ]

    def batch(self, samples: List[TextSample]) -> TextBatch:
        return TextBatch.from_samples(
            samples,
            txts=[sample.text for sample in samples],
        )

    def select_samples_to_pack(self, samples):
        return [[sample] for sample in samples]

    @stateless
    def pack_selected_samples(self, samples):
        return samples[0]


@stateless
def cook_aux_filesystem_reference(sample: dict, pkl_source: FileStore, fs_source: FileStore) -> TextSample:
    d = fs_source.get("aux_metadataset.yaml", sample)[:25].decode()
    return TextSample(
        **basic_sample_keys(sample),
        text=f"<{sample['txt']}|aux|{d}>",
    )


class CookingTaskEncoderWithAuxFilesystemReference(CookingTaskEncoder):
    cookers = [
        Cooker(cook_aux_filesystem_reference, has_subflavors={"crude_type": "aux_random_access"}),
    ]


@stateless
@cooker(need_cache=True, need_primary=True)
def cook_aux_primary_cache(
    sample: dict, primary: FileStore, pkl_source: FileStore, fs_source: FileStore, cache: CachePool
) -> LazyTextSample:
    # ds2 is offset by 100
    d = pkl_source.get(f"{int(sample['txt']) + 100:06d}.txt", sample)
    my_lazy_next_txt = cache.get_lazy(primary, f"{(int(sample['txt']) + 1) % 55:06d}.txt")
    return LazyTextSample(
        **basic_sample_keys(sample),
        txt=f"<{sample['txt']}|aux|{d}>",
        next_txt=my_lazy_next_txt,
    )


class LazyCookingTaskEncoder(DefaultTaskEncoder[LazyTextSample, LazyTextSample, TextBatch, TextBatch]):
    # Classvar is fine here.
    decoder = SampleDecoder(image_decode="pilrgb")

    cookers = [
        Cooker(cook_aux_primary_cache, has_subflavors={"crude_type": "aux_random_access"}),
    ]

    def select_samples_to_pack(self, samples: List[LazyTextSample]) -> List[List[LazyTextSample]]:
        return [[sample] for sample in samples]

    @stateless
    def pack_selected_samples(self, samples: List[LazyTextSample]) -> TextSample:
        assert len(samples) == 1, f"Expected 1 sample, got {len(samples)}"
        next_txt = samples[0].next_txt.get(samples[0])
        return TextSample.derive_from(
            samples[0],
            text=samples[0].txt + "|" + next_txt,
        )

    def batch(self, samples: List[TextSample]) -> TextBatch:
        return TextBatch.from_samples(
            samples,
            txts=[sample.text for sample in samples],
        )


class LazyCookingTaskEncoderWithPostencode(DefaultTaskEncoder[LazyTextSample, LazyTextSample, TextBatch, TextBatch]):
    # Classvar is fine here.
    decoder = SampleDecoder(image_decode="pilrgb")

    cookers = [
        Cooker(cook_aux_primary_cache, has_subflavors={"crude_type": "aux_random_access"}),
    ]

    @stateless
    def postencode_sample(self, sample: LazyTextSample) -> TextSample:
        assert isinstance(sample, LazyTextSample)
        return TextSample.derive_from(
            sample,
            text=sample.txt + "|" + sample.next_txt.get(sample),
        )

    def select_samples_to_pack(self, samples: List[LazyTextSample]) -> List[List[LazyTextSample]]:
        return [[sample] for sample in samples]

    @stateless
    def pack_selected_samples(self, samples: List[TextSample]) -> TextSample:
        assert len(samples) == 1
        return samples[0]

    def batch(self, samples: List[TextSample]) -> TextBatch:
        return TextBatch.from_samples(
            samples,
            txts=[sample.text for sample in samples],
        )


class GenericCookingTaskEncoder(DefaultTaskEncoder[TextSample, TextSample, TextBatch, TextBatch]):
    """A simple task encoder for captioning."""

    cookers = [Cooker(cook_text)]

    def batch(self, samples: List[TextSample]) -> TextBatch:
        return TextBatch.from_samples(
            samples,
            txts=[sample.text for sample in samples],
        )


@edataclass
class EncodedCaptioningSample(Sample):
    image: torch.Tensor
    caption: torch.Tensor


@edataclass
class CaptioningEncodedBatch(CaptioningSample):
    pass


@edataclass
class CaptioningBatch(Batch):
    image: torch.Tensor
    caption: torch.Tensor


class EncodingTaskEncoder(DefaultTaskEncoder):
    def __init__(self):
        super().__init__(raw_batch_type=CaptioningBatch)

    def encode_sample(self, sample: CaptioningSample) -> EncodedCaptioningSample:
        return EncodedCaptioningSample.derive_from(
            sample,
            image=sample.image,
            caption=torch.frombuffer(bytearray(sample.caption.encode()), dtype=torch.uint8),
        )


class PackingTaskEncoder(DefaultTaskEncoder):
    def __init__(self):
        super().__init__(raw_batch_type=CaptioningBatch)

    @stateless
    def encode_sample(self, sample: CaptioningSample) -> EncodedCaptioningSample:
        return EncodedCaptioningSample.derive_from(
            sample,
            image=sample.image,
            caption=torch.frombuffer(sample.caption.encode(), dtype=torch.uint8),
        )

    def select_samples_to_pack(self, samples: List[EncodedCaptioningSample]) -> List[List[EncodedCaptioningSample]]:
        assert len(samples) in (1 + 3 + 5 + 2, 50 % 11)
        if len(samples) < 11:
            return []
        return [
            samples[1 + 3 + 5 : 1 + 3 + 5 + 2],
            samples[1 + 3 : 1 + 3 + 5],
            samples[1 : 1 + 3],
            samples[:1],
        ]

    @stateless
    def pack_selected_samples(self, samples: List[EncodedCaptioningSample]) -> EncodedCaptioningSample:
        return EncodedCaptioningSample(
            __key__=",".join([sample.__key__ for sample in samples]),
            __restore_key__=(),
            image=torch.stack([sample.image for sample in samples]),
            caption=torch.cat([sample.caption for sample in samples]),
        )


class RandomTextTaskEncoder(DefaultTaskEncoder):
    @stateless(restore_seeds=True)
    def encode_sample(self, sample: TextSample) -> TextSample:
        rand_str = f"_{torch.randint(0, 1000, (1,)).item()}_{random.randint(0, 1000)}"
        return TextSample(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavors__=sample.__subflavors__,
            text=sample.text + rand_str,
        )
