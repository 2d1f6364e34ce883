"""`LanguageModelingEncoder`: documents of tokens for variable-length attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.parts.image_text_tokens import MixedEncoder, MixedTokens
from task_encoders.parts.sample_parts import Field
from task_encoders.parts.token_packing import document, multiple_setting, with_target
from task_encoders.parts.tokenizer import Tokenize, Tokenizer


class LanguageModelingEncoder(MixedEncoder):
    """Predicts the next token of a text, in packs or not.

    A document of more than `max_length` tokens becomes several items. The last label of one is the first token of the
    next.

    Args:
        tokenizer: A function from text to token ids, an object with `encode(text)` as of Hugging Face, tiktoken or
            SentencePiece, or a `Tokenizer` to add special ids. None takes the UTF-8 bytes, 259 ids in all.
        max_length: The most tokens of an item, and the length of a batch's rows. None (default): documents are not cut,
            and rows are as long as the longest.
        part: The part that has the text, or the field of a JSON part: "txt" (default), "json[text]".
        prompt: For fine-tuning, the part or field with a prompt, which does not contribute to the loss. Prompt and text
            are tokenized as one text, and a token with characters of both contributes. None (default): no prompt.
        multiple: Each document of a pack, and each row, is padded to a multiple of this many tokens: 2 · cp for context
            parallelism over cp ranks. `length` counts the padding.
        eos: The end of a document, for a tokenizer that adds none: True for its own `eos_token`, a token as text or id,
            False for none. It is required where such a tokenizer has special tokens. It is added once, at the true end.

    An item has `tokens` and `labels`, int64 (n,): a label is the next token, -100 if it does not contribute to the
    loss. A batch of B rows has `tokens`, `labels` and `position_ids`, int64 (B, T), and of B items that are not packed
    `lengths`, int64 (B,), the tokens of each. A batch of packs has `cu_seqlens`, int32 (segments + 1,), where each
    document and each row's padding starts among the B * T tokens; and `max_seqlen`, int, the longest of them.

    A sample is skipped as "no txt" (the name of the part or the prompt) or as "empty", and a piece of a long document
    as "no target" if none of its tokens contributes to the loss.

    Raises:
        ValueError: A setting is invalid, a field is not text, or a pack is longer than `max_length`.
        UnicodeDecodeError: A part is not UTF-8.
        JSONDecodeError: A part is not JSON.

    Example:
        ```python
        from task_encoders import LanguageModelingEncoder
        lane = sp.Lane()  # to inspect batches; a loader calls a pipeline function with its own lanes
        items = sp.Encode(sp.TarShardReader("shards/", lane), LanguageModelingEncoder(max_length=64))
        batch = next(sp.Batcher(sp.OnlinePacker(items, max_length=64), size=2))
        batch["tokens"].shape                # torch.Size([2, 64])
        int(batch["cu_seqlens"][-1])         # 128
        ```
    """

    images = TaskEncoder.images  # 0, unlike in the base class

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        max_length: int | None = None,
        part: str = "txt",
        prompt: str | None = None,
        multiple: int = 1,
        eos: bool | int | str | None = None,
    ) -> None:
        super().__init__(tokenizer, vision=None, max_length=max_length, part=part, multiple=multiple, eos=eos)
        self.text = Field(part)
        self.prompt = None if prompt is None else Field(prompt)

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip | Iterator[dict[str, Any] | Skip]:
        """Return one item, an iterator of items for a long document, or `Skip`."""
        text = self.text.read_text(sample)
        if text is None:
            return Skip(f"no {self.text.name}")
        if self.prompt is None:
            item: dict[str, Any] = document(self.tokenizer(text))
        else:
            prompt = self.prompt.read_text(sample)
            if prompt is None:
                return Skip(f"no {self.prompt.name}")
            item = self._prompt_item(prompt, text)
        length = len(item["tokens"])
        if not text or length == 0:
            return Skip("empty")
        if self.max_length is None or length <= self.max_length:
            return item if self.prompt is None else with_target(item)
        return self._cut(item, length, self.max_length)

    def cut(self, item: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the tokens `start` to `stop - 1` of an item, as an item.

        The last label is the token after them.
        """
        return {name: tensor[start:stop] for name, tensor in item.items()}

    def settings(self) -> dict[str, Any]:
        """Return every argument, and for the tokenizer its identity and special ids."""
        prompt = None if self.prompt is None else self.prompt.name
        own = {"max_length": self.max_length, "part": self.text.name, "prompt": prompt}
        return {**self.tokenizer.settings(), **own, **multiple_setting(self.multiple)}

    def _prompt_item(self, prompt: str, text: str) -> dict[str, Any]:
        """Return the item of a prompt, which does not contribute to the loss, and a text, which does."""
        mixed = MixedTokens(self.tokenizer, is_document=True)
        mixed.add_text(prompt, target=False)
        mixed.add_text(text, target=True)
        return mixed.item()

    def _cut(self, item: dict[str, Any], length: int, size: int) -> Iterator[dict[str, Any] | Skip]:
        """Cut an item of `length` tokens into items of `size` tokens. The last one may have fewer."""
        return (with_target(self.cut(item, start, start + size)) for start in range(0, length, size))
