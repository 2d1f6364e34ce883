"""`Tokenizer`: one class around every kind of tokenizer; UTF-8 bytes if none is given."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_hexdigest

Ids: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]


class HasEncode(Protocol):
    """A tokenizer of Hugging Face `tokenizers` or `transformers`, of tiktoken or of SentencePiece."""

    def encode(self, text: str, /) -> Any:
        """The token ids, or an object that holds them as `ids`."""


Tokenize: TypeAlias = HasEncode | Callable[[str], Ids]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer with the special ids to put around a text; those that it adds by itself stay.

    Args:
        tokenize: A function from text to token ids, or an object with `encode(text)` as of Hugging Face, tiktoken or
            SentencePiece.
        bos: The id in front of a text, if any.
        eos: The id behind a text, if any.
        pad: The id that fills rows; it is never learned.
        name: The tokenizer's name in a saved state. By default a hash of its vocabulary and rules where it shows them
            (Hugging Face, tiktoken, SentencePiece), else the name of the function or class. Give one where that says
            too little: after changing a function, or for one of several vocabularies of a class.

    Raises:
        ValueError: `tokenize` is neither a function nor such an object.

    Example:
        ```python
        from task_encoders import Tokenizer
        tokenizer = Tokenizer(lambda text: [len(word) for word in text.split()], bos=100, eos=101)
        tokenizer("a cat sleeps")   # tensor([100,   1,   3,   6, 101])
        tokenizer("")               # tensor([], dtype=torch.int64)
        Tokenizer("gpt2")           # ValueError: a tokenizer is a function from str to token ids or ...
        ```
    """

    tokenize: Tokenize
    bos: int | None = None
    eos: int | None = None
    pad: int = 0  # never a target: labels are masked where the padding is
    name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tokenize, str) or not (callable(self.tokenize) or hasattr(self.tokenize, "encode")):
            raise ValueError(
                f"a tokenizer is a function from str to token ids or an object with encode(text), not "
                f"{self.tokenize!r}; load it first, or pass None for bytes"
            )

    def __call__(self, text: str) -> torch.Tensor:
        """Return the tokens of a text, int64 (n,); for an empty text n = 0, without `bos` and `eos`.

        tiktoken reads special tokens in it as text: a document may contain `<|endoftext|>`.
        """
        encode: Any = getattr(self.tokenize, "encode", self.tokenize)
        encode = getattr(self.tokenize, "encode_ordinary", encode)
        ids = _ids(encode(text)) if text else ()
        if len(ids) == 0:
            return torch.empty(0, dtype=torch.int64)
        return joined([self.before, ids, self.after])

    def piece(self, text: str) -> Ids:
        """Return the ids of a piece of a longer text, with nothing added.

        Args:
            text: The piece; special tokens written in it are recognized.
        """
        encode: Any = getattr(self.tokenize, "encode", self.tokenize)
        if not text:
            return ()
        if hasattr(self.tokenize, "encode_ordinary"):  # tiktoken
            return _ids(encode(text, allowed_special="all"))
        if hasattr(self.tokenize, "get_vocab"):  # Hugging Face
            return _ids(encode(text, add_special_tokens=False))
        return _ids(encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with that of special tokens.

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
        """Return the texts of the tokenizer's special tokens; an empty set where they are not known."""
        tokenize: Any = self.tokenize
        if hasattr(tokenize, "special_tokens_set"):  # tiktoken
            return set(tokenize.special_tokens_set)
        if hasattr(tokenize, "all_special_tokens"):  # transformers
            return set(map(str, tokenize.all_special_tokens))
        if hasattr(tokenize, "get_added_tokens_decoder"):  # tokenizers
            return {token.content for token in tokenize.get_added_tokens_decoder().values() if token.special}
        return set()

    @property
    def before(self) -> list[int]:
        """The ids that a text begins with: `bos` or none."""
        return [] if self.bos is None else [self.bos]

    @property
    def after(self) -> list[int]:
        """The ids that a text ends with: `eos` or none."""
        return [] if self.eos is None else [self.eos]

    def settings(self) -> dict[str, Any]:
        """Return the identity of the tokenizer and its special ids, for `TaskEncoder.settings`."""
        name = self.name or _identity(self.tokenize)
        return {"tokenizer": name, "bos": self.bos, "eos": self.eos, "pad": self.pad}


def joined(pieces: Sequence[Ids]) -> torch.Tensor:
    """Pieces of ids end to end, int64 (n,): from lists three times as fast as `torch.tensor`."""
    return torch.from_numpy(np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces]))


def utf8(text: str) -> NDArray[np.uint8]:
    """One id a byte, 0 to 255."""
    return np.frombuffer(text.encode(), dtype=np.uint8)


BYTES = Tokenizer(utf8, bos=257, eos=258, pad=256, name="bytes")  # 259 ids in all


def as_tokenizer(tokenizer: Tokenizer | Tokenize | None) -> Tokenizer:
    """The argument of an encoder as a `Tokenizer`: None is `BYTES`; a bare one gets no special ids and pads with 0."""
    if tokenizer is None:
        return BYTES
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)


def _ids(encoded: Any) -> Ids:
    ids: Ids = getattr(encoded, "ids", encoded)
    return ids


def _identity(tokenize: Any) -> str:
    """A hash of the tokenizer's contents, or a name."""
    if hasattr(tokenize, "backend_tokenizer"):  # transformers, whose calls set truncation and padding in passing
        return _rules_identity(tokenize.backend_tokenizer, {"truncation": None, "padding": None})
    if hasattr(tokenize, "to_str"):  # tokenizers
        return _rules_identity(tokenize, {})
    if hasattr(tokenize, "serialized_model_proto"):  # SentencePiece
        return _hashed(tokenize.serialized_model_proto())
    if hasattr(tokenize, "_mergeable_ranks"):  # tiktoken
        return _tiktoken_identity(tokenize)
    if hasattr(tokenize, "get_vocab"):  # transformers, those written in Python
        return _hashed(json.dumps([type(tokenize).__qualname__, sorted(tokenize.get_vocab().items())]).encode())
    named: Any = tokenize if hasattr(tokenize, "__qualname__") else type(tokenize)
    return f"{named.__module__}.{named.__qualname__}"


def _rules_identity(printable: Any, instead: dict[str, None]) -> str:
    return _hashed(json.dumps(json.loads(printable.to_str()) | instead, sort_keys=True).encode())


def _tiktoken_identity(encoding: Any) -> str:
    parts = copy.copy(encoding).__getstate__()  # as it is pickled: a copy, since one that tiktoken knows is but a name
    hashed = xxh3_128(repr((parts["pat_str"], sorted(parts["special_tokens"].items()))).encode())
    for token, rank in sorted(parts["mergeable_ranks"].items()):
        hashed.update(f"{token.hex()} {rank}\n".encode())
    return f"xxh3_128:{hashed.hexdigest()}"


def _hashed(content: bytes) -> str:
    return f"xxh3_128:{xxh3_128_hexdigest(content)}"
