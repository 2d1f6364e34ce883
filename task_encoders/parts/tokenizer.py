"""`Tokenizer`: one class for all kinds of tokenizers, and for UTF-8 bytes.

A text is tokenized as a whole. A token contributes to the loss if one of its characters does, which is also the rule of
`return_assistant_tokens_mask` in `transformers`. In `Q: 2+2? four`, only `four` contributes:

    tokens    ▁Q   :   ▁2  +   2   ?   ▁four      `▁four` contributes, although it includes the space
    spans    0 1  1 2  2 4 4 5 5 6 6 7 7    12
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_hexdigest

Ids: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]


class HasEncode(Protocol):
    """Tokenizer of Hugging Face, tiktoken or SentencePiece."""

    def encode(self, text: str, /) -> Any:
        """Return the token ids, or an object with the attribute `ids`."""


Tokenize: TypeAlias = HasEncode | Callable[[str], Ids]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Tokenizer with special ids to put around a text.

    Ids that it adds by itself are not removed.

    Args:
        tokenize: A function from text to token ids, or an object with `encode(text)` as of Hugging Face, tiktoken or
            SentencePiece.
        bos: The id before a text. None (default): none.
        eos: The id after a text, unless the text ends with it already. None (default): none.
        pad: The id of padding (default 0), which does not contribute to the loss.
        name: The tokenizer's name in a saved state. None (default): a hash of its vocabulary and rules if they are
            accessible (Hugging Face, tiktoken, SentencePiece), else the name of the function or class. Pass a name if
            that name does not identify it: after you changed the function, or for a class with several vocabularies.

    Raises:
        ValueError: `tokenize` is neither a function nor such an object, or it truncates or pads texts.

    Example:
        ```python
        from task_encoders import Tokenizer
        tokenizer = Tokenizer(lambda text: [len(word) for word in text.split()], bos=100, eos=101)
        tokenizer("a cat sleeps")   # tensor([100,   1,   3,   6, 101])
        tokenizer("")               # tensor([], dtype=torch.int64)
        Tokenizer("gpt2")           # ValueError: not a tokenizer: 'gpt2'. Pass ...
        ```
    """

    tokenize: Tokenize
    bos: int | None = None
    eos: int | None = None
    pad: int = 0  # no target, because labels of padding are masked
    name: str | None = None
    # the ids that `tokenize` adds before a text, and those that it adds after it
    _added: tuple[list[int], list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.tokenize, str) or not (callable(self.tokenize) or hasattr(self.tokenize, "encode")):
            raise ValueError(
                f"not a tokenizer: {self.tokenize!r}. Pass a function from str to token ids, an object with "
                "encode(text), or None for bytes"
            )
        tokenize: Any = self.tokenize
        if hasattr(tokenize, "to_str") and (tokenize.truncation or tokenize.padding):
            raise ValueError(
                "the tokenizer truncates or pads, which would lose tokens or train on padding. Call its "
                "no_truncation() and no_padding() first"
            )
        object.__setattr__(self, "_added", self._ids_around())

    def __call__(self, text: str) -> torch.Tensor:
        """Return the tokens of a text, int64 (n,). An empty text has none, not even `bos` and `eos`.

        tiktoken treats special tokens in the text as ordinary text, since a document may contain `<|endoftext|>`.
        """
        ids: Ids = getattr(self.tokenize, "encode_ordinary", self.piece)(text)
        if len(ids) == 0:
            return torch.empty(0, dtype=torch.int64)
        return joined([self.before, ids, self.after(ids)])

    def piece(self, text: str) -> Ids:
        """Return the ids of a text, with nothing added.

        Args:
            text: The text. Special tokens in it are recognized.
        """
        if not text:
            return ()
        encode: Any = getattr(self.tokenize, "encode", self.tokenize)
        if hasattr(self.tokenize, "encode_ordinary"):  # tiktoken
            return _ids(encode(text, allowed_special="all"))
        if hasattr(self.tokenize, "get_vocab"):  # Hugging Face
            return _ids(encode(text, add_special_tokens=False))
        return _ids(encode(text))

    def marked(self, text: str, ranges: Sequence[tuple[int, int]]) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the ids of a text, and a mask of those in the ranges.

        A token is in a range if one of its characters is. The mask is bool (n,).

        No ids are added around the text.

        Args:
            text: The text.
            ranges: The starts and ends of the ranges, in characters.

        Raises:
            ValueError: The tokenizer has no offsets, and tokenizes the text before the start or end of a range
                differently from the whole text.
        """
        if not text or not ranges:
            ids = self.piece(text)  # ids of the whole text
            return ids, np.zeros(len(ids), np.bool_)
        ids, spans = self._character_spans(text)
        mask = np.zeros(len(ids), np.bool_)
        for start, end in ranges:
            if spans is not None:
                mask |= (spans[:, 0] < end) & (spans[:, 1] > start)
            else:
                mask[slice(*(self._tokens_before(text, border, ids) for border in (start, end)))] = True
        return ids, mask

    def text_of(self, token: int) -> str | None:
        """Return the text that is tokenized to this token.

        The result is None if the tokenizer is a function, which has no vocabulary.

        Args:
            token: The id of the token.

        Raises:
            ValueError: The tokenizer has a vocabulary, but no text is tokenized to this token.
        """
        tokenize: Any = self.tokenize
        names = ("convert_ids_to_tokens", "id_to_token", "id_to_piece", "decode_single_token_bytes")
        text_of_id = next((getattr(tokenize, name) for name in names if hasattr(tokenize, name)), None)
        if text_of_id is None:
            return None
        try:
            raw_text = text_of_id(token)
            text = raw_text.decode() if isinstance(raw_text, bytes) else raw_text or ""
        except (IndexError, KeyError, OverflowError, UnicodeDecodeError):
            text = ""
        if list(self.piece(text)).count(token) != 1:
            raise ValueError(
                f"{type(tokenize).__name__} reads no text as the token {token}. Pass the id of a token that was added "
                "to it, such as '<image>'"
            )
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, including special tokens.

        Args:
            ids: The ids of tokens.

        Raises:
            ValueError: The tokenizer has no `decode`.
        """
        if self.tokenize is utf8:
            return bytes(number for number in ids if number < 256).decode(errors="replace")
        decode: Any = getattr(self.tokenize, "decode", None)
        if decode is None:
            raise ValueError(f"{type(self.tokenize).__name__} has no decode")
        if hasattr(self.tokenize, "get_vocab"):  # Hugging Face
            return str(decode(list(ids), skip_special_tokens=False))
        return str(decode(list(ids)))

    def special_texts(self) -> set[str]:
        """Return the texts of the special tokens, or an empty set if they are unknown."""
        tokenize: Any = self.tokenize
        if hasattr(tokenize, "special_tokens_set"):  # tiktoken
            return set(tokenize.special_tokens_set)
        if hasattr(tokenize, "all_special_tokens"):  # transformers
            return set(map(str, tokenize.all_special_tokens))
        if hasattr(tokenize, "get_added_tokens_decoder"):  # tokenizers
            return {token.content for token in tokenize.get_added_tokens_decoder().values() if token.special}
        if hasattr(tokenize, "id_to_piece"):  # SentencePiece
            return {tokenize.id_to_piece(i) for i in range(tokenize.get_piece_size()) if tokenize.is_control(i)}
        return set()

    @property
    def before(self) -> list[int]:
        """The ids at the start of a document: `bos`, and those that the tokenizer adds."""
        added, _ = self._added
        return added if self.bos is None or added[:1] == [self.bos] else [self.bos, *added]

    def after(self, ids: Ids) -> list[int]:
        """Return the ids at the end of a document.

        They are those that the tokenizer adds by itself, and then `eos` unless the document ends with it already.

        Args:
            ids: The ids of the document, or only its last ones.
        """
        _, added = self._added
        if self.eos is None or [*ids[-1:], *added][-1:] == [self.eos]:
            return added
        return [*added, self.eos]

    def ending(self, eos: bool | int | str | None) -> Tokenizer:
        """Return this tokenizer with an end-of-document token.

        If `eos` is None, the result is the same tokenizer, which must add an end itself or have no special tokens.

        Args:
            eos: True: its own `eos_token`. A text or an id: that token. False or None: none.

        Raises:
            ValueError: `eos` is None, and the tokenizer has special tokens but adds none after a text. Or the token
                does not exist, or there would be two ends.
        """
        tokenize: Any = self.tokenize
        if eos is None or eos is False:
            _, added_after = self._added
            if eos is None and self.eos is None and not added_after and (special := self.special_texts()):
                own = getattr(tokenize, "eos_token", None)
                others = [text for text in sorted(special - {own}) if _END_TOKEN.search(text.lower())][:6]
                ends = [*([f"True ({own!r}, which may end turns)"] if own else []), *map(repr, others), "False"]
                raise ValueError(
                    "the tokenizer adds no token after a document, so a model would not learn to end. Pass eos= to the "
                    f"encoder: {', '.join(ends)}"
                )
            return self
        if self.eos is not None:
            raise ValueError(f"two ends: eos={eos!r}, and {self.eos} of the Tokenizer. Pass one of them")
        token: Any = eos
        if eos is True:  # of transformers, tiktoken or SentencePiece, where it is a method
            ids_or_methods = [getattr(tokenize, name, None) for name in ("eos_token_id", "eot_token", "eos_id")]
            token = next((each() if callable(each) else each for each in ids_or_methods if each is not None), None)
        elif isinstance(eos, str):
            ids = list(self.piece(eos))
            token = ids[0] if len(ids) == 1 else None
        if token is None or token < 0:
            raise ValueError(f"{type(tokenize).__name__} has no token for eos={eos!r}. Pass one by its text or its id")
        return replace(self, eos=token)

    def settings(self) -> dict[str, Any]:
        """Return the tokenizer's identity and special ids for `TaskEncoder.settings`."""
        name = self.name or _identity(self.tokenize)
        return {"tokenizer": name, "bos": self.bos, "eos": self.eos, "pad": self.pad}

    def _ids_around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer itself adds before and after a text, as those of Hugging Face do."""
        if not hasattr(self.tokenize, "get_vocab"):
            return [], []
        encode: Any = self.tokenize
        plain, with_added = list(self.piece("a")), list(_ids(encode.encode("a")))
        for start in range(len(with_added) - len(plain) + 1):
            if with_added[start : start + len(plain)] == plain:
                return with_added[:start], with_added[start + len(plain) :]
        raise ValueError(f"{type(encode).__name__} adds tokens within texts, not around them. Pass a function")

    def _character_spans(self, text: str) -> tuple[Ids, NDArray[np.int64] | None]:
        """Return the ids of a text, and the character span of each, int64 (n, 2), or None if these are unknown."""
        tokenize: Any = self.tokenize
        if getattr(tokenize, "is_fast", False):  # transformers
            encoded_text = tokenize(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return encoded_text["input_ids"], np.array(encoded_text["offset_mapping"], np.int64).reshape(-1, 2)
        if hasattr(tokenize, "to_str"):  # tokenizers
            encoding = tokenize.encode(text, add_special_tokens=False)
            return encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)
        ids = self.piece(text)
        if tokenize is utf8:
            sizes = np.ones(len(ids), np.int64)  # bytes of each token
        elif hasattr(tokenize, "decode_tokens_bytes"):  # tiktoken
            sizes = np.array([len(token) for token in tokenize.decode_tokens_bytes(ids)])
        else:
            return ids, None
        widths = [len(character.encode(errors="surrogatepass")) for character in text]
        character_of_byte = np.repeat(np.arange(len(text)), widths)
        ends = np.cumsum(sizes)
        return ids, np.stack([character_of_byte[ends - sizes], character_of_byte[ends - 1] + 1], 1)

    def _tokens_before(self, text: str, border: int, ids: Ids) -> int:
        """Count the tokens of a text before a position in characters, for a tokenizer without offsets.

        `ids` are the tokens of the whole text.
        """
        if border == len(text):
            return len(ids)
        ids_before = self.piece(text[:border])
        if list(ids[: len(ids_before)]) != list(ids_before):
            name = getattr(self.tokenize, "__name__", type(self.tokenize).__name__)
            raise ValueError(
                f"{name} reads {text[max(0, border - 20) : border]!r} differently when {text[border : border + 20]!r} "
                "follows. Pass a fast tokenizer of transformers, or end the prompt where a token ends"
            )
        return len(ids_before)


def joined(pieces: Sequence[Ids]) -> torch.Tensor:
    """Concatenate pieces of ids: int64 (n,).

    For lists, this is three times as fast as `torch.tensor`.
    """
    return torch.from_numpy(np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces]))


def utf8(text: str) -> NDArray[np.uint8]:
    """Return one id per byte, 0 to 255."""
    return np.frombuffer(text.encode(), dtype=np.uint8)


BYTES = Tokenizer(utf8, bos=257, eos=258, pad=256, name="bytes")  # 259 ids in all


def as_tokenizer(tokenizer: Tokenizer | Tokenize | None) -> Tokenizer:
    """Convert the argument of an encoder to a `Tokenizer`.

    None becomes `BYTES`. Other tokenizers get no special ids and pad with 0.
    """
    if tokenizer is None:
        return BYTES
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)


_END_TOKEN = re.compile(r"end|eo[stm]|/s>|sep")  # matches the texts of tokens that end a document or a turn


def _ids(encoded: Any) -> Ids:
    """Return the ids of what a tokenizer's `encode` returned: ids, or an object with the attribute `ids`."""
    ids: Ids = getattr(encoded, "ids", encoded)
    return ids


