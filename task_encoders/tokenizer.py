"""`Tokenizer`: one face for whatever turns text into token ids; UTF-8 bytes where nothing was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

Ids: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]


class HasEncode(Protocol):
    """A tokenizer of Hugging Face `tokenizers` or `transformers`, of tiktoken or of SentencePiece."""

    def encode(self, text: str, /) -> Any:
        """The token ids, or an object that holds them as `ids`."""


Tokenize: TypeAlias = HasEncode | Callable[[str], Ids]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer and the special ids to put around a text; what the tokenizer adds by itself stays.

    `name` is what a saved state knows it by. By default that is a hash of the vocabulary and rules where the
    tokenizer can print them (Hugging Face), else the name of the function or class. Give one where that says
    too little: after changing a function, or for one of several vocabularies of a class.
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
        """The tokens of a text, int64 (n,); where it has none, n = 0 and neither `bos` nor `eos` is added."""
        ids = self._ids(text) if text else ()
        if len(ids) == 0:
            return torch.empty(0, dtype=torch.int64)
        before, after = ([] if special is None else [special] for special in (self.bos, self.eos))
        parts = [np.asarray(part, dtype=np.int64) for part in (before, ids, after)]
        return torch.from_numpy(np.concatenate(parts))  # from a list, three times as fast as torch.tensor

    def settings(self) -> dict[str, Any]:
        """The identity of the tokenizer and its special ids, for `TaskEncoder.settings`."""
        name = self.name or _identity(self.tokenize)
        return {"tokenizer": name, "bos": self.bos, "eos": self.eos, "pad": self.pad}

    def _ids(self, text: str) -> Ids:
        encode: Any = getattr(self.tokenize, "encode", self.tokenize)
        encoded = encode(text)
        ids: Ids = getattr(encoded, "ids", encoded)
        return ids


def utf8(text: str) -> NDArray[np.uint8]:
    """One id a byte, 0 to 255."""
    return np.frombuffer(text.encode(), dtype=np.uint8)


BYTES = Tokenizer(utf8, bos=257, eos=258, pad=256, name="bytes")  # 259 ids in all


def as_tokenizer(tokenizer: Tokenizer | Tokenize | None) -> Tokenizer:
    """What an encoder was given: None is `BYTES`; a bare tokenizer gets no special ids and pads with 0."""
    if tokenizer is None:
        return BYTES
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)


def _identity(tokenize: Tokenize) -> str:
    printable = getattr(tokenize, "backend_tokenizer", tokenize)  # where transformers keeps the printable one
    if hasattr(printable, "to_str"):
        return f"xxh3_128:{xxh3_128_hexdigest(printable.to_str().encode())}"
    named: Any = tokenize if hasattr(tokenize, "__qualname__") else type(tokenize)
    return f"{named.__module__}.{named.__qualname__}"
