"""`TarShardReader`: reads samples from tar shards in WebDataset layout, on a disk or behind a URL."""

from __future__ import annotations

import os

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError
from savable_pipeline.data.dataset.opening import open_dataset
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.data.shards.selection import Subset
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.reader_settings import ReaderSettings


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
        split: str | None = None,
        subset: Subset | None = None,
        epochs: int | float | None = None,
        shuffle: bool = True,
        block_size: int | None = None,
        window: int | None = 128,
        on_error: OnError = "raise",
        quarantine: str | os.PathLike[str] | None = None,
        exclude: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.files = names = as_names(shards)
        self._begin_reading(
            lane,
            ReaderSettings(split, subset, epochs, shuffle, block_size, window, on_error, exclude),
            ("dataset", names, on_error, quarantine, cache, cache_bytes),
            lambda: open_dataset(names, on_error=on_error, quarantine=quarantine, cache=cache, cache_size=cache_bytes),
        )