def _identity(tokenize: Any) -> str:
    """Return a hash of the tokenizer's contents, or the name of the function or class."""
    if hasattr(tokenize, "backend_tokenizer"):  # transformers, whose calls may change truncation and padding
        return _rules_identity(tokenize.backend_tokenizer, {"truncation": None, "padding": None})
    if hasattr(tokenize, "to_str"):  # tokenizers
        return _rules_identity(tokenize, {})
    if hasattr(tokenize, "serialized_model_proto"):  # SentencePiece
        return _hash(tokenize.serialized_model_proto())
    if hasattr(tokenize, "_mergeable_ranks"):  # tiktoken
        return _tiktoken_identity(tokenize)
    if hasattr(tokenize, "get_vocab"):  # slow tokenizers of transformers
        return _hash(json.dumps([type(tokenize).__qualname__, sorted(tokenize.get_vocab().items())]).encode())
    function_or_class: Any = tokenize if hasattr(tokenize, "__qualname__") else type(tokenize)
    return f"{function_or_class.__module__}.{function_or_class.__qualname__}"


def _rules_identity(tokenizer: Any, overrides: dict[str, None]) -> str:
    """Return a hash of the JSON of a tokenizer of the package `tokenizers`.

    `overrides` has the fields to replace by null, because calls may change them.
    """
    return _hash(json.dumps(json.loads(tokenizer.to_str()) | overrides, sort_keys=True).encode())


def _tiktoken_identity(encoding: Any) -> str:
    """Return a hash of the pattern, the special tokens and the vocabulary of an encoding."""
    state = copy.copy(encoding).__getstate__()  # the state of an encoding in tiktoken's registry is only its name
    digest = xxh3_128(repr((state["pat_str"], sorted(state["special_tokens"].items()))).encode())
    for token, rank in sorted(state["mergeable_ranks"].items()):
        digest.update(f"{token.hex()} {rank}\n".encode())
    return f"xxh3_128:{digest.hexdigest()}"


def _hash(content: bytes) -> str:
    return f"xxh3_128:{xxh3_128_hexdigest(content)}"
