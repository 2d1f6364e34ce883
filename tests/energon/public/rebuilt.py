"""Encoders rebuilt in our own words, since the originals need processors of transformers, or have no licence file.

`QwenVL` does what Megatron Bridge's `QwenVLTaskEncoder` does (src/megatron/bridge/models/qwen_vl/data/energon.py, commit
067f987df03b8355): a failure tolerance, a limit of images by SkipSample, sequences prepared while encoding, first fit
decreasing over them, a pack that keeps its samples. `LlavaOneVision` does what LLaVA-OneVision-1.5's encoder does
(aiak_training_llm/data/multimodal/task_encoder.py, commit a5eb942aa83c4347): a generator that restores seeds, captions
and packs made offline, methods without @stateless. Its `build_train_datasets`, which sorts by length, is left out.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.energon import Batch, CaptioningSample, Cooker, DefaultTaskEncoder, Sample, SkipSample, stateless

LONGEST = 48


@dataclass
class ChatSample(Sample):
    conversation: str
    imgs: Any = None


@stateless
def cook_chat(sample: dict[str, Any]) -> ChatSample:
    own = {name: sample[name] for name in ("__key__", "__restore_key__", "__subflavors__", "__sources__")}
    return ChatSample(**own, conversation=json.dumps(sample["json"]), imgs=[sample["png"]])


@dataclass
class Prepared:
    __key__: str
    __subflavors__: Any
    tokens: torch.Tensor
    __restore_key__: tuple[Any, ...] = ()


@dataclass
class PreparedPack:
    __key__: str
    __restore_key__: tuple[Any, ...]
    __subflavors__: Any
    samples: list[Prepared]


@dataclass
class QwenBatch(Batch):
    __keys__: list[str]
    input_ids: torch.Tensor
    cu_seqlens: torch.Tensor | None = None


class QwenVL(DefaultTaskEncoder):  # type: ignore[misc]
    cookers = [Cooker(cook_chat)]

    @stateless(failure_tolerance=100)
    def encode_sample(self, sample: ChatSample) -> Prepared:
        chat = json.loads(sample.conversation)
        if chat["id"] % 10 == 4:  # too many images
            raise SkipSample
        tokens = torch.tensor([int(sample.imgs[0].sum() * 100) % 997, *chat["text"].encode()])
        if len(tokens) > 16:
            raise ValueError("longer than the sequence")
        return Prepared(sample.__key__, sample.__subflavors__, tokens, sample.__restore_key__)

    def select_samples_to_pack(self, samples: list[Prepared]) -> list[list[Prepared]]:
        packs: list[list[Prepared]] = []
        for sample in sorted(samples, key=lambda each: -len(each.tokens)):
            for pack in packs:
                if sum(len(each.tokens) for each in pack) + len(sample.tokens) <= LONGEST:
                    pack.append(sample)
                    break
            else:
                packs.append([sample])
        return packs

    @stateless
    def pack_selected_samples(self, samples: list[Prepared]) -> PreparedPack:
        return PreparedPack(",".join(sample.__key__ for sample in samples), (), {}, samples)

    @stateless
    def batch(self, samples: list[Any]) -> QwenBatch:
        if isinstance(samples[0], PreparedPack):
            if len(samples) != 1:
                raise ValueError("a packed batch is one pack")
            samples = samples[0].samples
        keys = [sample.__key__ for sample in samples]
        lengths = np.cumsum([len(sample.tokens) for sample in samples])
        return QwenBatch(
            __key__=keys,
            __restore_key__=[() for _ in keys],
            __keys__=keys,
            input_ids=torch.cat([sample.tokens for sample in samples]),
            cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32),
        )


@dataclass
class PackedCaptions(Sample):
    images: list[Any]
    captions: list[str]


@dataclass
class TaskSample(Sample):
    tokens: Any = None
    imgs: Any = None
    total_len: int = 0


@dataclass
class TaskBatch(Batch):
    tokens: Any = None
    imgs: Any = None


class LlavaOneVision(DefaultTaskEncoder):  # type: ignore[misc]
    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        if isinstance(sample, CaptioningSample):
            yield self.encode_captioning(sample.__key__, sample, sample.image, sample.caption)
        elif type(sample).__name__ == "PackedCaptions":
            parts = enumerate(zip(sample.images, sample.captions, strict=True))
            inner = [self.encode_captioning(f"{sample.__key__}.{i}", sample, *pair) for i, pair in parts]
            yield self.pack_selected_samples(inner)
        else:
            raise NotImplementedError("Sample format not supported", sample)

    def encode_captioning(self, key: str, sample: Any, image: Any, caption: str) -> TaskSample:
        tokens = torch.tensor([int(np.random.randint(1000)), *caption.encode()])
        assert len(tokens) <= 15, f"{key} input length {len(tokens)}"
        pixels = torch.from_numpy(np.asarray(image).copy())
        own = {"__restore_key__": sample.__restore_key__, "__subflavors__": sample.__subflavors__}
        return TaskSample(__key__=key, **own, tokens=tokens, imgs=[pixels], total_len=len(tokens))

    def batch(self, samples: list[TaskSample]) -> TaskBatch:
        wide = max(len(sample.tokens) for sample in samples)
        tokens = np.full((len(samples), wide), -100, dtype=np.int64)
        for row, sample in zip(tokens, samples, strict=True):
            row[: len(sample.tokens)] = sample.tokens
        return TaskBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=[sample.__restore_key__ for sample in samples],
            __subflavors__=samples[0].__subflavors__,
            tokens=tokens,
            imgs=[image for sample in samples for image in sample.imgs],
        )

    def encode_batch(self, batch: TaskBatch) -> dict[str, Any]:
        raw = dataclasses.asdict(batch)
        del raw["__subflavors__"]
        return raw

    def select_samples_to_pack(self, samples: list[TaskSample]) -> list[list[TaskSample]]:
        ordered = sorted(samples, key=lambda sample: sample.total_len)
        return [ordered[i : i + 2] for i in range(0, len(ordered), 2)]

    @stateless
    def pack_selected_samples(self, samples: list[TaskSample]) -> TaskSample:
        return TaskSample(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),
            __subflavors__=samples[0].__subflavors__,
            tokens=torch.cat([sample.tokens for sample in samples]),
            imgs=[image for sample in samples for image in sample.imgs],
            total_len=sum(sample.total_len for sample in samples),
        )
