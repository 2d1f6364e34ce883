"""The readers of tars, of lines and of tokens: what each opens, and its own settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Unpack

from savable_pipeline.core.lane import Lane
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.data.stores.source import RangeColumns
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderData, ReaderSettings, named_ranges


class TarShardReader(RecordReader):
    """Yields the samples of a lane's share of tar shards. Parts of a sample are read when they are asked for.

    Args:
        shards: Folder (with subfolders), glob, brace pattern (`{000..099}.tar`), tar, URL (s3, gs, az, http, https,
            hf), or a list of these.
        lane: The pipeline's lane.
        cache: Folder for remote shards, shared by a node. None: `SAVABLE_CACHE`, or the user's cache folder.
        cache_bytes: Its limit. None: `SAVABLE_CACHE_BYTES`, or 256 GiB but at most 80 % of the free space.
        split: Name in `.nv-meta/split.yaml`, whose order of shards holds without `shuffle`. None: all samples.
        subset: Share of the samples (0.1), range of shares (0.1, 0.3), or count: the same ones in every run; disjoint
            ranges share none.
        epochs: Epochs of a pass, 2.5 with half of the third. None: endless.
        shuffle: Permute shards and blocks in each epoch; else deal blocks in file order to the lanes in turn.
        block_size: Samples that stay together. None: 8; in file order a `Batcher`'s batch where each sample makes one
            row (no packing, no `Blend`): only then slots come in file order.
        window: Shards whose blocks are mixed; None: all. `block_size=1, window=None` shuffles fully.
        on_error: For missing, damaged, changed or unreadable shards: "raise", "skip" their unreadable samples, or a
            function of the `ShardError`, True to skip. Unless "raise", a changed shard's index stays until `savable
            index`.
        quarantine: File that gets a line of JSON for each sample skipped here or by `Encode`.
        exclude: File of samples to leave out, by lines: a key, or JSON with "shard" and "key". `Encode`, or a `Batcher`
            of samples, drops and counts them, stages before get them; other samples keep their places, up to packing.
            Must not change during a run; `allow={"exclude"}` loads a state under another.
        unpacked_bytes: Most bytes that a compressed part becomes, or of MDS and LitData a shard, chunk, record.
            Default: 1 GiB.

    Raises:
        ValueError: A setting is wrong.
        ShardError: No samples, or no such split.
        RemoteError: A server cannot be reached.
        SavableError: An endless lane reads very long without a batch.

    Example:
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
        data = ReaderData.of_files("tar", names, lane, (cache, cache_bytes), cache=(cache, cache_bytes))
        super().__init__(data, lane, **settings)


class JsonlReader(RecordReader):
    r"""Yields the lines of a lane's share of JSONL files as samples, in the order of `sp.TarShardReader`.

    The part `json` is the line; each field of the object is a part too: a text unchanged, anything else as JSON; a null
    is no part. Blank lines are no samples. The places of lines are indexed on first use.

    Args:
        files: A folder (with its subfolders; `.jsonl` and `.ndjson`), a glob, a brace pattern, one file, a URL, or a
            list of these.
        lane: The lane of the pipeline.
        key: The field with a sample's key. None: the key is `FILE:ROW`.
        ranges: As for `custom.ParquetReader`, of fields.
        file_fields: The fields that name files, as for `custom.JsonReader`: then the parts are `json` and these files.
            None: there are none.
        files_from: As for `custom.CsvReader`.
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong.
        ShardError: A file is damaged, or compressed (the error names the command that unpacks it).
        RemoteError: A server cannot be reached.

    Example:
        >>> _ = Path("lines.jsonl").write_text('{"id": 0, "text": "a"}\n{"id": 1, "text": "b"}\n')
        >>> sample = next(custom.JsonlReader("lines.jsonl", sp.Lane(), shuffle=False))
        >>> sample.key, list(sample), sample.json(), sample.text()
        ('lines.jsonl:0', ['json', 'id', 'text'], {'id': 0, 'text': 'a'}, 'a')
    """

    def __init__(
        self,
        files: Shards,
        lane: Lane,
        *,
        key: str | None = None,
        ranges: RangeColumns | None = None,
        file_fields: Sequence[str] | None = None,
        files_from: str | os.PathLike[str] | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        if file_fields is None and files_from is not None:
            raise ValueError("JsonlReader: files_from is for the fields that file_fields names")
        self.files, self.key, self.ranges = as_names(files), key, named_ranges(ranges)
        self.fields: dict[str, Any] = {} if file_fields is None else {"file_fields": [*file_fields]}
        options = (key, files_from, *map(repr, [*self.ranges.values(), *self.fields.values()]))
        given = {**self.ranges, **self.fields, **({} if files_from is None else {"files_from": files_from})}
        data = ReaderData.of_files("jsonl", self.files, lane, options, key=key, **given)
        super().__init__(data, lane, **settings)

    def settings(self) -> dict[str, Any]:
        """The settings of every reader, the key, and the ranges and fields of files if there are any."""
        return {**super().settings(), "key": self.key, **self.ranges, **self.fields}


class TokenReader(RecordReader):
    """Yields documents, or windows, of a lane's share of token files as samples, in the order of `sp.TarShardReader`.

    - `.bin` with Megatron's `.idx` beside it: a sample is a document;
    - `.npy`, of one dimension or of two (a sample is a row); never unpickled;
    - `.bin` alone, and `.npy` without a header, as OLMo-core writes them: flat, of the type `dtype`.

    A sample has one part: `sample.array("tokens")` is an array (tokens,) of the file's own type.

    Args:
        files: A folder (with its subfolders), a glob, a brace pattern, one file, a URL, or a list of these; an `.idx`
            is cached whole.
        lane: The lane of the pipeline.
        length: Tokens of a window, across documents; the rest at the end of a file is in no window. None: no windows.
        stride: Tokens from the start of a window to the next: `length=2049, stride=2048` makes inputs and labels of
            2048. None: `length`.
        dtype: Type of the tokens in flat files, such as "uint16".
        **settings: As for `sp.TarShardReader`: `split`, `subset`, `epochs`, `shuffle`, `block_size`, `window`,
            `on_error`, `quarantine`, `exclude` and `unpacked_bytes`.

    Raises:
        ValueError: A setting is wrong.
        ShardError: A file is damaged, or an `.idx` does not fit its `.bin`.
        RemoteError: A server cannot be reached.

    Example:
        >>> np.save("tokens.npy", np.arange(1000, dtype=np.uint16))
        >>> sample = next(custom.TokenReader("tokens.npy", sp.Lane(), length=5, stride=4, shuffle=False))
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
        from savable_pipeline.data.stores.token_store import check_token_settings  # here: the other readers need none

        check_token_settings(length, stride, dtype)
        self.files = as_names(files)
        self.windows: dict[str, Any] = {"length": length, "stride": stride, "dtype": dtype}
        data = ReaderData.of_files("tokens", self.files, lane, (length, stride, dtype), **self.windows)
        super().__init__(data, lane, **settings)

    def settings(self) -> dict[str, Any]:
        """The settings of every reader, and those of the windows."""
        return {**super().settings(), **self.windows}
