"""`LanguageModelingEncoder`: text to documents of tokens, packed for variable-length attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.field import Field
from task_encoders.mixed_tokens import MixedTokens
from task_encoders.packing import batch_tokens, document, pack_tokens, with_target
from task_encoders.tokenizer import Tokenize, Tokenizer, as_tokenizer


class LanguageModelingEncoder(TaskEncoder):
    """Next-token prediction on the text in one part or field of each sample, packed or not.

    `tokenizer` is a function from str to ids, an object with `encode(text)` such as Hugging Face's, or a
    `Tokenizer` where special ids are wanted; None takes the UTF-8 bytes, between a beginning (257) and an end
    (258). A document of more than `max_length` tokens becomes several items of at most that many, of which those
    without a target are left out. All tokens but the first are targets: the last label of an item is the first token
    of the next. Batches are `max_length` long too; without it, as long as their longest row.

    `part` is the part, or the field of a JSON part, that holds the text: "txt", "json[text]". For fine-tuning,
    `prompt` is another, whose text stands before it and is no target; both are tokenized by themselves, with nothing
    added but `bos` before the prompt and `eos` at the end.
    """

    global_rng = False  # draws nothing

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        max_length: int | None = None,
        part: str = "txt",
        prompt: str | None = None,
    ) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is the number of tokens of an item, at least 1, not {max_length}")
        self.tokenizer = as_tokenizer(tokenizer)
        self.max_length = max_length
        self.text = Field(part)
        self.prompt = None if prompt is None else Field(prompt)

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip | Iterator[dict[str, Any] | Skip]:
        """One item, `tokens` and `labels`, both int64 (n,); or an iterator of them for a long document.

        Skips a sample without the part or the prompt as "no txt" (or what it is called), one without a token, or
        with a prompt but no text, as "empty", and a piece of a long document that has no target as "no target".
        Raises UnicodeDecodeError or JSONDecodeError where a part cannot be decoded, and ValueError that names the
        field where it is no text.
        """
        text = self.text.read_text(sample)
        if text is None:
            return Skip(f"no {self.text.name}")
        if self.prompt is None:
            item: dict[str, Any] = document(self.tokenizer(text))
        else:
            prompt = self.prompt.read_text(sample)
            if prompt is None:
                return Skip(f"no {self.prompt.name}")
            item = self._prompted(prompt, text)
        length = len(item["tokens"])
        if not text or length == 0:
            return Skip("empty")
        if self.max_length is None or length <= self.max_length:
            return item if self.prompt is None else with_target(item)
        return self._cut(item, length, self.max_length)

    def length(self, item: dict[str, Any]) -> int:
        """The number of tokens."""
        return len(item["tokens"])

    def cut(self, item: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """The tokens `start` to `stop - 1` of an item, as an item; the last label is the token after."""
        return {name: tensor[start:stop] for name, tensor in item.items()}

    def pack(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """One pack, T tokens in all.

        `tokens`, `labels`, `position_ids`, int64 (T,); `cu_seqlens`, int32 (items + 1,); `max_seqlen`, int.
        """
        return pack_tokens(items)

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """B packs; or B items, each then a pack of its own.

        `tokens`, `labels`, `position_ids`, int64 (B, T); `cu_seqlens`, int32 (segments + 1,), over all B * T
        tokens, where the padding of a row is a segment of its own; `max_seqlen`, int.
        """
        packs = [item if "cu_seqlens" in item else self.pack([item], rng) for item in items]
        return batch_tokens(packs, pad=self.tokenizer.pad, length=self.max_length)

    def settings(self) -> dict[str, Any]:
        """The tokenizer's identity and special ids, and every other argument."""
        prompt = None if self.prompt is None else self.prompt.name
        return {**self.tokenizer.settings(), "max_length": self.max_length, "part": self.text.name, "prompt": prompt}

    def _prompted(self, prompt: str, text: str) -> dict[str, Any]:
        mixed = MixedTokens(self.tokenizer, vision=None)
        mixed.add_ids(self.tokenizer.before, target=False)
        mixed.add_text(prompt, target=False)
        mixed.add_text(text, target=True)
        mixed.add_ids(self.tokenizer.after, target=True)
        return mixed.item()

    def _cut(self, item: dict[str, Any], length: int, size: int) -> Iterator[dict[str, Any] | Skip]:
        return (with_target(self.cut(item, start, start + size)) for start in range(0, length, size))
