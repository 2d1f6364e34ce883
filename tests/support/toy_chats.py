"""Chats with images in the format of TRL's data sets, and a small Qwen2.5-VL with its processor on disk."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CHATS = 24
_SIZES = [(56, 84), (112, 56), (28, 140), (56, 56)]  # sizes of photos that the processor does not resize
_WORDS = ["what", "does", "this", "photo", "show", "of", "a", "small", "grey", "cat", "that", "sleeps", "on", "boxes"]
_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
_PADS = ["<|image_pad|>", "<|video_pad|>"]
_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_TEMPLATE = (  # the template of Qwen2.5-VL for images, with the marks by which transformers finds the answers
    f"{{% for message in messages %}}{{% if loop.first and message.role != 'system' %}}{_SYSTEM}{{% endif %}}"
    "{% if message.content is string %}{% set said = message.content %}{% else %}{% set said %}"
    f"{{% for part in message.content %}}{{% if part.type == 'image' %}}{_IMAGE}{{% else %}}{{{{ part.text }}}}"
    "{% endif %}{% endfor %}{% endset %}{% endif %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ said }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ said }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chats() -> list[tuple[list[dict[str, Any]], list[Image.Image]]]:
    """Return messages and images: no image, one or two, some of them in a second turn."""
    rng = random.Random(7)

    def said(most: int) -> dict[str, Any]:
        return {"type": "text", "text": " ".join(rng.choices(_WORDS, k=rng.randint(1, most)))}

    made = []
    for number in range(CHATS):
        turns, images = [], []
        for turn in range(1 + number % 2):
            shown = (number + turn) % 3
            for _ in range(shown):
                pixels = np.random.default_rng(rng.randrange(99)).integers(0, 256, (*rng.choice(_SIZES), 3), np.uint8)
                images.append(Image.fromarray(pixels))
            turns.append({"role": "user", "content": [*({"type": "image"} for _ in range(shown)), said(5)]})
            turns.append({"role": "assistant", "content": [said(9)]})
        made.append((turns, images))
    return made


def write_chats(folder: Path) -> None:
    """Write the chats as Parquet, in the columns `messages` and `images`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def png(image: Image.Image) -> bytes:
        image.save(file := io.BytesIO(), "PNG")
        return file.getvalue()

    rows = [
        {"messages": turns, "images": [{"bytes": png(image), "path": None} for image in images]}
        for turns, images in chats()
    ]
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=6)


def save_small_qwen(folder: Path) -> None:
    """Save a model with random weights, its processor, and its tokenizer of bytes, for `from_pretrained(folder)`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({word: i for i, word in enumerate([*letters, *_MARKS, *_PADS])}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=_MARKS[0], eos_token=_MARKS[2], additional_special_tokens=[*_MARKS, *_PADS]
    )
    ids = dict(zip((*_MARKS, *_PADS), tokenizer.convert_tokens_to_ids([*_MARKS, *_PADS]), strict=True))
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    eyes = Qwen2VLImageProcessor(size=sizes)
    processor = Qwen2_5_VLProcessor(eyes, tokenizer, Qwen2VLVideoProcessor(), chat_template=_TEMPLATE)
    tokenizer.chat_template = _TEMPLATE
    small = {"hidden_size": 32, "intermediate_size": 32}
    config = Qwen2_5_VLConfig(
        text_config={
            **small,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            **small,
            "depth": 2,
            "num_heads": 4,
            "patch_size": 14,
            "out_hidden_size": 32,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        pad_token_id=0,
        bos_token_id=None,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
    )
    torch.manual_seed(1)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():  # large enough for a visible effect of attention
            weight.add_(0.1 * torch.randn_like(weight))
    for part in (model, processor, tokenizer):
        part.save_pretrained(folder)
