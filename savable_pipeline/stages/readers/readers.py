"""The readers of tars, of lines and of tokens: what each opens, and its own settings."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Unpack

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.dataset.opening import dataset_of, open_dataset
from savable_pipeline.data.shards.paths import Shards, Unlistable, as_names
from savable_pipeline.data.stores.jsonl_store import JsonlStore
from savable_pipeline.data.stores.token_store import TokenStore, check_token_settings
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderData, ReaderSettings


class TarShardReader(RecordReader):
    """Gives the samples of a lane's share of tar shards; the parts of a sample are read when they are asked for.

    `shards` is a folder (with its subfolders), a glob, a brace pattern such as `{000..099}.tar`, one tar, a URL, or a
    list of these. `epochs` is the number of epochs in one pass, of which the last may be a part (2.5: the first half of
    the third one's order); None repeats for ever. `shuffle` permutes the shards, and blocks of `block_size` samples
    within windows of `window` shards (None: all shards), anew each epoch and alike for all lanes; `block_size=1,
    window=None` is a full shuffle. Without `shuffle`, blocks in file order are dealt to the lanes in turn, alike in
    every pass. `block_size=None` is 8 samples; in file order it is a batch of the `Batcher` downstream where each
    sample makes one row (a `one_to_one` encoder, no packing, no `Blend`): then the slots of the run come in file order.
    Elsewhere they cannot.

    Shards behind a URL (s3, gs, az, http, https) are read through the folder `cache` (default: `SAVABLE_CACHE`, or the
    user's cache folder), which all processes of a node share. It takes at most `cache_bytes` bytes of its disk
    (default: `SAVABLE_CACHE_BYTES`, or 256 GiB but no more than 80 % of the free space).

    `split` is the name of a split in the dataset's `.nv-meta/split.yaml`, whose order of shards holds without
    `shuffle`. `subset` is a share of the samples (0.1), a range of shares (0.1, 0.3), or a count. It selects the same
    samples in every run and epoch, from every shard; ranges that do not overlap have no sample in common.

    `on_error` decides about shards that are missing, damaged, changed since they were indexed, or unreadable: "raise",
    "skip" to leave out their unreadable samples, or a function that gets the `ShardError` and returns True to skip.
    Unless it is "raise", the index keeps a changed shard as it was until `savable index` is run. Samples skipped here
    or by `Encode` are counted, and written to the file `quarantine` as lines of JSON.

    `exclude` is a file of samples that must not be given: a key in each line, of all samples that have it, or a line of
    JSON with "shard" and "key", such as `quarantine` gets. All samples are dealt and shuffled as without it, and
    `Encode`, or a `Batcher` of samples, leaves these out, counted as skipped: no other sample moves, up to packing.
    Your own stages before that, and `next(reader)`, are given them. `allow={"exclude"}` loads a state under another
    file: what buffers and packs of the state hold of these samples is left out. It is read once, and may not change
    while a run goes on; plain keys are found by an index of all keys.

    Raises ValueError for wrong settings, `ShardError` if there are no samples or no such split, `RemoteError` if a
    server cannot be reached, and `SavableError` if an endless lane reads for very long without a batch.

    >>> reader = sp.TarShardReader("shards/", sp.Lane(index=1, count=2), shuffle=False, epochs=1)
    >>> sample = next(reader)  # lane 1 gets the second block of 8 samples
    >>> sample.key, list(sample), sample.json()
    ('s000008', ['json', 'txt', 'png'], {'id': 8})
    >>> reader.ref, reader.fetch((399, 0, 0)).key  # (index, epoch, part)
    ((8, 0, 0), 's000399')
    """

    def __init__(
        self,
        shards: Shards,
        lane: Lane,
        *,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        self.files = names = as_names(shards)
        opening = partial(open_dataset, names, cache=cache, cache_size=cache_bytes)
        super().__init__(ReaderData("dataset", names, opening, (cache, cache_bytes)), lane, **settings)


class JsonlReader(RecordReader):
    """Gives the lines of a lane's share of JSONL files as samples, as `sp.TarShardReader` does those of tars.

    `files` is a folder (with its subfolders; `.jsonl` and `.ndjson`), a glob, a brace pattern, one file, or a list of
    these. The part `json` of a sample is its line, so that `sample.json()` is the object. The fields of the object are
    parts too, called as the field: a text as it is, so that `sample.text("caption")` decodes it and `sample.text()`
    finds `txt`, `text`, `caption` or `md`; anything else as JSON. Listed are the fields that are texts. `key` names the
    field with a sample's key; without it the key is `FILE:ROW`. Blank lines are no samples.

    Where the lines begin is indexed on first use. `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
    `on_error`, `quarantine` and `exclude` are those of `TarShardReader`.

    Files may lie behind URLs, as those of `sp.ParquetReader`.

    Raises ValueError for wrong settings; `ShardError` for damaged files, and for compressed files (the error names the
    command that unpacks); `RemoteError` if a server cannot be reached.

    >>> _ = Path("lines.jsonl").write_text('{"id": 0, "text": "a"}\\n{"id": 1, "text": "b"}\\n')
    >>> sample = next(sp.JsonlReader("lines.jsonl", sp.Lane(), shuffle=False))
    >>> sample.key, list(sample), sample.json(), sample.text()
    ('lines.jsonl:0', ['json', 'text'], {'id': 0, 'text': 'a'}, 'a')
    """

    def __init__(
        self, files: Shards, lane: Lane, *, key: str | None = None, **settings: Unpack[ReaderSettings]
    ) -> None:
        self.files, self.key = as_names(files), key
        super().__init__(ReaderData("jsonl", self.files, partial(dataset_of, self._opened), (key,)), lane, **settings)

    def _opened(self, tolerant: bool, unlistable: Unlistable) -> JsonlStore:
        return JsonlStore(self.files, key=self.key, tolerant=tolerant, unlistable=unlistable)

    def settings(self) -> dict[str, Any]:
        """Those of every reader; the key."""
        return {**super().settings(), "key": self.key}


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
        **settings: Unpack[ReaderSettings],
    ) -> None:
        check_token_settings(length, stride, dtype)
        self.files = as_names(files)
        self.windows: dict[str, Any] = {"length": length, "stride": stride, "dtype": dtype}
        data = ReaderData("tokens", self.files, partial(dataset_of, self._opened), (length, stride, dtype))
        super().__init__(data, lane, **settings)

    def _opened(self, tolerant: bool, unlistable: Unlistable) -> TokenStore:
        return TokenStore(self.files, **self.windows, tolerant=tolerant, unlistable=unlistable)

    def settings(self) -> dict[str, Any]:
        """Those of every reader; the windows."""
        return {**super().settings(), **self.windows}
