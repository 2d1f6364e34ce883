# Copyright (c) 2024, NVIDIA CORPORATION.  All rights reserved.
# Copyright (c) 2024 LLaMA-Factory. Apache license 2.0.  (search_for_fit, greedy_knapsack)
#
# Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
# following conditions are met: redistributions of source code must retain the above copyright notice, this list of
# conditions and the following disclaimer; redistributions in binary form must reproduce them in the documentation;
# neither the name of NVIDIA CORPORATION nor the names of its contributors may be used to endorse or promote products
# derived from this software without specific prior written permission. THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT
# HOLDERS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES ARE DISCLAIMED; IN NO EVENT SHALL THE COPYRIGHT OWNER BE LIABLE
# FOR ANY DAMAGES ARISING IN ANY WAY OUT OF THE USE OF THIS SOFTWARE.
"""`TaskEncoder` of Megatron-LM's examples/multimodal: https://github.com/NVIDIA/Megatron-LM, commit d98e8a64ddf34856.

dataset_helpers.py, without interleaved, OCR and multiple choice samples, whose methods are of the same kind. `get_args`,
`get_tokenizer`, `ImageTransform` and what is of megatron.core stand here in small; docstrings are left out.
"""

import bisect
import dataclasses
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Dict, List, Tuple, Union

import numpy as np
import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    MultiChoiceVQASample,
    OCRSample,
    Sample,
    SimilarityInterleavedSample,
    VQASample,
)
from megatron.energon.task_encoder.base import stateless

IGNORE_INDEX, IMAGE_TOKEN, IMAGE_ID = -100, "<image>", 256
ARGS = SimpleNamespace(
    prompt_path="",
    dataloader_seq_length=None,
    packing_seq_length=96,
    packing_buffer_size=None,
    img_h=8,
    img_w=8,
    use_tiling=False,
    max_num_tiles=1,
    use_thumbnail=False,
    use_area_weighted_aspect_ratio=False,
    vision_model_type="",
    patch_dim=4,
    disable_vision_class_token=True,
    pixel_shuffle=False,
    use_tile_tags=False,
    tokenizer_prompt_format="",
    fp8=None,
)


def get_args():
    return ARGS


class Tokenizer:
    pad = 0

    def convert_tokens_to_ids(self, token):
        return IMAGE_ID

    def tokenize_conversation(self, conversation, return_target, add_generation_prompt):
        ids, target = [], []
        for turn in conversation:
            head, *rest = turn["content"].split(IMAGE_TOKEN)
            own = list(head.encode())
            for each in rest:
                own += [IMAGE_ID, *each.encode()]
            ids += own
            target += own if turn["role"] == "assistant" else [IGNORE_INDEX] * len(own)
        return np.array(ids), np.array(target)


def get_tokenizer():
    return Tokenizer()


def get_num_image_embeddings(*_):
    return 4


def find_closest_aspect_ratio(*_):
    return (1, 1)


find_closest_area_weighted_aspect_ratio = find_closest_aspect_ratio


class ImageTransform:
    def __init__(self, size, model):
        self.size = size

    def __call__(
        self, img, img_h, img_w, use_tiling, max_num_tiles, use_thumbnail, augment, find_closest_aspect_ratio_fn
    ):
        pixels = torch.tensor(np.asarray(img.convert("RGB").resize((img_w, img_h))).copy()).permute(2, 0, 1).float()
        return [pixels.flip(2) if augment and np.random.rand() < 0.5 else pixels]


@dataclass
class ImageTaskSample(Sample):
    __key__: str
    __restore_key__: Tuple[Union[str, int, tuple], ...]
    __subflavor__: Dict
    __subflavors__: Dict
    imgs: List[torch.Tensor]
    num_tiles: List[int]
    tokens: torch.Tensor
    total_len: int  # Total token count in the sample, including text and image tokens
    labels: torch.Tensor = None


@dataclass
class ImageTaskSamplePacked(Sample):
    __key__: str  # Sample name
    __restore_key__: Tuple[Union[str, int, tuple], ...]
    __subflavor__: Dict  # Sample metadata. Deprecated.
    __subflavors__: Dict  # Sample metadata.
    tokens: torch.Tensor  # Input tokens packed into a single tensor (seq_len,)
    labels: torch.Tensor  # Target tokens packed into a single tensor (seq_len,)
    imgs: List[torch.Tensor]  # Input images
    num_tiles: List[int]  # Number of tiles for each image of each sample (num_imgs)
    max_length: int  # Maximum length across sub-samples.
    cu_lengths: List[int]  # Cumulative length of each sub-sample in this packed sample incl. text and image tokens (P,)


