"""Small tokenizers of `transformers`, of the types of Llama, Mistral, Gemma and Qwen, trained on Python's source."""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.toy_samples import python_sources

LLAMA3 = (  # the pattern of Llama 3; that of Qwen2 has single digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SENTENCEPIECE = ["<unk>", "<s>", "</s>"]
TURNS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>"]
MEDIA = ["<image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]


@functools.cache
def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary and merges of pieces with `▁` for spaces, and a token per byte."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [*SENTENCEPIECE, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    trained.train_from_iterator(
        [text for _, text in python_sources()[:20]] + ["user assistant four USER: A cat."], trainer
    )
    return trained.get_vocab(), _merges(trained)


@functools.cache
def _letters() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary and merges of bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([text for _, text in python_sources()[:20]], trainer)
    return trained.get_vocab(), _merges(trained)


def _merges(trained: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]


def tokenizer(family: str) -> Any:
    """Return a tokenizer: "llama" (legacy: `▁` before each piece), "mistral" (before the first), "gemma", "llama3",
    "qwen".
    """
    from transformers import PreTrainedTokenizerFast  # this takes a second

    if family in ("llama", "mistral", "gemma"):
        vocabulary, merges = _pieces()
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        space = normalizers.Replace(" ", "▁")
        if family == "llama":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        elif family == "mistral":
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            made.normalizer = space
            made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    else:
        vocabulary, merges = _letters()
        made = Tokenizer(models.BPE(vocabulary, merges))
        pattern = LLAMA3 if family == "llama3" else LLAMA3.replace("{1,3}", "")
        made.normalizer = normalizers.NFC() if family == "qwen" else None
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
        made.decoder = decoders.ByteLevel()
        named = {"eos_token": "<|im_end|>"}
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in [*TURNS, *MEDIA]])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|endoftext|>", **named)
