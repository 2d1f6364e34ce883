"""Functions that return pipeline values: `read`, `mixture`, `blend` and `join`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.on_error import OnError
from savable_pipeline.core.weights import Weight
from savable_pipeline.data.shards.paths import Shards, as_names
from savable_pipeline.data.shards.selection import Subset
from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.data.stores.ranges import RangeColumns
from savable_pipeline.data.stores.sample_names import Classes
from savable_pipeline.stages.advice import advise, check_count, check_name
from savable_pipeline.stages.blending.blend import Blend, By, Until, check_blend
from savable_pipeline.stages.blending.schedule import Schedule
from savable_pipeline.stages.pipeline_value import (
    ALONE,
    AnyPipeline,
    ItemPipeline,
    Pipeline,
    PipelineStep,
    SamplePipeline,
    unlike_defaults,
)
from savable_pipeline.stages.readers.join import Join, Missing, check_join
from savable_pipeline.stages.readers.lane_shares import check_epochs
from savable_pipeline.stages.readers.reader import check_samples
from savable_pipeline.stages.readers.readers import Readable, reader_of
from savable_pipeline.stages.stage import Stage

_ADVICE = {  # advice by the name of an option that other libraries have; {} is the value of the option
    "batch_size": "Use .batch({}).",
    "buffer_size": "Use .shuffle({}).",
    "repeat": "Use epochs=.",
    "seed": "Use sp.SavableLoader(pipeline, seed={}).",
    "shuffle_buffer": "Use .shuffle({}).",
    "transform": "Use .map({}).",
}


@advise(_ADVICE)
def read(
    path: Readable,
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
    unpacked_bytes: int = UNPACKED_BYTES,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    columns: Sequence[str] | None = None,
    key: str | None = None,
    ranges: RangeColumns | None = None,
    length: int | None = None,
    stride: int | None = None,
    dtype: str | None = None,
    validate_hash: str | None = None,
    key_end: Literal["first", "last"] | None = None,
    classes: Classes = False,
    file_fields: Sequence[str] | None = None,
    files_from: str | os.PathLike[str] | None = None,
    format: str | None = None,
    per_sample: Sequence[Any] = (),
    replace: Mapping[Any, Any] | None = None,
) -> SamplePipeline:
    """Start a pipeline of the samples in files of any format.

    They are tars, tables (Parquet, Arrow, JSONL, CSV, lists of JSON), token files, folders of MDS or LitData, or a
    folder of photos or other plain files. The format is recognized by the names of the files, which are opened when the
    pipeline is used.

    Args:
        path: A folder (with its subfolders), a glob, a brace pattern (`{000..099}.tar`), one file, a URL (s3, gs, az,
            http, https, hf), or a list of these; or a `custom.RecordStore`, or a function that builds one.
        split: Name in `.nv-meta/split.yaml`. None: all samples.
        subset: Fraction of the samples (0.1), range of fractions (0.1, 0.3), or count.
        epochs: Epochs of a pass; 2.5 ends in the middle of the third. None: endless in a loader, one without a loader.
        shuffle: Permute shards and blocks in each epoch: see `sp.TarShardReader`. Add `.shuffle(size)` to mix blocks.
        block_size: Samples that stay together. None: 8.
        window: The number of shards whose blocks are mixed; None: all.
        on_error: For missing or unreadable shards: "raise", "skip" or a function.
        quarantine: File that gets a line of JSON for each skipped sample.
        exclude: File that names samples to leave out.
        unpacked_bytes: The most bytes to which a compressed part, or a shard of MDS and LitData, may expand.
        cache: Tars behind a URL: the folder of the cache.
        cache_bytes: The limit of the cache; for Parquet, Arrow, MDS and LitData the most bytes of decoded data.
        columns: Parquet and Arrow: the columns to read. None: all.
        key: All but tars and tokens: the column or field with a sample's key.
        ranges: Parquet, Arrow and JSONL: parts that are ranges of long audio or video files.
        length: Token files: the tokens of a window. None: a sample is a document.
        stride: Token files: the number of tokens from the start of a window to the next start.
        dtype: Token files without a header: the type of the tokens, such as "uint16".
        validate_hash: MDS: the algorithm of the hashes in index.json that shards must have, such as "sha1".
        key_end: A folder of files: the dot of a name that ends the key; see `custom.FolderReader`.
        classes: A folder of files: True adds the part `cls`, the number of a sample's top folder. The numbers are the
            positions in a list of names, a file of names, or the sorted folders of the training split, if given.
        file_fields: CSV, JSON and JSONL: the columns or fields that name files; see `custom.CsvReader`.
        files_from: The folder of these files. None: the folder of the table.
        format: The name of the files' format, such as "folder" or "jsonl". None: it is recognized.
        per_sample: A webdataset pipeline: your own stages that handle one sample at a time.
        replace: A webdataset pipeline: your own stages, each with the stage of webdataset as which it is treated.

    Returns:
        A pipeline of samples. An option that does not apply to the files raises ValueError when the pipeline is used.

    Example:
        >>> samples = sp.read("shards/", shuffle=False)
        >>> len(samples)
        400
        >>> for sample in samples.take(1):
        ...     print(sample.key, list(sample), sample.json())
        s000000 ['json', 'txt', 'png'] {'id': 0}
    """
    options = {name: value for name, value in locals().items() if name not in ("path", "per_sample", "replace")}
    if is_webdataset(path):
        from savable_pipeline.stages.webdataset_chain import read_webdataset

        changed = unlike_defaults(read, options)
        return read_webdataset(path, read, changed, per_sample=per_sample, replace=replace or {})  # type: ignore[return-value]
    check_name("read", "split", split)
    check_samples("read", subset, block_size, window, on_error)
    check_epochs("read", epochs)
    source: Any = path if callable(path) or not isinstance(path, Iterable | os.PathLike) else as_names(path)
    return SamplePipeline(PipelineStep("read", _read, (source,), unlike_defaults(read, options)))


def is_webdataset(value: object) -> bool:
    """Return whether a value is a pipeline or a dataset of webdataset or wids.

    Neither package is imported.
    """
    classes = type(value).__mro__ if not isinstance(value, type) else ()
    return any(each.__module__.split(".")[0] in ("webdataset", "wids") for each in classes)


def _read(lane: Lane, one_pass: bool, path: Readable, **options: Any) -> Stage:
    """Build the reader of one lane. With `one_pass`, `epochs` is 1 by default instead of endless."""
    if one_pass and options.get("epochs") is None:
        options["epochs"] = 1
    return reader_of(path, lane, options)


def mixture(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    shuffle: bool = True,
    block_size: int | None = None,
    window: int | None = 128,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    exclude: str | os.PathLike[str] | None = None,
    stride: int = 8,
) -> SamplePipeline:
    """Start a pipeline of the datasets that a YAML file lists.

    The file also has their weights or repetitions; see `custom.read_mixture`.

    Args:
        path: The YAML file.
        split: The split of a metadataset of Megatron-Energon.
        shuffle: As for `sp.read`, like the other arguments.
        block_size: Samples that stay together.
        window: The number of shards whose blocks are mixed.
        cache: The folder of the cache.
        cache_bytes: The limit of the cache.
        exclude: File that names samples to leave out.
        stride: As for `sp.Blend`.

    Returns:
        A pipeline of samples.

    Example:
        >>> _ = Path("weights.yaml").write_text(
        ...     "sources: {web: {path: shards/0.tar, weight: 3}, books: {path: shards/1.tar, weight: 1}}"
        ... )
        >>> [sample.shard for sample in sp.mixture("weights.yaml").take(8)].count("0.tar")
        6
    """
    options = {name: value for name, value in locals().items() if name not in ("path", "split")}
    check_name("mixture", "split", split)
    check_count("mixture", "stride", stride)
    return SamplePipeline(PipelineStep("mixture", _mixture, (path, split), unlike_defaults(mixture, options)))


def _mixture(lane: Lane, one_pass: bool, path: Any, split: str | None, **options: Any) -> Stage:
    """Build the `Blend` of one lane. With `one_pass`, it ends after one pass, unless its weights are a schedule."""
    from savable_pipeline.stages.blending.mixture_file import read_mixture  # imported late, because it imports yaml

    datasets = lane.shared(("mixture", str(path), split), lambda: read_mixture(path, split=split))
    return datasets.samples(lane, epochs=1 if one_pass and not datasets.is_scheduled else None, **options)


def blend(
    sources: Mapping[str, AnyPipeline],
    *,
    weights: Mapping[str, Weight] | Schedule | None = None,
    by: By = "samples",
    until: Until = "all",
    stride: int = 8,
) -> AnyPipeline:
    """Merge pipelines by weight, all of samples or all of items: `sp.Blend`.

    Args:
        sources: Pipelines by name.
        weights: As for `sp.Blend`, like the other arguments.
        by: What is counted: "samples" or "tokens".
        until: When the blend ends.
        stride: After how many draws the shares are exact.

    Returns:
        A pipeline of the same kind as the sources.

    Raises:
        ValueError: The sources are not all of one kind, or there are none.

    Example:
        >>> web, books = sp.read("shards/0.tar"), sp.read("shards/1.tar")
        >>> mixed = sp.blend({"web": web, "books": books}, weights={"web": 3, "books": 1})
        >>> [sample.shard for sample in mixed.take(8)].count("0.tar")
        6
    """
    classes: set[type[Pipeline]] = {type(each) for each in sources.values()}
    if len(classes) != 1 or not classes <= {SamplePipeline, ItemPipeline}:
        found = {name: getattr(each, "_yields", type(each).__name__) for name, each in sources.items()}
        raise ValueError(f"blend takes a dict of pipelines, all of samples or all of items, not {found}")
    check_blend(sources, weights, by, until, stride)
    steps = {name: each.step for name, each in sources.items()}
    pipeline_class: Any = classes.pop()
    return pipeline_class(PipelineStep.of(Blend, steps, weights=weights, by=by, until=until, stride=stride))  # type: ignore[no-any-return]


def join(
    source: SamplePipeline, stores: Mapping[str, Shards], *, on: Literal["key"] = "key", missing: Missing = "skip"
) -> SamplePipeline:
    """Add the parts of other datasets to each sample by its key: `custom.Join`.

    Args:
        source: A pipeline of samples.
        stores: Datasets by a name of your choice.
        on: As for `custom.Join`, like `missing`.
        missing: What happens to a sample whose key is missing in a dataset.

    Returns:
        A pipeline of samples.

    Example:
        >>> joined = sp.join(sp.read("shards/", shuffle=False), {"other": "shards/1.tar"})
        >>> joined.take(1)[0]["other.txt"]
        b'picture 100'
    """
    check_join(stores, on, missing)
    return SamplePipeline(PipelineStep.of(Join, {ALONE: source.step}, stores, on=on, missing=missing))