@dataclass
class ImageTaskBatchPacked(Batch):
    __key__: List[str]  # Sample names
    __restore_key__: Tuple[Union[str, int, tuple], ...]
    __subflavor__: Dict  # Sample metadata. Deprecated.
    __subflavors__: List[Dict]  # Sample metadatas.
    tokens: torch.Tensor  # Input tokens packed and padded (N, seq_len)
    labels: torch.Tensor  # Target tokens packed and padded (N, seq_len)
    imgs: torch.Tensor  # All image tiles stacked into a single tensor (num_tiles, C, H, W)
    num_tiles: List[List[int]]  # Number of tiles per image (N, num_imgs)
    max_lengths: List[int]  # Maximum length across sub-samples (N,)
    cu_lengths: List[List[int]]  # Cumulative length of each sub-sample in each packed sample of the batch (N, P)


def search_for_fit(numbers: List[int], capacity: int) -> int:
    index = bisect.bisect(numbers, capacity)
    return -1 if index == 0 else (index - 1)


def greedy_knapsack(item_sizes: List[int], samples: List, max_capacity: int) -> List:
    assert len(item_sizes) == len(samples), "sample lengths and samples must have the same length."

    knapsacks = []

    if len(item_sizes) == 0:
        return knapsacks

    sorted_item_sizes, sorted_samples = zip(*sorted(zip(item_sizes, samples), key=lambda x: x[0]))
    sorted_item_sizes = list(sorted_item_sizes)
    sorted_samples = list(sorted_samples)

    if sorted_item_sizes[-1] > max_capacity:
        raise ValueError(
            f"knapsack: A sample is larger {sorted_item_sizes[-1]} than the max_sequence_length {max_capacity}."
        )

    while sorted_item_sizes:
        current_knapsack = []
        remaining_capacity = max_capacity

        while True:
            idx = search_for_fit(sorted_item_sizes, remaining_capacity)
            if idx == -1:
                break  # Can't fit more samples.

            remaining_capacity -= sorted_item_sizes[idx]

            sorted_item_sizes.pop(idx)
            sample = sorted_samples.pop(idx)
            current_knapsack.append(sample)

        knapsacks.append(current_knapsack)

    return knapsacks


