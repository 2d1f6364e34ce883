"""`TokenReader`: reads documents, or windows of tokens, from token files in place."""

from __future__ import annotations

import os
from typing import Any

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError
from savable_pipeline.data.dataset.kinds import open_store
from savable_pipeline.data.dataset.opening import dataset_of
from savable_pipeline.data.shards.paths import Shards, Unlistable, as_names
from savable_pipeline.data.shards.selection import Subset
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.token_store import check_token_settings
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderSettings


class TokenReader(RecordReader):
    """Gives the documents, or windows, of a lane's share of token files as samples, as `TarShardReader` those of tars.

    `files` is a folder (with its subfolders), a glob, a brace pattern, one file, or a list of these:

    - `.bin` with Megatron's `.idx` beside it: a sample is a document;
    - `.npy`, of one dimension or of two (a sample is a row); never unpickled;
    - `.bin` alone, and `.npy` without a header, as OLMo-core writes them: flat, of the type `dtype`, such as "uint16".

    With `length`, a sample is a window of that many tokens, whatever documents it crosses, and windows begin every
    `stride` tokens (None: `length`): `length=2049, stride=2048` gives inputs and labels of 2048. What is left at the
    end of a file is in no window. A sample has one part, `tokens`: `sample.array("tokens")` is an array of the file's
    own type, (tokens,). `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`, `on_error`, `quarantine` and
    `exclude` are those of `TarShardReader`.

    Files may lie behind URLs, as those of `sp.ParquetReader`; an `.idx` is kept in the cache whole.

    Raises ValueError for wrong settings, `ShardError` for damaged files and for an `.idx` that does not fit its `.bin`,
    `RemoteError` if a server cannot be reached.

    >>> np.save("tokens.npy", np.arange(1000, dtype=np.uint16))
    >>> sample = next(sp.TokenReader("tokens.npy", sp.Lane(), length=5, stride=4, shuffle=False))
    >>> sample.array("tokens"), sample.place
    (array([0, 1, 2, 3, 4], dtype=uint16), 'token 0')
    """

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
        length: int | None = None,
        stride: int | None = None,
        dtype: str | None = None,
        split: str | None = None,
        subset: Subset | None = None,
        epochs: int | float | None = None,
        shuffle: bool = True,
        block_size: int | None = None,
        window: int | None = 128,
        on_error: OnError = "raise",
        quarantine: str | os.PathLike[str] | None = None,
        exclude: str | os.PathLike[str] | None = None,
    ) -> None:
        self.files = names = as_names(files)
        check_token_settings(length, stride, dtype)
        self.length, self.stride, self.dtype = length, stride, dtype

        def opened(tolerant: bool, unlistable: Unlistable) -> RecordStore:
            return open_store("tokens", names, tolerant, unlistable, length=length, stride=stride, dtype=dtype)

        self._begin_reading(
            lane,
            ReaderSettings(split, subset, epochs, shuffle, block_size, window, on_error, exclude),
            ("tokens", names, length, stride, dtype, on_error, quarantine),
            lambda: dataset_of(opened, on_error=on_error, quarantine=quarantine),
        )

    def settings(self) -> dict[str, Any]:
        """Those of every reader; the windows."""
        return {**super().settings(), "length": self.length, "stride": self.stride, "dtype": self.dtype}