class TaskEncoder(DefaultTaskEncoder[OCRSample, OCRSample, ImageTaskBatchPacked, dict]):
    def __init__(self):
        super().__init__()

        self.args = get_args()

        self.tokenizer = get_tokenizer()
        with open(self.args.prompt_path, "r") as f:
            self.manual_prompts = json.load(f)
        self.dataloader_seq_length = self.args.dataloader_seq_length  # Always return samples of this length.
        self.packing_seq_length = self.args.packing_seq_length  # Packing sequence length, if packing is enabled.
        self.is_packing_enabled = self.args.packing_buffer_size is not None and self.args.packing_buffer_size > 0

        if self.dataloader_seq_length and self.packing_seq_length:
            assert self.dataloader_seq_length >= self.packing_seq_length, (
                "dataloader sequence length must be greater than or equal to the packing sequence length"
            )

        if self.is_packing_enabled:
            assert self.packing_seq_length > 0, "packing sequence length must be set"

        self.num_image_embeddings_per_tile = get_num_image_embeddings(
            self.args.img_h,
            self.args.img_w,
            self.args.patch_dim,
            self.args.vision_model_type,
            self.args.disable_vision_class_token,
            1,
            self.args.pixel_shuffle,
            self.args.use_tile_tags,
            self.args.max_num_tiles,
            self.args.tokenizer_prompt_format,
        )

        self.txt_to_token_dict = {}

        self.img_h, self.img_w = self.args.img_h, self.args.img_w
        self.img_token_id = self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        self.num_tiles_degradation_map = {12: 8, 8: 6, 6: 4, 4: 2, 2: 1, 1: 1}

        self.find_closest_aspect_ratio_fn = (
            find_closest_area_weighted_aspect_ratio
            if self.args.use_area_weighted_aspect_ratio
            else find_closest_aspect_ratio
        )

        self.transform_img = ImageTransform(self.img_h, self.args.vision_model_type)

    def _get_total_seq_length(self, input_ids, num_tiles):
        total_num_images = len(num_tiles)
        total_num_tiles = sum(num_tiles)
        total_len = len(input_ids) + total_num_tiles * self.num_image_embeddings_per_tile - total_num_images
        return total_len

    def _truncate_for_packing(self, input_ids, target, num_tiles):
        total_num_images = len(num_tiles)
        total_num_tiles = sum(num_tiles)
        total_img_embeddings_len = total_num_tiles * self.num_image_embeddings_per_tile
        max_text_tokens = self.packing_seq_length - total_img_embeddings_len + total_num_images

        input_ids = input_ids[:max_text_tokens]
        target = target[:max_text_tokens]

        if (target == IGNORE_INDEX).all():
            raise ValueError(f"all targets will be ignored after truncation: {input_ids}")

        return input_ids, target

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Union[CaptioningSample, OCRSample, VQASample, SimilarityInterleavedSample]):
        if isinstance(sample, OCRSample):
            if "pdfa" in sample.__key__:
                yield self.combined_ocr_encoder(sample, task_type="encode_pdf")
            elif "multi" in sample.__key__:
                yield self.combined_ocr_encoder(sample, task_type="_encode_ocr")
            else:
                yield self.combined_ocr_encoder(sample, task_type="encode_ocr_ref")
        elif isinstance(sample, CaptioningSample):
            yield self.encode_captioning(sample)
        elif isinstance(sample, VQASample):
            is_llava_training = (
                sample.__subflavors__["is_llava_training"] if "is_llava_training" in sample.__subflavors__ else False
            )

            if "llava" in sample.__key__ or is_llava_training:
                yield self.encode_llava_pretrain(sample)
            else:
                yield self.encode_any_single_turn_vqa(sample)
        elif isinstance(sample, SimilarityInterleavedSample):
            yield self.encode_llava_sft(sample)
        elif isinstance(sample, MultiChoiceVQASample):
            yield self.encode_any_single_turn_vqa(sample)
        elif type(sample).__name__ == "SampleListSample":
            yield self.encode_sample_list(sample)
        else:
            raise NotImplementedError("Sample format not supported", sample)

    def encode_captioning(self, sample: CaptioningSample):
        augment = sample.__subflavors__.get("augmentation")

        imgs = self.transform_img(
            sample.image,
            self.img_h,
            self.img_w,
            self.args.use_tiling,
            self.args.max_num_tiles,
            self.args.use_thumbnail,
            augment,
            find_closest_aspect_ratio_fn=self.find_closest_aspect_ratio_fn,
        )
        num_tiles = [len(imgs)]

        prompt_list = self.manual_prompts["CaptioningPretraining"]["raw"]

        prompt_idx = np.random.randint(len(prompt_list))
        cur_prompt = prompt_list[prompt_idx]
        cur_prompt = IMAGE_TOKEN + "\n" + cur_prompt + "\n"

        caption = sample.caption.strip()

        split_by_line_flag = sample.__subflavors__.get("SplitByLine")
        if split_by_line_flag:
            caption_list = caption.split("\n")
            caption = np.random.choice(caption_list)

        conv = [
            {"role": "user", "content": cur_prompt},
            {"role": "assistant", "content": caption},
        ]

        input_ids, target = self.tokenizer.tokenize_conversation(conv, True, False)

        if self.is_packing_enabled:
            input_ids, target = self._truncate_for_packing(input_ids, target, num_tiles)

        return ImageTaskSample(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavor__=None,
            __subflavors__=sample.__subflavors__,
            imgs=imgs,
            num_tiles=num_tiles,
            tokens=torch.tensor(input_ids),
            labels=torch.tensor(target),
            total_len=self._get_total_seq_length(input_ids, num_tiles),
        )

    def encode_llava_pretrain(self, sample: VQASample):
        augment = sample.__subflavors__.get("augmentation", False)

        imgs = self.transform_img(
            sample.image,
            self.img_h,
            self.img_w,
            self.args.use_tiling,
            self.args.max_num_tiles,
            self.args.use_thumbnail,
            augment,
            find_closest_aspect_ratio_fn=self.find_closest_aspect_ratio_fn,
        )
        num_tiles = [len(imgs)]

        conv = [
            {"role": "user", "content": IMAGE_TOKEN + "\n"},
            {"role": "assistant", "content": sample.answers},
        ]

        input_ids, target = self.tokenizer.tokenize_conversation(conv, True, False)

        if self.is_packing_enabled:
            input_ids, target = self._truncate_for_packing(input_ids, target, num_tiles)

        return ImageTaskSample(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavor__=None,
            __subflavors__=sample.__subflavors__,
            imgs=imgs,
            num_tiles=num_tiles,
            tokens=torch.tensor(input_ids),
            labels=torch.tensor(target),
            total_len=self._get_total_seq_length(input_ids, num_tiles),
        )

    def batch(self, samples: List[Union[ImageTaskSample, ImageTaskSamplePacked]]) -> ImageTaskBatchPacked:
        imgs = [img for s in samples for img in s.imgs]
        if len(imgs) > 0:
            imgs = torch.stack(imgs)
        else:
            imgs = torch.tensor([[0]], dtype=torch.float32)

        max_seq_len = self.dataloader_seq_length
        if not max_seq_len:
            max_seq_len = max(len(s.tokens) for s in samples)

        tokens = torch.full((len(samples), max_seq_len), self.tokenizer.pad, dtype=torch.int64)
        labels = torch.full((len(samples), max_seq_len + 1), self.tokenizer.pad, dtype=torch.int64)

        for i, s in enumerate(samples):
            text_len = min(max_seq_len, len(s.tokens))
            target_len = min(max_seq_len + 1, len(s.labels))

            tokens[i, :text_len] = s.tokens[:text_len]
            labels[i, :target_len] = s.labels[:target_len]

        num_tiles = torch.tensor([n for s in samples for n in s.num_tiles], dtype=torch.int32)
        if len(num_tiles) == 0:
            num_tiles = torch.tensor([[0]], dtype=torch.int32)

        cu_lengths = torch.tensor([[0]], dtype=torch.int32)
        max_lengths = torch.tensor([[0]], dtype=torch.int32)

        is_packed = isinstance(samples[0], ImageTaskSamplePacked)

        if is_packed:
            cu_lengths = torch.stack([s.cu_lengths for s in samples])
            max_lengths = torch.tensor([s.max_length for s in samples], dtype=torch.int32)

        has_fp8 = self.args.fp8
        if has_fp8:
            total_seq_len = self._get_total_seq_length(tokens[0], num_tiles)
            padding_needed = get_padding(
                total_seq_len,
                self.args.context_parallel_size,
                self.args.tensor_model_parallel_size,
                self.args.sequence_parallel,
                fp8_enabled=has_fp8,
                fp8_recipe=self.args.fp8_recipe,
            )
            if padding_needed > 0:
                tokens = torch.cat(
                    [tokens, torch.full((tokens.shape[0], padding_needed), self.tokenizer.pad, dtype=torch.int64)],
                    dim=1,
                )
                labels = torch.cat(
                    [labels, torch.full((labels.shape[0], padding_needed), IGNORE_INDEX, dtype=torch.int64)], dim=1
                )
                if is_packed:
                    cu_lengths[0][-1] += padding_needed
                    new_max_length = cu_lengths[0][-1] - cu_lengths[0][-2]
                    max_lengths = torch.max(max_lengths, new_max_length)

        return ImageTaskBatchPacked(
            __key__=[s.__key__ for s in samples],
            __restore_key__=[s.__restore_key__ for s in samples],
            __subflavor__=None,
            __subflavors__=samples[0].__subflavors__,
            tokens=tokens,
            labels=labels,
            imgs=imgs,
            num_tiles=num_tiles,
            cu_lengths=cu_lengths,
            max_lengths=max_lengths,
        )

    def encode_batch(self, batch: ImageTaskBatchPacked) -> dict:
        raw = dataclasses.asdict(batch)
        del raw["__subflavors__"]
        return raw

    def select_samples_to_pack(self, samples: List[ImageTaskSample]) -> List[List[ImageTaskSample]]:
        lengths = [sample.total_len for sample in samples]

        packed_samples = greedy_knapsack(lengths, samples, self.packing_seq_length)

        return packed_samples

    @stateless
    def pack_selected_samples(self, samples: List[ImageTaskSample]) -> List[ImageTaskSamplePacked]:
        packing_seq_len = self.packing_seq_length

        packed_tokens = []
        packed_labels = []
        packed_imgs = []

        current_length = 0
        max_length = 0
        cu_lengths = [0]

        for _, sample in enumerate(samples):
            sample_len = sample.total_len

            if sample_len > max_length:
                max_length = sample_len

            if current_length + sample_len > packing_seq_len:
                raise ValueError(f"Packed sample exceeds the maximum sequence length of {packing_seq_len}: {samples}")

            packed_tokens.append(sample.tokens)
            packed_labels.append(sample.labels)

            packed_imgs += sample.imgs

            current_length += sample_len
            cu_lengths.append(current_length)

        packed_tokens = torch.cat(packed_tokens, dim=0)
        packed_labels = torch.cat(packed_labels, dim=0)

        return ImageTaskSamplePacked(
            __key__=",".join([s.__key__ for s in samples]),
            __restore_key__=(),  # Will be set by energon based on `samples`
            __subflavor__=None,
            __subflavors__=samples[0].__subflavors__,
            tokens=packed_tokens,
            labels=packed_labels,
            imgs=packed_imgs,
            cu_lengths=torch.tensor(cu_lengths, dtype=torch.int32),
            max_length=max_length,
            num_tiles=[n for s in samples for n in s.num_tiles],
        )
